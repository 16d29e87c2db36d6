"""Which layer owns rows, which selects among them, which only reads: V4.1's sharing as data.

A layer with a global memory reads the rows of a KV source and the selection of an index source,
each the nearest at or before it. From `config` alone; hand-made maps are checked by the same rules.
Source: released DeepSeek-V4.1 config.json and the released DeepInfer 0.1.0's start-up checks.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.rules import require


class Mode(enum.Enum):
    """What an attention layer does about the global memory."""

    WINDOW = "window"  # none: sliding window only
    FULL = "full"  # writes rows and index keys, scores all of them, selects
    REINDEX = "reindex"  # own index query over a source's keys, selects
    REUSE = "reuse"  # takes the latest selection


@dataclasses.dataclass(frozen=True)
class Layer:
    """The part one layer plays."""

    id: int
    ratio: int  # tokens per global row; 0 without a global memory
    mode: Mode
    kv_source: int | None  # whose rows it reads
    index_source: int | None  # whose selection it uses
    offers_candidates: bool = False  # its block scores limit the layers after it
    uses_candidates: bool = False


@dataclasses.dataclass(frozen=True)
class Topology:
    """All layers of the backbone, in order."""

    layers: tuple[Layer, ...]
    boundary: int  # first decoder layer


def topology(config: ModelConfig) -> Topology:
    """The topology of a configuration.

    Raises:
      ValueError: a rule of `check` is broken.
    """
    layers = tuple(_layer(config, i) for i in range(config.num_layers))
    made = Topology(layers, config.boundary_layer)
    check(config, made)
    return made


def _layer(config: ModelConfig, i: int) -> Layer:
    kv, index = config.kv_sources[i], config.index_sources[i]
    if kv is None:
        mode = Mode.WINDOW
    elif kv == i:
        mode = Mode.FULL
    else:
        mode = Mode.REINDEX if index == i else Mode.REUSE
    return Layer(
        id=i,
        ratio=config.compress_ratios[i],
        mode=mode,
        kv_source=kv,
        index_source=index,
        offers_candidates=i == config.candidate_source_layer_id,
        uses_candidates=i in config.candidate_user_layer_ids,
    )


def check(config: ModelConfig, made: Topology) -> None:
    """The five rules of cross-layer sharing.

    Raises:
      ValueError: naming the layer, the rule and the remedy.
    """
    for name in ("kv_source", "index_source"):
        _check_nearest(name, [getattr(layer, name) for layer in made.layers])
    for layer in made.layers:
        _check_refinement(made, layer)
        _check_boundary(made, layer)
        _check_agreement(made, layer)
        _check_candidates(config, made, layer)


def _check_nearest(name: str, sources: list[int | None]) -> None:
    """Rule 1: a source is its own, and a consumer's is the nearest before it (one segment)."""
    for i, source in enumerate(sources):
        if source is None:
            continue
        require(
            source <= i and sources[source] == source,
            f"layer {i} names {source} as its {name}; a source lies at or before its consumers and "
            "is its own source, so point it to one that does",
        )
        between = {s for s in itertools.islice(sources, source, i) if s is not None}
        require(
            between == {source} or source == i,
            f"layer {i} reads from {name} {source} past {sorted(between - {source})}; a consumer "
            "uses the nearest source before it, so point it there",
        )


def _check_refinement(made: Topology, layer: Layer) -> None:
    """Rule 2: all users of one selection read the rows it was made from."""
    if layer.index_source is None:
        return
    selector = made.layers[layer.index_source]
    require(
        selector.kv_source == layer.kv_source,
        f"layer {layer.id} uses the selection of {selector.id}, made from the rows of "
        f"{selector.kv_source}, but reads the rows of {layer.kv_source}; give it a selector of its "
        "own source",
    )


def _check_boundary(made: Topology, layer: Layer) -> None:
    """Rule 3: no decoder layer reads rows of the encoder."""
    if layer.kv_source is None:
        return
    require(
        (layer.id >= made.boundary) == (layer.kv_source >= made.boundary),
        f"layer {layer.id} reads the rows of {layer.kv_source} across the boundary at "
        f"{made.boundary}; make layer {made.boundary} a KV source",
    )


def _check_agreement(made: Topology, layer: Layer) -> None:
    """Rule 4: a consumer has its source's ratio."""
    for source in (layer.kv_source, layer.index_source):
        if source is None:
            continue
        ratio = made.layers[source].ratio
        require(
            ratio == layer.ratio,
            f"layer {layer.id} has ratio {layer.ratio} but its source {source} has {ratio}; rows "
            "of one source have one ratio",
        )


def _check_candidates(config: ModelConfig, made: Topology, layer: Layer) -> None:
    """Rule 5: candidates come from a layer that scored every row, of the same rows, and suffice."""
    if layer.offers_candidates:
        pool = config.candidate_topk_blocks * config.candidate_block_size
        require(
            layer.mode is Mode.FULL,
            f"candidate source {layer.id} is a {layer.mode.value} layer; only one that scores all "
            "rows can offer candidates",
        )
        require(
            pool >= config.index_topk,
            f"layer {layer.id} offers {pool} candidate rows for index_topk {config.index_topk}; "
            "raise candidate_topk_blocks",
        )
    if layer.uses_candidates:
        source = next((x for x in made.layers[: layer.id] if x.offers_candidates), None)
        require(
            source is not None and source.kv_source == layer.kv_source,
            f"layer {layer.id} uses candidates but no earlier layer of its rows "
            f"({layer.kv_source}) offers any; name a candidate source in its segment",
        )
