"""Operation counts against the released accounting's values and a position-by-position count."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.cost.operations import (
    Operations,
    candidate_pairs,
    capped_floor_sum,
    decode_operations,
    global_pairs,
    prompt_operations,
    window_pairs,
)
from deepinfer_jax.presets import small, tiny, v41_flash

COMPACT = CacheConfig(truncation="compact", keep=140)
MASK = CacheConfig(truncation="mask", keep=140)


@pytest.mark.parametrize(
    ("q", "k", "attention", "total"),
    [
        (1, 1, 10_308_685_824, 34_111_688_704),
        (300, 300, 3_749_256_404_992, 10_098_508_603_392),
        (4096, 4096, 66_761_651_126_272, 153_416_606_154_752),
        (4096, 131_072, 75_057_246_240_768, 161_712_201_269_248),
    ],
)
def test_released_prompt_values(q: int, k: int, attention: int, total: int) -> None:
    counted = prompt_operations(v41_flash(), q, k)
    assert (counted.attention, counted.total) == (attention, total)


@pytest.mark.parametrize(
    ("q", "k", "attention", "total"),
    [
        (6, 326, 84_610_842_624, 227_428_859_904),
        (1, 131_072, 18_345_885_696, 42_148_888_576),
        (6, 131_072, 110_075_142_144, 252_893_159_424),
    ],
)
def test_released_decode_values(q: int, k: int, attention: int, total: int) -> None:
    counted = decode_operations(v41_flash(), q, k)
    assert (counted.attention, counted.total) == (attention, total)


@pytest.mark.parametrize(
    ("cache", "q", "full_length", "total"),
    [
        (COMPACT, 300, 300, 7_462_639_869_952),
        (MASK, 300, 300, 9_991_134_420_992),
        (COMPACT, 4096, 4096, 79_827_160_784_896),
        (COMPACT, 2048, 4096, 37_984_438_976_512),
    ],
)
def test_released_truncated_values(
    cache: CacheConfig, q: int, full_length: int, total: int
) -> None:
    counted = prompt_operations(v41_flash(), q, q, cache, full_length=full_length)
    assert counted.total == total


def test_terms_of_one_row_have_the_released_values() -> None:
    counted = prompt_operations(v41_flash(), 1, 1)
    assert counted.projections == 40 * 253_231_104 + 8 * 11_141_120
    assert counted.compression == 3 * 20_971_520 + 10_485_760 + 4 * 262_144
    assert counted.core == (40 + 20) * 262_144
    assert counted.selection == (1 + 4 * 8) * 4_096
    assert counted.experts == 40 * 495_452_160
    assert counted.router == 40 * 7_864_320
    assert counted.streams == 40 * 2 * (4_096_000 + 819_200)
    assert counted.engram == 2 * 314_736_640
    assert counted.logits == 2_647_654_400


@settings(max_examples=200, deadline=None)
@given(
    a=st.integers(0, 300),
    n=st.integers(0, 120),
    ratio=st.sampled_from([1, 2]),
    block=st.sampled_from([1, 4, 8]),
    cap=st.integers(1, 60),
    floor=st.integers(0, 400),
)
def test_closed_forms_equal_the_loops(
    a: int, n: int, ratio: int, block: int, cap: int, floor: int
) -> None:
    positions = range(a, a + n)
    visible = [
        len(range(0, p + 2 - ratio, ratio)) for p in positions
    ]  # groups wholly at or before p
    assert global_pairs(a, a + n, ratio) == sum(visible)
    assert global_pairs(a, a + n, ratio, cap) == sum(min(v, cap) for v in visible)
    blocks = [len({row // block for row in range(v)}) for v in visible]
    assert candidate_pairs(a, a + n, ratio, block, cap) == sum(block * min(b, cap) for b in blocks)
    seen = [sum(1 for key in range(p + 1) if key > p - cap and key >= floor) for p in positions]
    assert window_pairs(a, a + n, cap, floor) == sum(seen)


def test_capped_floor_sum_of_nothing() -> None:
    assert [capped_floor_sum(n, 2, 3) for n in (-5, 0, 1)] == [0, 0, 0]


def _attention_by_position(
    model: ModelConfig,
    positions: range,
    mode: str,
    keep: int,
    length: int,
    valid: int,
    decode: bool = False,
) -> int:
    """Walks every layer and position; costs 4 per BF16, 2 per FP8 and 1 per FP4 multiply-add."""
    total, first_kept = 0, length - keep
    decoder = next(i for i, r in enumerate(model.compress_ratios) if r == 1)
    for layer in range(model.num_layers):
        ratio = model.compress_ratios[layer]
        late = layer >= decoder and mode != "off"
        rows = list(positions)
        if late and mode == "compact":
            rows = [p for p in rows if p >= first_kept] or rows[-1:]
        for p in rows:
            wide = model.num_heads * model.head_dim
            a, b = model.q_lora_rank, model.o_lora_rank
            total += 2 * (model.hidden_size * a + a * wide + model.hidden_size * model.head_dim)
            total += 2 * (wide * b + model.o_groups * b * model.hidden_size)
            oldest = max(p - model.window + 1, valid, first_kept if late else 0, 0)
            keys = max(0, p + 1 - oldest)
            groups = (p + 1) // ratio if ratio else 0
            total += 4 * wide * 2 * (keys + min(groups, model.index_topk))
            if layer in model.index_source_layer_ids:
                index = model.index_num_heads * model.index_head_dim
                total += 2 * a * index + 4 * model.hidden_size * model.index_num_heads
                scored = groups
                source = model.candidate_source_layer_id
                if source is not None and layer > source:
                    size = model.candidate_block_size
                    scored = size * min(-(-groups // size), model.candidate_topk_blocks)
                total += index * scored
        if layer in model.kv_source_layer_ids:
            matrices = {1: 1, 2: 2}[ratio]
            total += 4 * matrices * model.hidden_size * model.head_dim * len(positions)
            ends = sum((p + 1) % ratio == 0 for p in positions)
            keys_made = len(positions) if decode else max(1, ends)
            total += 4 * model.head_dim * model.index_head_dim * keys_made
    return total


models = st.sampled_from([tiny(), small(), v41_flash()])


@settings(max_examples=60, deadline=None)
@given(
    model=models,
    start=st.integers(0, 400),
    q=st.integers(1, 60),
    rest=st.integers(0, 200),
    keep=st.integers(1, 300),
    mode=st.sampled_from(["off", "mask", "compact"]),
    valid=st.integers(0, 400),
)
def test_prompt_attention_equals_a_walk(
    model: ModelConfig, start: int, q: int, rest: int, keep: int, mode: str, valid: int
) -> None:
    k, valid = start + q, min(valid, start)
    cache = CacheConfig(truncation=mode, keep=keep)
    counted = prompt_operations(
        model, q, k, cache, full_length=k + rest, swa_valid_start=valid
    ).attention
    walk = _attention_by_position(model, range(start, k), mode, keep, k + rest, valid)
    assert counted == walk


@settings(max_examples=30, deadline=None)
@given(model=models, start=st.integers(0, 400), q=st.integers(1, 8))
def test_decode_attention_equals_a_walk(model: ModelConfig, start: int, q: int) -> None:
    counted = decode_operations(model, q, start + q).attention
    walk = _attention_by_position(
        model, range(start, start + q), "off", 0, start + q, 0, decode=True
    )
    assert counted == walk


@given(cuts=st.sets(st.integers(1, 5000).map(lambda n: 2 * n), min_size=1, max_size=6))
def test_chunks_add_up_to_the_prompt_but_for_their_logits(cuts: set[int]) -> None:
    model, ends = v41_flash(), sorted(cuts)
    starts = [0, *ends[:-1]]
    chunks = [prompt_operations(model, b - a, b) for a, b in zip(starts, ends, strict=True)]
    whole = prompt_operations(model, ends[-1], ends[-1])
    assert sum(c.attention for c in chunks) == whole.attention
    assert sum(c.total - c.logits for c in chunks) == whole.total - whole.logits


def test_a_million_tokens_are_exact_and_arrays_agree_with_integers() -> None:
    model = v41_flash()
    q = np.array([1, 300, 4096, 1_000_000])
    k = np.array([1_000_000, 300, 131_072, 1_000_000])
    for cache in (None, COMPACT, MASK):
        together = prompt_operations(model, q, k, cache)
        apart = [prompt_operations(model, a, b, cache) for a, b in zip(q, k, strict=True)]
        for field in dataclasses.fields(Operations):
            values = np.broadcast_to(getattr(together, field.name), q.shape)
            assert values.tolist() == [getattr(one, field.name) for one in apart]
    # Layer 20 alone scores each of 10^6 queries against all rows up to it.
    dense = 3 * (500_000 * 500_000) + 500_000 * 1_000_001
    reindex = 4 * (16_384 * 16_392 // 2 + (1_000_000 - 16_384) * 16_384)
    counted = prompt_operations(model, 1_000_000, 1_000_000)
    assert counted.selection == 4096 * (dense + reindex)


@pytest.mark.parametrize(("q", "k"), [(0, 5), (6, 5)])
def test_a_chunk_holds_its_rows(q: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"q is {q} and k is {k}"):
        prompt_operations(tiny(), q, k)
    with pytest.raises(ValueError, match="1 <= q <= k"):
        decode_operations(tiny(), np.array([1, q]), np.array([1, k]))
