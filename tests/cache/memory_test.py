"""Dense and paged memory against a plain record of what was written where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import layout
from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.presets import tiny, v41_flash
from pallas_kernels import formats

FP4 = tiny()
FP8 = dataclasses.replace(FP4, use_fp4_sparse_kv=False)
CACHE = CacheConfig(block_tokens=8)
WIDE = CacheConfig(block_tokens=8, extra_state=True, extra_size=7)
CAPACITY, S, Q = 64, 3, 20  # a chunk of 20 rows is longer than a ring of 14
RINGS = (0, 9)  # a layer and a draft stage
KINDS = {
    "dense": (FP4, CACHE, None),
    "values": (FP4, CACHE, "values"),
    "bytes": (FP4, CACHE, "bytes"),
    "bytes, MXFP8 rows": (FP8, CACHE, "bytes"),
    "values, wide rings": (FP4, WIDE, "values"),
}
ROUND = {
    "e4m3": jax.jit(formats.fake_e4m3),
    "mxfp4": jax.jit(formats.fake_mxfp4),
    "fp4": jax.jit(formats.fake_fp4_e4m3),
}


def fresh(kind: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """(memory, slots, tables) with slots and blocks in no particular order."""
    model, cache, form = KINDS[kind]
    slots = np.array([5, 1, 3], np.int32)
    tables = np.random.default_rng(0).permutation(np.arange(1, 25)).reshape(S, 8).astype(np.int32)
    if form is None:
        return create_dense(model, S, CAPACITY), slots, tables
    memory = create_paged(model, cache, blocks=27, slots=7, format=form, dtype=jnp.float32)
    return bind(memory, jnp.asarray(slots), jnp.asarray(tables)), slots, tables


def step(memory: Memory, start: jax.Array, index: jax.Array, new: dict, keep: jax.Array) -> tuple:
    """Read all there is, then write one ragged chunk: (reads, memory)."""
    positions = start[:, None] + jnp.arange(Q)
    reads: dict = {("window", ring): memory.read_window(ring, start) for ring in RINGS}
    reads["raw", 2] = memory.read_raw(2, start)
    for source in (2, 4):
        reads["keys", source] = memory.read_keys(source)
        reads["global", source] = memory.read_global(source, index)
    for ring in RINGS:
        memory = memory.write_window(ring, positions, new["window", ring], keep)
    memory = memory.write_raw(2, positions, new["raw", 2], keep)
    for source, ratio in ((2, 2), (4, 1)):
        first, rows = start // ratio, new["global", source]
        group = first[:, None] + jnp.arange(rows.shape[1])
        ends = (group + 1) * ratio <= (start + keep.sum(1))[:, None]
        memory = memory.write_global(source, first, rows, new["keys", source], ends)
    return reads, memory


def draw(rng: np.random.Generator, model: Any) -> dict:
    """New rows of one step, already rounded to the formats of the cache."""

    def rows(form: str, *shape: int) -> np.ndarray:
        size = 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))
        return np.asarray(ROUND[form]((rng.normal(size=shape) * size).astype(np.float32)))

    main = "fp4" if model.use_fp4_sparse_kv else "e4m3"
    new: dict = {("window", ring): rows("e4m3", S, Q, 32) for ring in RINGS}
    new["raw", 2] = rng.normal(size=(S, Q, 2, 32)).astype(np.float32)
    for source, ratio in ((2, 2), (4, 1)):
        new["global", source] = rows(main, S, Q // ratio, 32)
        new["keys", source] = rows("mxfp4", S, Q // ratio, 32)
    return new


class Record:
    """What was written, by position; NaN where nothing was."""

    def __init__(self) -> None:
        self.rows: dict = {("window", ring): self.blank(CAPACITY, 32) for ring in RINGS}
        self.rows["raw", 2] = self.blank(CAPACITY, 2, 32)
        for source, ratio in ((2, 2), (4, 1)):
            self.rows["global", source] = self.blank(CAPACITY // ratio, 32)
            self.rows["keys", source] = self.blank(CAPACITY // ratio, 32)

    @staticmethod
    def blank(*shape: int) -> np.ndarray:
        return np.full((S, *shape), np.nan, np.float32)

    def check(self, reads: dict, start: np.ndarray, index: np.ndarray) -> int:
        """Every row that was written reads back; returns how many rows were compared."""
        compared = 0
        for name, got in reads.items():
            got = np.asarray(got)
            assert np.isfinite(got).all()
            if name[0] == "global":
                groups = self.rows[name].shape[1]
                want = self.rows[name][np.arange(S)[:, None, None], index % groups]
                want = np.where((index < groups)[..., None], want, np.nan)
            elif name[0] == "keys":
                want = self.rows[name]
            else:
                count = got.shape[1]
                at = start[:, None] - count + np.arange(count)
                want = np.where(
                    (at >= 0).reshape(*at.shape, *[1] * (got.ndim - 2)),
                    self.rows[name][np.arange(S)[:, None], at],
                    np.nan,
                )
            known = ~np.isnan(want)
            np.testing.assert_array_equal(got[known], want[known], err_msg=str(name))
            compared += known.sum() // 32
        return compared

    def write(self, new: dict, start: np.ndarray, keep: np.ndarray) -> None:
        for s in range(S):
            for q in np.flatnonzero(keep[s]):
                for name in [("window", ring) for ring in RINGS] + [("raw", 2)]:
                    self.rows[name][s, start[s] + q] = new[name][s, q]
            for source, ratio in ((2, 2), (4, 1)):
                first, end = start[s] // ratio, (start[s] + keep[s].sum()) // ratio
                for group in range(first, end):
                    for name in (("global", source), ("keys", source)):
                        self.rows[name][s, group] = new[name][s, group - first]


@pytest.mark.parametrize("kind", KINDS)
def test_random_chunks_and_rewinds_read_back(kind: str) -> None:
    """Chunks of 0 to 20 rows; after each, up to ring_slack rows may be taken back and rewritten."""
    memory, _, _ = fresh(kind)
    model, run = KINDS[kind][0], jax.jit(step, donate_argnums=0)
    compared = 0
    for seed in range(3):
        rng, record, start = np.random.default_rng(seed), Record(), np.zeros(S, np.int32)
        end = start.copy()
        for _ in range(8):
            count = np.minimum(rng.choice([0, 1, 5, 6, 20], S), CAPACITY - start)
            keep = np.arange(Q) < count[:, None]
            index = rng.integers(0, 70, (S, 2, 5)).astype(np.int32)
            new = draw(rng, model)
            reads, memory = run(memory, start, index, new, keep)
            compared += record.check(reads, start, index)
            record.write(new, start, keep)
            end = np.maximum(end, start + count)
            start = np.maximum(start + count - rng.integers(0, 7, S), end - CACHE.ring_slack)
            start = np.maximum(start, 0).astype(np.int32)
    assert compared > 2500


@pytest.fixture(scope="module")
def write() -> Callable:
    def everything(memory: Memory, start: jax.Array, new: dict, keep: jax.Array) -> Memory:
        return step(memory, start, jnp.zeros((S, 1), jnp.int32), new, keep)[1]

    return jax.jit(everything)


def pools(memory: PagedMemory) -> list[tuple[str, np.ndarray]]:
    """Every pool, by the id that addresses its first axis."""
    by_slot = [*memory.windows, *memory.raw.values()]
    by_block = [*memory.rows.values(), *memory.keys.values()]
    named = [("slot", p) for p in by_slot] + [("block", p) for p in by_block]
    return [(by, np.asarray(pool).reshape(pool.shape[0], -1)) for by, pool in named]


@pytest.mark.parametrize("kind", ["values", "bytes"])
def test_only_own_slots_and_blocks_change(kind: str, write: Callable) -> None:
    memory, slots, tables = fresh(kind)
    tables[0], slots[0] = 0, 0  # a padding sequence that writes all the same
    memory = bind(memory, jnp.asarray(slots), jnp.asarray(tables))
    start = np.array([3, 30, 40], np.int32)
    keep = np.arange(Q) < np.array([20, 7, 0])[:, None]
    after = write(memory, start, draw(np.random.default_rng(1), KINDS[kind][0]), keep)
    # Sequence 1 writes positions 30 .. 36, which are in its blocks 3 and 4; sequence 2 nothing.
    may = {"slot": {0, 1}, "block": {0, *tables[1, 3:5].tolist()}}
    must = {"slot": 1, "block": tables[1, 4]}
    changed = 0
    for (by, old), (_, new) in zip(pools(memory), pools(after), strict=True):
        different = np.flatnonzero((old != new).any(axis=1))
        assert set(different.tolist()) <= may[by]
        changed += must[by] in different
    assert changed == 7  # two rings, raw rows, and rows and keys of two sources


def test_rows_that_are_not_kept_leave_the_ring() -> None:
    memory, slots, _ = fresh("values")
    positions = np.tile(np.arange(12, dtype=np.int32), (S, 1))
    keep = np.ones((S, 12), bool)
    rows = np.random.default_rng(2).normal(size=(S, 12, 32)).astype(np.float32)
    run = jax.jit(lambda m, p, r, k: m.write_window(1, p, r, k))
    once = run(memory, positions, rows, keep)
    keep[:, 3:9] = False
    twice = run(once, positions, -rows, keep)
    ring = np.asarray(twice.windows[1])[slots]
    np.testing.assert_array_equal(ring[:, 3:9], rows[:, 3:9])
    np.testing.assert_array_equal(ring[:, :3], -rows[:, :3])
    np.testing.assert_array_equal(ring[:, 9:12], -rows[:, 9:12])
    assert not ring[:, 12:].any()


def test_released_ring_slots() -> None:
    """300 rows into a ring of 134: 166 lands in row 32, 299 in row 31; 0 .. 165 are gone."""
    assert layout.ring_rows(v41_flash(), CacheConfig())[1] == 134
    model = dataclasses.replace(FP4, window=128)
    memory = create_paged(model, CacheConfig(), blocks=2, slots=2, dtype=jnp.float32)
    memory = bind(memory, jnp.array([1]), jnp.array([[1]]))
    positions = jnp.arange(300)[None]
    rows = jnp.broadcast_to(positions[..., None] + 1.0, (1, 300, 32))
    after = memory.write_window(0, positions, rows, jnp.ones((1, 300), bool))
    ring = np.asarray(after.windows[0])[1, :, 0] - 1
    assert ring[32] == 166 and ring[31] == 299
    assert sorted(ring.tolist()) == list(range(166, 300))
    np.testing.assert_array_equal(after.read_window(0, jnp.array([300]))[0, :, 0], range(173, 301))


@pytest.mark.parametrize("model", [FP4, FP8, v41_flash()], ids=["fp4", "mxfp8", "v4.1"])
@pytest.mark.parametrize("cache", [CACHE, WIDE])
def test_pools_have_the_sizes_of_the_layout(model: Any, cache: CacheConfig) -> None:
    cache = dataclasses.replace(cache, block_tokens=128)
    shape = jax.eval_shape(lambda: create_paged(model, cache, blocks=3, slots=2, format="bytes"))
    live = layout.state_layout(model, cache).live
    block = layout.block_layout(model, cache)

    def size(pools: Any) -> int:
        return sum(p.size * p.dtype.itemsize for p in pools)

    assert size(shape.windows) == 2 * (live.stored + live.dropped)
    assert size(shape.raw.values()) == 2 * live.compression
    assert size(shape.rows.values()) + size(shape.keys.values()) == 3 * block.payload


def test_pool_bytes_are_the_released_layout() -> None:
    """A block's second row and key, found by the offsets of `layout`, decode to what was written."""
    memory, slots, tables = fresh("bytes")
    new = draw(np.random.default_rng(3), FP4)
    keep = np.ones((S, Q), bool)
    after = jax.jit(step)(memory, np.zeros(S, np.int32), np.zeros((S, 1), np.int32), new, keep)[1]
    # Row 1 of source 4 (8 rows a page): interleaved 18 bytes; its key 16 bytes, scale behind 8 * 16.
    page = np.asarray(after.rows[4])[tables[2, 0]]
    codes, scales = formats.encode_fp4_e4m3(new["global", 4][2, 1], rounded=True)
    np.testing.assert_array_equal(page[18:36], np.concatenate([codes, scales]))
    page = np.asarray(after.keys[4])[tables[2, 0]]
    codes, scales = formats.encode_mxfp4(new["keys", 4][2, 1])
    np.testing.assert_array_equal(page[16:32], codes)
    np.testing.assert_array_equal(page[129:130], scales)
    # The ring holds positions 6 .. 19; 15 is row 1, of 33 bytes.
    ring = np.asarray(after.windows[0])[slots[2]]
    codes, scales = formats.encode_e4m3(new["window", 0][2, 15])
    np.testing.assert_array_equal(ring[33:66], np.concatenate([codes, scales]))


def test_dense_memory_carries_gradients() -> None:
    """d/drows of sum(weight * read(write(rows))) is the weight where a row is kept and read."""
    rng = np.random.default_rng(4)
    rows = jnp.asarray(rng.normal(size=(1, 12, 32)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(1, 8, 32)), jnp.float32)
    picks = jnp.array([[3, 3, 7]])
    keep = jnp.arange(12)[None] != 6

    def loss(rows: jax.Array) -> jax.Array:
        memory = create_dense(FP4, 1, 12)
        memory = memory.write_window(0, jnp.arange(12)[None], rows, keep)
        memory = memory.write_global(4, jnp.array([0]), rows, rows, keep)
        window = jnp.sum(memory.read_window(0, jnp.array([12])) * weight)
        return window + jnp.sum(memory.read_global(4, picks) * weight[:, :3])

    want = np.zeros((1, 12, 32), np.float32)
    want[:, 4:] += weight
    want[:, 6] = 0
    want[:, 3] += weight[:, 0] + weight[:, 1]
    want[:, 7] += weight[:, 2]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(rows), want, rtol=1e-6)


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="format is 'fp8'; choose one of values, bytes"):
        create_paged(FP4, CACHE, blocks=2, slots=2, format="fp8")
    with pytest.raises(ValueError, match="blocks 1, slots 2; number 0 of each is reserved"):
        create_paged(FP4, CACHE, blocks=1, slots=2)
    with pytest.raises(ValueError, match="capacity is 1 tokens; one group takes 2"):
        create_dense(FP4, 1, 1)
    memory = create_paged(FP4, CACHE, blocks=2, slots=2)
    with pytest.raises(ValueError, match=r"slots \(1,\) and tables \(2, 1\)"):
        bind(memory, jnp.zeros(1, jnp.int32), jnp.zeros((2, 1), jnp.int32))
