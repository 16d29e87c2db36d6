"""The rules a configuration must obey; an error names the value, the rule and the remedy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_jax.config import CacheConfig, ModelConfig

TRUNCATION_MODES = ("off", "mask", "compact")


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(config: object, *names: str) -> None:
    """Every named field of `config` is above zero."""
    for name in names:
        value = getattr(config, name)
        require(
            value > 0,
            f"{type(config).__name__}.{name} is {value}; it must be positive, so raise it",
        )


def require_ascending(name: str, ids: tuple[int, ...], limit: int) -> None:
    """`ids` ascend strictly inside [0, limit)."""
    inside = all(0 <= i < limit for i in ids)
    ordered = all(a < b for a, b in itertools.pairwise(ids))
    require(
        inside and ordered,
        f"{name} is {ids}; layer ids must ascend strictly inside [0, {limit}), so sort them",
    )


def check_model(model: ModelConfig) -> None:
    """All rules of one model; a kernel may ask for more (multiples of its tiles).

    Raises:
      ValueError: a width does not divide, or a layer would read rows that nobody wrote.
    """
    _check_widths(model)
    _check_ratios(model)
    _check_sources(model)
    _check_candidates(model)
    _check_parts(model)


def _check_widths(c: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size num_layers num_heads head_dim q_lora_rank o_groups o_lora_rank"
    )
    experts = "window index_num_heads index_head_dim index_topk num_experts num_active_experts"
    require_positive(c, *positive.split(), *experts.split(), "moe_intermediate_size", "hc_mult")
    require(
        c.rope_head_dim % 2 == 0 and 0 < c.rope_head_dim <= min(c.head_dim, c.index_head_dim),
        f"rope_head_dim is {c.rope_head_dim}; it must be even and fit head_dim {c.head_dim} and "
        f"index_head_dim {c.index_head_dim}, so lower it",
    )
    require(
        c.head_dim % 32 == 0 and c.index_head_dim % 32 == 0,
        f"head_dim {c.head_dim} and index_head_dim {c.index_head_dim} must be multiples of 32, the "
        "channels under one scale; round them up",
    )
    require(
        c.num_heads % c.o_groups == 0,
        f"num_heads {c.num_heads} must divide into o_groups {c.o_groups}; change one of them",
    )
    require(
        c.num_active_experts <= c.num_experts,
        f"num_active_experts is {c.num_active_experts} of {c.num_experts}; "
        "a token cannot visit more experts than there are, so lower it",
    )


def _check_ratios(c: ModelConfig) -> None:
    ratios, expected = c.compress_ratios, c.num_layers + c.num_draft_layers
    require(
        len(ratios) == expected,
        f"compress_ratios has {len(ratios)} entries; {c.num_layers} layers and "
        f"{c.num_draft_layers} draft stages need {expected}",
    )
    require(
        set(ratios) <= {0, 1, 2},
        f"compress_ratios holds {sorted(set(ratios) - {0, 1, 2})}; only 0, 1 and 2 are supported",
    )
    require(
        1 in ratios[: c.num_layers],
        "compress_ratios has no 1; the first ratio-1 layer starts the decoder, so set one",
    )
    require(
        not any(ratios[c.num_layers :]),
        f"compress_ratios of the draft stages are {ratios[c.num_layers :]}; they must be 0",
    )


def _check_sources(c: ModelConfig) -> None:
    require_ascending("kv_source_layer_ids", c.kv_source_layer_ids, c.num_layers)
    require_ascending("index_source_layer_ids", c.index_source_layer_ids, c.num_layers)
    require(
        set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
        f"index_source_layer_ids {c.index_source_layer_ids} must contain every KV source "
        f"{c.kv_source_layer_ids}: a selection may not outlive its rows; add the missing",
    )
    require(
        c.boundary_layer in c.kv_source_layer_ids,
        f"layer {c.boundary_layer} is the first of ratio 1 and must own its global rows (no KV "
        "segment crosses it); add it to kv_source_layer_ids",
    )
    for layer, source in enumerate(c.kv_sources):
        if (ratio := c.compress_ratios[layer]) == 0:
            require(
                layer not in c.index_source_layer_ids,
                f"layer {layer} has ratio 0 and cannot be a source; remove it from the source ids",
            )
        else:
            require(
                source is not None and c.compress_ratios[source] == ratio,
                f"layer {layer} has ratio {ratio} but its nearest KV source is {source}; both must "
                "have one ratio, so add a source",
            )


def _check_candidates(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source is None:
        return
    require(
        source in c.index_source_layer_ids,
        f"candidate_source_layer_id {source} is not among index_source_layer_ids "
        f"{c.index_source_layer_ids}; only a layer that scores all rows can offer candidates",
    )
    require_positive(c, "candidate_topk_blocks", "candidate_block_size")
    pool = c.candidate_topk_blocks * c.candidate_block_size
    surely = pool - c.candidate_block_size + 1  # the newest block, always in, may hold one row
    require(
        surely >= c.index_topk,
        f"the candidate pool holds {pool} rows, {surely} surely visible; it must hold index_topk "
        f"{c.index_topk}, so raise "
        "candidate_topk_blocks",
    )
    for user in c.candidate_user_layer_ids:
        require(
            c.kv_sources[user] == c.kv_sources[source],
            f"layer {user} follows candidate source {source} but reads the rows of "
            f"{c.kv_sources[user]}, not {c.kv_sources[source]}; candidates are rows of one source",
        )


def _check_parts(c: ModelConfig) -> None:
    if c.engram:
        require_ascending("engram layer_ids", c.engram.layer_ids, c.num_layers)
    if c.draft:
        require_ascending("draft target_layer_ids", c.draft.target_layer_ids, c.num_layers)
        require(
            0 <= c.draft.noise_token_id < c.vocab_size,
            f"draft noise_token_id {c.draft.noise_token_id} is outside [0, {c.vocab_size})",
        )


def check_cache(model: ModelConfig, cache: CacheConfig) -> None:
    """Rules that bind a cache to a model.

    Raises:
      ValueError: a page cannot be cut into rows or candidate blocks; or truncation would lose
        something that a later step reads.
    """
    for layer in model.kv_source_layer_ids:
        ratio = model.compress_ratios[layer]
        require(
            cache.block_tokens % ratio == 0,
            f"block_tokens is {cache.block_tokens}; layer {layer} keeps a row per {ratio} tokens, "
            f"so make it a multiple of {ratio}",
        )
    source = model.candidate_source_layer_id
    if source is not None:
        rows = cache.block_tokens // model.compress_ratios[source]
        require(
            rows % model.candidate_block_size == 0,
            f"a page of layer {source} has {rows} rows; a candidate block of "
            f"{model.candidate_block_size} may not straddle pages, so change block_tokens",
        )
    _check_truncation(model, cache)


def _check_truncation(model: ModelConfig, cache: CacheConfig) -> None:
    if cache.truncation == "off":
        return
    require(
        model.boundary_layer > 0,
        "truncation needs layers below the first ratio-1 layer; set it to 'off'",
    )
    least = model.window + cache.ring_slack
    require(
        cache.keep >= least,
        f"keep is {cache.keep}; a decoder ring holds window + backtracking = {least} rows and only "
        "kept rows refill it, so raise keep",
    )
    if cache.truncation != "compact":
        return
    engram = model.engram.layer_ids if model.engram else ()
    require(
        all(i < model.boundary_layer for i in engram),
        f"engram layers {engram} must lie below layer {model.boundary_layer} in compact mode; "
        "use 'mask'",
    )
    targets = model.draft.target_layer_ids if model.draft else ()
    require(
        len({i < model.boundary_layer for i in targets}) <= 1,
        f"draft targets {targets} straddle layer {model.boundary_layer}; compact mode computes "
        "different rows on both sides, so use 'mask'",
    )
