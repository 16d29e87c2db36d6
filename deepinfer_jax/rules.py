"""The rules a configuration must obey; an error names the value, the rule and the remedy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_jax.config import CacheConfig, EngineConfig, ModelConfig

TRUNCATION_MODES = ("off", "mask", "compact")
ROLES = ("normal", "prompt", "completion")
KERNELS = ("xla", "tpu", "interpret")
VERIFICATIONS = ("fixed", "confidence")


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
    _check_reserve(model, cache)


def _check_reserve(model: ModelConfig, cache: CacheConfig) -> None:
    ring = model.window + cache.ring_slack
    least = max(ring, cache.keep if cache.truncation != "off" else 0)
    require(
        cache.reserve == 0 or cache.reserve >= least or cache.unsafe_reserve,
        f"reserve is {cache.reserve}; kept rows behind a restart may look back to ring rows that "
        f"are not restored unless it is max(window + backtracking {ring}, keep) = {least} or more; "
        "raise it, or set unsafe_reserve to study the gap",
    )


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


def check_engine(engine: EngineConfig) -> None:
    """Rules of an engine's own numbers and of its role (the chapter, section 11.1).

    Raises:
      ValueError: a budget in which a request could never run, or a role that cannot do what is
        asked.
    """
    positive = "max_model_len max_num_seqs max_prefill_context min_chunk chunk_multiple"
    intervals = "prefill_interval prefill_any_interval prefill_usage_percent num_blocks"
    require_positive(engine, *positive.split(), *intervals.split())
    for name in ("max_num_batched_tokens", "step_quota"):
        value = getattr(engine, name)
        require(value >= 0, f"EngineConfig.{name} is {value}; it may not be negative")
    require(
        engine.kernels in KERNELS,
        f"kernels is {engine.kernels!r}; choose one of {', '.join(KERNELS)}",
    )
    require(engine.role in ROLES, f"role is {engine.role!r}; choose one of {', '.join(ROLES)}")
    _check_budget(engine)
    _check_role(engine)
    _check_memory(engine)


def _check_budget(c: EngineConfig) -> None:
    budget = c.batched_tokens
    rows = c.max_num_seqs * c.step_rows
    require(
        budget >= rows,
        f"max_num_batched_tokens is {budget}; {c.max_num_seqs} requests with {c.step_rows} rows "
        f"each need {rows}, so raise it or lower max_num_seqs",
    )
    require(
        c.chunked_prefill or budget >= c.max_model_len,
        f"max_num_batched_tokens is {budget}, below max_model_len {c.max_model_len}; without "
        "chunked_prefill a prompt is one step, so raise it or allow chunks",
    )
    require(
        c.max_prefill_context >= c.max_model_len,
        f"max_prefill_context is {c.max_prefill_context}, below max_model_len {c.max_model_len}: "
        "a long prompt would wait for ever; raise it",
    )
    require(
        budget >= c.least_chunk,
        f"max_num_batched_tokens is {budget}, below the smallest chunk of {c.least_chunk}; raise it",
    )


def _check_role(c: EngineConfig) -> None:
    require(
        c.role != "completion" or c.stop_preempted,
        "a completion engine cannot compute a preempted request again (it runs no prompts); set "
        "stop_preempted",
    )
    require(
        c.role != "prompt" or not c.overlap,
        "a prompt engine waits for each of its steps, so nothing can overlap; set overlap=False",
    )
    require(
        c.verification in VERIFICATIONS,
        f"verification is {c.verification!r}; choose one of {', '.join(VERIFICATIONS)}",
    )
    decodes = c.role != "prompt" and c.cache.nextn > 0
    require(
        c.verification == "fixed" or decodes,
        f"verification is {c.verification!r} where no drafts are verified; leave it 'fixed', or "
        "decode with nextn drafts",
    )
    require(
        c.role != "completion" or not c.step_quota,
        f"step_quota is {c.step_quota} on a completion engine, which runs no prompts; leave it 0",
    )


def _check_memory(c: EngineConfig) -> None:
    tokens = c.cache.block_tokens * c.num_blocks
    require(
        10 * c.runtime_max_len <= 8 * tokens,
        f"num_blocks is {c.num_blocks}; one request may touch {c.runtime_max_len} positions, more "
        f"than 0.8 of the pool's {tokens} tokens; raise it or lower max_model_len",
    )
    require(
        c.slots_percent >= 100,
        f"slots_percent is {c.slots_percent}; every decoding request has a slot, so give at least "
        "100",
    )
