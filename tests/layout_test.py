"""Byte layouts against the released DeepInfer 0.1.0's sizes, and their geometry for any config."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import layout
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.presets import small, tiny, v41_flash


def test_rows_have_the_released_sizes() -> None:
    model = v41_flash()
    assert layout.main_row_bytes(model) == 288
    assert layout.index_row_bytes(model) == 68
    assert layout.ring_row_bytes(model) == 528
    assert layout.global_bytes_per_token(model) == 890
    assert layout.main_row_bytes(dataclasses.replace(model, use_fp4_sparse_kv=False)) == 528


def test_block_pages() -> None:
    block = layout.block_layout(v41_flash(), CacheConfig())
    pages = [(r.layer, r.kind, r.start, r.stop, r.rows) for r in block.regions]
    assert pages == [
        (2, "index", 0, 4_352, 64),
        (2, "main", 4_352, 22_784, 64),
        (8, "index", 22_784, 27_136, 64),
        (8, "main", 27_136, 45_568, 64),
        (14, "index", 45_568, 49_920, 64),
        (14, "main", 49_920, 68_352, 64),
        (20, "index", 68_352, 77_056, 128),
        (20, "main", 77_056, 113_920, 128),
    ]
    assert (block.payload, block.size) == (113_920, 114_048)
    assert block.payload == 128 * layout.global_bytes_per_token(v41_flash())
    assert block.by_layer == (
        (2, 0, 22_784),
        (8, 22_784, 22_784),
        (14, 45_568, 22_784),
        (20, 68_352, 45_568),
    )


def test_block_with_fp8_rows() -> None:
    model = dataclasses.replace(v41_flash(), use_fp4_sparse_kv=False)
    block = layout.block_layout(model, CacheConfig())
    assert (block.payload, block.size) == (190_720, 194_304)


# Columns: R, R', live ring, stored live, dropped live, compression, compression rows, live slot,
# stored image, handoff image, dropped bytes of the image.
SLOTS = {
    "default": (
        CacheConfig(),
        (134, 134, 70_752, 1_415_040, 1_627_296, 86_016, 7),
        (3_128_928, 1_415_040, 3_128_928, 1_713_312),
    ),
    "extra state": (
        CacheConfig(extra_state=True),
        (134, 262, 138_336, 2_766_720, 3_181_728, 86_016, 7),
        (6_035_040, 1_415_040, 3_128_928, 1_713_312),
    ),
    "extra state, keep 140": (
        CacheConfig(extra_state=True, truncation="compact", keep=140),
        (134, 402, 212_256, 4_245_120, 4_881_888, 86_016, 7),
        (9_213_600, 1_415_040, 3_128_928, 1_713_312),
    ),
    "backtracking 12": (
        CacheConfig(backtracking=12),
        (140, 140, 73_920, 1_478_400, 1_700_160, 159_744, 13),
        (3_339_072, 1_478_400, 3_339_072, 1_859_904),
    ),
    "nextn 3": (
        CacheConfig(nextn=3),
        (132, 132, 69_696, 1_393_920, 1_603_008, 61_440, 5),
        (3_059_232, 1_393_920, 3_059_232, 1_664_448),
    ),
    "nextn 0": (
        CacheConfig(nextn=0),
        (129, 129, 68_128, 1_362_560, 1_566_944, 24_576, 2),
        (2_954_688, 1_362_560, 2_954_688, 1_591_520),
    ),
}


@pytest.mark.parametrize("case", SLOTS)
def test_slot_sizes(case: str) -> None:
    cache, regions, totals = SLOTS[case]
    state = layout.state_layout(v41_flash(), cache)
    live = state.live
    assert regions == (
        state.image.ring_rows,
        live.ring_rows,
        live.ring(0).size,
        live.stored,
        live.dropped,
        live.compression,
        live.compression_ring(2).rows,
    )
    assert totals == (live.size, state.stored_bytes, state.handoff_bytes, state.dropped_bytes)


def test_slot_offsets() -> None:
    live = layout.state_layout(v41_flash(), CacheConfig()).live
    for layer in range(20, 43):
        assert live.ring(layer).start == 1_415_040 + (layer - 20) * 70_752
    assert [live.compression_ring(i).start for i in (2, 8, 14)] == [
        3_042_336,
        3_042_336 + 28_672,
        3_042_336 + 57_344,
    ]
    assert live.payload == 3_128_352
    assert live.size - live.payload == 576


def test_an_odd_ring_is_padded() -> None:
    slot = layout.slot_layout(v41_flash(), CacheConfig(), 133)
    assert slot.ring(0).size == 70_240


def test_slot_pool() -> None:
    assert layout.state_slots(256) == 308
    size = layout.state_layout(v41_flash(), CacheConfig()).live.size
    assert layout.state_slots(256) * size == 963_709_824


def test_ring_is_the_smallest_that_rewinds_one_step() -> None:
    """Brute force: writing x rows past P spares [P - 128, P) iff x <= 6 in a ring of 134."""
    rows, _ = layout.ring_rows(v41_flash(), CacheConfig())
    boundary = 1280
    for overshoot in range(12):
        ring = {p % rows: p for p in range(boundary + overshoot)}
        intact = all(ring[p % rows] == p for p in range(boundary - 128, boundary))
        assert intact == (overshoot <= 6)


@pytest.mark.parametrize("keep, behind", [(0, 128), (140, 268)])
def test_wide_rings_still_hold_the_anchor(keep: int, behind: int) -> None:
    """Brute force: every anchor less than `behind` tokens back is extractable from a wide ring."""
    mode = "compact" if keep else "off"
    cache = CacheConfig(extra_state=True, truncation=mode, keep=keep)
    rows, wide = layout.ring_rows(v41_flash(), cache)
    for length in range(wide, 1400):
        anchor = (length - keep) // 128 * 128
        assert length - anchor < behind
        ring = {p % wide: p for p in range(length)}
        assert all(ring[p % wide] == p for p in range(anchor - rows, anchor) if p >= 0)


def test_blocks_needed() -> None:
    assert [layout.blocks_needed(t, CacheConfig()) for t in (0, 1, 128, 129, 300)] == [
        0,
        1,
        1,
        2,
        3,
    ]


def test_layouts_reject_a_cache_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="keep is 100"):
        layout.state_layout(v41_flash(), CacheConfig(truncation="mask", keep=100))
    with pytest.raises(ValueError, match="multiple of 2"):
        layout.block_layout(v41_flash(), CacheConfig(block_tokens=129))


models = st.builds(
    dataclasses.replace,
    st.sampled_from([v41_flash(), small(), tiny()]),
    head_dim=st.sampled_from([64, 96, 128, 512]),
    index_head_dim=st.sampled_from([64, 96, 128]),
    window=st.integers(1, 200),
    use_fp4_sparse_kv=st.booleans(),
)
caches = st.builds(
    CacheConfig,
    block_tokens=st.integers(1, 32).map(lambda n: 16 * n),
    nextn=st.integers(0, 9),
    backtracking=st.integers(0, 20),
    extra_state=st.booleans(),
    extra_size=st.integers(0, 200),
)


def _assert_contiguous(regions: tuple[layout.Region, ...], payload: int) -> None:
    assert regions[0].start == 0 and regions[-1].stop == payload
    assert all(a.stop == b.start for a, b in itertools.pairwise(regions))
    for region in regions:
        assert 0 <= region.size - region.rows * region.row_bytes < 32
        assert region.start % 32 == 0


@settings(max_examples=60, deadline=None)
@given(model=models, cache=caches)
def test_block_regions_cover_without_overlap(model: ModelConfig, cache: CacheConfig) -> None:
    block = layout.block_layout(model, cache)
    _assert_contiguous(block.regions, block.payload)
    stride = math.lcm(128, layout.main_row_bytes(model))
    assert 0 <= block.size - block.payload < stride and block.size % stride == 0
    assert sum(length for _, _, length in block.by_layer) == block.payload
    rows = {r.layer: r.rows * model.compress_ratios[r.layer] for r in block.regions}
    assert set(rows.values()) == {cache.block_tokens}


@settings(max_examples=60, deadline=None)
@given(model=models, cache=caches)
def test_slot_regions_cover_without_overlap(model: ModelConfig, cache: CacheConfig) -> None:
    state = layout.state_layout(model, cache)
    for slot in (state.live, state.image):
        _assert_contiguous(slot.regions, slot.payload)
        assert [r.layer for r in slot.regions[: model.num_rings]] == list(range(model.num_rings))
        assert slot.ring(model.boundary_layer).start == slot.stored
        assert slot.stored + slot.dropped + slot.compression == slot.payload
        assert slot.size - slot.payload >= 0
        assert slot.size % layout.ring_row_bytes(model) == 0 and slot.size % 32 == 0
    assert state.live.ring_rows - state.image.ring_rows == cache.extra_rows
    assert state.live.compression == state.image.compression
