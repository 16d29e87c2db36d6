"""The backbone: embedded tokens through all layers, reading and writing one memory.

Layers below the boundary are the encoder, the others the decoder, whose only global memory the
boundary layer makes from the encoder's output. So of a prompt the decoder needs to compute just the
last `keep` tokens (`truncation`): "mask" computes all rows but hides decoder window rows before
`rows.kept_start`; "compact" computes only the last `keep` rows of a step past the boundary's own
projections. Both give the same kept rows.
Source: released DeepSeek-V4.1 `inference/model.py`; report, arXiv 2609.19969, sections 2.2, 3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, draft_keys, engram, experts, streams
from deepinfer_jax.model.compressor import remember
from deepinfer_jax.model.indexer import Selection, select
from deepinfer_jax.model.numerics import RELEASED, Angles, Numerics, frequencies, linear, rms_norm
from deepinfer_jax.model.rows import Rows, last, take
from deepinfer_jax.model.shares import Shares
from deepinfer_jax.model.topology import Layer, Mode, topology
from deepinfer_jax.parallel.mesh import ALONE, Parallel
from deepinfer_jax.rules import TRUNCATION_MODES, require
from pallas_kernels.choice import check_platform

M = TypeVar("M", bound=Memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a step makes; Q' = Q, or at most `keep` when compact."""

    hidden: jax.Array  # [S, Q', D] collapsed streams before the last norm; `logits` reads it
    rows: Rows  # the rows of `hidden`
    visits: jax.Array  # int32 [L, E] rows each expert got


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    rows: Rows,
    memory: M,
    *,
    truncation: str = "off",
    keep: int = 0,
    numerics: Numerics = RELEASED,
    parallel: Parallel = ALONE,
    kernels: str = "xla",
) -> tuple[Output, M]:
    """One step.

    Args:
      params: the tree of `declaration.model_parameters`.
      rows: the step's tokens; history before `rows.start` is in `memory`.
      memory: any `cache.memory.Memory`.
      truncation: "off", "mask" or "compact"; prompts only.
      keep: for "compact", how many last rows of each sequence pass the boundary; at least the rows
        from `rows.kept_start` on.
      parallel: the ranks that share experts and Engram tables, under `jax.shard_map`; `params` then
        hold this rank's part of them, `rows` and `memory` are this rank's own. Ranks of its
        `context` have the same rows and memory, divide the rows' work, and return the same.
      kernels: who attends and who multiplies by experts, one of `pallas_kernels.choice.KERNELS`.

    Raises:
      ValueError: `kernels` that do not run here, unknown `truncation`, or "compact" without `keep`.
    """
    require(
        truncation in TRUNCATION_MODES,
        f"truncation is {truncation!r}; choose one of {', '.join(TRUNCATION_MODES)}",
    )
    require(
        truncation != "compact" or keep > 0,
        f"keep is {keep} with truncation 'compact'; give the rows to keep",
    )
    check_platform(kernels, jax.default_backend())
    kept = keep if truncation == "compact" else None
    step = _Step(config, truncation != "off", kept, numerics, parallel, kernels)
    return step.run(params, rows, memory)


def logits(params: dict[str, Any], config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32 [..., V] of collapsed streams [..., D]."""
    normed = rms_norm(hidden, params["norm"], config.norm_eps)
    return linear(normed, params["head"], jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class _Step:
    """What stays fixed while a step is traced."""

    config: ModelConfig
    truncated: bool
    keep: int | None
    numerics: Numerics
    parallel: Parallel
    kernels: str

    def run(self, params: dict[str, Any], rows: Rows, memory: M) -> tuple[Output, M]:
        config, shares = self.config, Shares.of(rows, self.parallel.context)
        made = topology(config)
        state, pre = streams.start(embed(params, shares.own), config)
        selection, visits, features = None, [], []
        for layer, weights in zip(made.layers, params["layers"], strict=True):
            if "engram" in weights:
                at = config.engram.layer_ids.index(layer.id)  # type: ignore[union-attr]
                state = engram.apply(
                    weights["engram"],
                    config,
                    state,
                    shares.own.engram[at],
                    shares.own.is_image,
                    self.parallel,
                )
            x = rms_norm(streams.collapse(state, pre), weights["attn_norm"], config.norm_eps)
            if layer.mode is Mode.FULL:
                memory = remember(weights, config, layer, x, shares, memory, self.numerics)
            if layer.id == made.boundary and self._cuts(shares.whole):
                shares, (x, state, pre) = self._cut(shares, (x, state, pre))
            if config.draft and layer.id in config.draft.target_layer_ids:
                features.append(streams.mean(state))
            mixed = streams.mix(weights["attn_mix"], config, state)
            y, selection, memory = self._attention(weights, layer, x, shares, memory, selection)
            state, pre = streams.expand(state, mixed, y), mixed.pre
            active = config.num_active_experts
            state, pre, visited = feed_forward(
                weights, config, state, pre, shares.own, active, self.parallel, self.kernels
            )
            visits.append(visited)
        if features:
            memory = draft_keys.remember(
                params["draft"], config, features, shares, memory, self.numerics
            )
        hidden, visited = shares.join(streams.collapse(state, pre)), jnp.stack(visits)
        if shares.axes:
            visited = jax.lax.psum(visited, shares.axes)
        return Output(hidden, shares.whole, visited), memory

    def _cuts(self, rows: Rows) -> bool:
        return self.keep is not None and self.keep < rows.tokens.shape[1]

    def _cut(
        self, shares: Shares, arrays: tuple[jax.Array, ...]
    ) -> tuple[Shares, tuple[jax.Array, ...]]:
        """The last `keep` rows of each sequence, divided anew."""
        assert self.keep is not None
        kept = last(shares.whole, self.keep)
        offset, new = kept.start - shares.whole.start, Shares.of(kept, shares.axes)
        return new, tuple(new.divide(take(shares.join(x), offset, self.keep)) for x in arrays)

    def _attention(
        self,
        weights: dict[str, Any],
        layer: Layer,
        x: jax.Array,
        shares: Shares,
        memory: M,
        selection: Selection | None,
    ) -> tuple[jax.Array, Selection | None, M]:
        config, params, whole = self.config, weights["attn"], shares.whole
        positions = shares.own.positions
        freqs = frequencies(config.rope, config.rope_head_dim, compressed=layer.ratio > 0)
        angles = Angles.at(positions, freqs)
        latent = attention.compressed_query(params, config, x)
        if layer.mode in (Mode.FULL, Mode.REINDEX):
            selection = select(
                weights["indexer"],
                config,
                layer,
                x,
                latent,
                positions,
                angles,
                memory,
                selection,
                self.numerics,
            )
        new = shares.join(attention.window_rows(params, config, x, angles, self.numerics))
        window = jnp.concatenate([memory.read_window(layer.id, whole.start), new], axis=1)
        floor = self._window_floor(layer, whole)
        keep = whole.valid & (whole.positions >= floor[:, None])
        memory = memory.write_window(layer.id, whole.positions, new, keep)
        seen_from = jnp.maximum(positions - config.window + 1, floor[:, None])
        chosen = selection if layer.kv_source is not None else None

        def attend(rows: Any, window: jax.Array) -> jax.Array:
            query, seen_from, positions, chosen = rows
            return attention.attend(
                query,
                window,
                seen_from,
                positions,
                params["sink"],
                memory,
                layer.kv_source,
                chosen,
                self.kernels,
            )

        query = attention.queries(params, config, latent, angles)
        mixed = shares.over_window(attend, (query, seen_from, positions, chosen), window)
        return attention.project_out(params, config, mixed, angles), selection, memory

    def _window_floor(self, layer: Layer, rows: Rows) -> jax.Array:
        """The first position [S] whose window rows may be seen, and need to be kept."""
        floor = jnp.maximum(rows.window_start, 0)
        if self.truncated and layer.id >= self.config.boundary_layer:
            floor = jnp.maximum(floor, rows.kept_start)
        return floor


def embed(params: dict[str, Any], rows: Rows) -> jax.Array:
    """[S, Q, D]: token embeddings, zero for ids outside the vocabulary, image rows replaced."""
    table = params["embed"]
    known = (rows.tokens >= 0) & (rows.tokens < table.shape[0])
    found = table[jnp.clip(rows.tokens, 0, table.shape[0] - 1)]
    found = jnp.where(known[..., None], found, 0)
    if rows.embeddings is None:
        return found
    return jnp.where(rows.is_image[..., None], rows.embeddings.astype(found.dtype), found)


def feed_forward(
    weights: dict[str, Any],
    config: ModelConfig,
    state: jax.Array,
    pre: jax.Array,
    rows: Rows,
    active: int,
    parallel: Parallel,
    kernels: str = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The expert sublayer: streams, next `pre`, and visits int32 [E]."""
    mixed = streams.mix(weights["ffn_mix"], config, state)
    x = rms_norm(streams.collapse(state, pre), weights["ffn_norm"], config.norm_eps)
    y, visits = experts.moe(
        weights["moe"], config, x, rows.valid, rows.is_image, active, parallel, kernels
    )
    return streams.expand(state, mixed, y), mixed.pre, visits
