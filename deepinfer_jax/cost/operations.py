"""Arithmetic of a chunk or a decode step, in FP8-equivalent operations, as exact integers.

Unit: a multiply-add costs 1 in FP4, 2 in FP8, 4 in BF16, 8 in TF32 or FP32, so a count divided by
twice a chip's BF16 peak is a time. Counted are the contractions of the target model for the
scheduled rows: no draft, padding, replicas, norms or vision. The rules are those of the accounting
in the released DeepInfer 0.1.0. Lengths are Python ints (exact at any size) or int64 arrays that
broadcast (exact while counts stay below 2**63: contexts of some ten million tokens).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.config import CacheConfig, ModelConfig

Count = Any
"""A Python int or an int64 array."""

FP4, FP8, BF16, FP32 = 1, 2, 4, 8


@dataclasses.dataclass(frozen=True)
class Operations:
    """FP8-equivalent operations by part; each a Python int or an int64 array."""

    projections: Count  # attention's linear layers, index queries and head weights
    compression: Count  # global rows and index keys made
    core: Count  # queries against window rows and selected global rows
    selection: Count  # index queries against index keys
    experts: Count  # routed and shared
    router: Count
    streams: Count  # mHC: mix, collapse, expand
    engram: Count
    logits: Count

    @property
    def attention(self) -> Count:
        """The part the released statistics call attention."""
        return self.projections + self.compression + self.core + self.selection

    @property
    def total(self) -> Count:
        """All parts."""
        rest = self.experts + self.router + self.streams + self.engram + self.logits
        return self.attention + rest


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Query rows [start, stop) of some layers, whose windows begin no earlier than `floor`."""

    start: Count
    stop: Count
    floor: Count

    @property
    def count(self) -> Count:
        return self.stop - self.start


def _integers(value: Count) -> Count:
    return int(value) if isinstance(value, (int, np.integer)) else np.asarray(value, np.int64)


def _minimum(a: Count, b: Count) -> Count:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _maximum(a: Count, b: Count) -> Count:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def capped_floor_sum(n: Count, ratio: int, cap: int | None = None) -> Count:
    """Sum of min(u // ratio, cap) over u = 1..n; 0 for n <= 0.

    With one global row per `ratio` tokens, that is the (query, row) pairs of the first n queries.
    Worked example: n = 5, ratio = 2 sums 0, 1, 1, 2, 2.
    """
    n = _maximum(n, 0)
    rising = n if cap is None else _minimum(n, cap * ratio)
    groups = rising // ratio
    pairs = ratio * groups * (groups - 1) // 2 + groups * (rising - groups * ratio + 1)
    return pairs if cap is None else pairs + cap * (n - rising)


def global_pairs(start: Count, stop: Count, ratio: int, cap: int | None = None) -> Count:
    """(query, visible global row) pairs of the queries [start, stop), at most `cap` per query."""
    return capped_floor_sum(stop, ratio, cap) - capped_floor_sum(start, ratio, cap)


def window_pairs(start: Count, stop: Count, window: int, floor: Count = 0) -> Count:
    """(query, window key) pairs of the queries [start, stop), keys before `floor` unseen."""
    return global_pairs(start - floor, stop - floor, 1, window)


def candidate_pairs(start: Count, stop: Count, ratio: int, block: int, cap: int) -> Count:
    """(query, scored row) pairs where whole blocks of `block` rows are scored, at most `cap`."""
    shift = ratio * (block - 1)  # ceil((u // r) / b) == (u + r * (b - 1)) // (r * b)
    return block * global_pairs(start + shift, stop + shift, ratio * block, cap)


def _projections(model: ModelConfig, layer: int) -> int:
    """Operations of one row in one attention layer."""
    width, heads_width = model.hidden_size, model.num_heads * model.head_dim
    query = model.q_lora_rank * (width + heads_width)
    output = (heads_width + model.o_groups * width) * model.o_lora_rank
    operations = FP8 * (query + width * model.head_dim + output)
    if layer in model.index_source_layer_ids:
        index_width = model.index_num_heads * model.index_head_dim
        operations += FP8 * model.q_lora_rank * index_width + BF16 * width * model.index_num_heads
    return operations


def _core_pairs(model: ModelConfig, layer: int, rows: _Rows) -> Count:
    pairs = window_pairs(rows.start, rows.stop, model.window, rows.floor)
    if ratio := model.compress_ratios[layer]:
        pairs = pairs + global_pairs(rows.start, rows.stop, ratio, model.index_topk)
    return pairs


def _selection_pairs(model: ModelConfig, layer: int, rows: _Rows) -> Count:
    ratio = model.compress_ratios[layer]
    if layer not in model.index_source_layer_ids:
        return 0
    if layer not in model.candidate_user_layer_ids:
        return global_pairs(rows.start, rows.stop, ratio)
    block, cap = model.candidate_block_size, model.candidate_topk_blocks
    return candidate_pairs(rows.start, rows.stop, ratio, block, cap)


def _compression(model: ModelConfig, start: Count, stop: Count, decode: bool) -> Count:
    """KV sources see every row, truncated or not; an index key is made per finished group."""
    operations = 0
    for layer in model.kv_source_layer_ids:
        ratio = model.compress_ratios[layer]
        matrices = 1 if ratio == 1 else 2  # a layer that pools also projects a gate
        row = BF16 * matrices * model.hidden_size * model.head_dim
        keys = stop - start if decode else _maximum(stop // ratio - start // ratio, 1)
        key = BF16 * model.head_dim * model.index_head_dim
        operations = operations + row * (stop - start) + key * keys
    return operations


def _streams(model: ModelConfig, rows: list[_Rows], everything: Count) -> Count:
    """Two sublayers per layer, each a mix of the streams, a collapse and an expansion.

    The model's first collapse is free (all streams are equal) and its last one extra. The decoder's
    first mix and collapse are also made for the rows it then drops.
    """
    count, width = model.hc_mult, model.hidden_size
    collapse = FP32 * count * width
    before = collapse * count * (count + 2) + collapse
    after = collapse * (count + 1)
    computed, last = sum(r.count for r in rows), rows[-1].count
    ends = collapse * (last - everything)
    return 2 * (before + after) * computed + ends + before * (everything - last)


def _engram(model: ModelConfig) -> int:
    """Operations of one row in all Engram layers: keys and value in FP8, the gates in FP32."""
    if model.engram is None:
        return 0
    count, width = model.hc_mult, model.hidden_size
    looked_up = model.engram.rows_per_token * model.engram.head_dim
    layer = FP8 * looked_up * width * (count + 1) + FP32 * count * width
    return len(model.engram.layer_ids) * layer


def _operations(
    model: ModelConfig, all_rows: _Rows, decoder_rows: _Rows, logit_rows: Count, decode: bool
) -> Operations:
    rows = [
        decoder_rows if i >= model.boundary_layer else all_rows for i in range(model.num_layers)
    ]
    computed = sum(r.count for r in rows)
    pair = BF16 * model.num_heads * 2 * model.head_dim  # scores, then values
    index_pair = FP4 * model.index_num_heads * model.index_head_dim
    active = model.num_active_experts + model.num_shared_experts
    expert = FP8 * 3 * model.hidden_size * model.moe_intermediate_size
    return Operations(
        projections=sum(_projections(model, i) * r.count for i, r in enumerate(rows)),
        compression=_compression(model, all_rows.start, all_rows.stop, decode),
        core=pair * sum(_core_pairs(model, i, r) for i, r in enumerate(rows)),
        selection=index_pair * sum(_selection_pairs(model, i, r) for i, r in enumerate(rows)),
        experts=active * expert * computed,
        router=BF16 * model.hidden_size * model.num_experts * computed,
        streams=_streams(model, rows, all_rows.count),
        engram=_engram(model) * all_rows.count,
        logits=BF16 * model.hidden_size * model.vocab_size * logit_rows,
    )


def _chunk(q: Count, k: Count) -> tuple[Count, Count]:
    q, k = _integers(q), _integers(k)
    if np.any((q < 1) | (q > k)):
        raise ValueError(f"q is {q} and k is {k}; k counts the q rows too, so 1 <= q <= k")
    return q, k


def prompt_operations(
    model: ModelConfig,
    q: Count,
    k: Count,
    cache: CacheConfig | None = None,
    *,
    full_length: Count | None = None,
    swa_valid_start: Count = 0,
) -> Operations:
    """Operations of one prompt chunk: the `q` positions [k - q, k), one row of logits.

    Args:
      model: sizes.
      q: new tokens of the chunk, at least 1.
      k: tokens of the request up to the chunk's end, at least q.
      cache: its `truncation` and `keep` (None: off). "mask" lets decoder layers see no window key
        before `full_length - keep`; "compact" also computes no row before it, but at least one.
      full_length: tokens of the whole prompt (default k: the last chunk).
      swa_valid_start: first position whose window rows exist, at most k - q.

    Raises:
      ValueError: q is below 1 or above k.
    """
    q, k = _chunk(q, k)
    length = k if full_length is None else _integers(full_length)
    valid = _integers(swa_valid_start)
    all_rows = decoder_rows = _Rows(k - q, k, valid)
    if cache is not None and cache.truncation != "off":
        kept = length - cache.keep
        start = k - q
        if cache.truncation == "compact":
            start = _minimum(_maximum(kept, start), k - 1)
        decoder_rows = _Rows(start, k, _maximum(valid, kept))
    return _operations(model, all_rows, decoder_rows, 1, decode=False)


def decode_operations(model: ModelConfig, q: Count, k: Count) -> Operations:
    """Operations of one decode step of a request: the `q` verified positions [k - q, k).

    Never truncated; every row has logits, and is charged an index key per source.

    Raises:
      ValueError: q is below 1 or above k.
    """
    q, k = _chunk(q, k)
    rows = _Rows(k - q, k, 0)
    return _operations(model, rows, rows, q, decode=True)
