"""Block copies between pools of other sizes, against numpy; block bytes at the released offsets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import layout
from deepinfer_jax.cache.blocks import (
    copy_blocks,
    from_bytes,
    nowhere,
    read_blocks,
    to_bytes,
    write_blocks,
)
from deepinfer_jax.cache.paged import PagedMemory, create_paged
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.presets import tiny, v41_flash

TINY, CACHE = tiny(), CacheConfig(block_tokens=8)
COPY = jax.jit(copy_blocks, donate_argnums=0)


def filled(blocks: int, format: str, seed: int) -> PagedMemory:
    """Pools of random contents."""
    memory = create_paged(TINY, CACHE, blocks=blocks, slots=2, format=format, dtype=jnp.float32)
    rng = np.random.default_rng(seed)

    def some(pools: dict) -> dict:
        return {i: jnp.asarray(rng.integers(0, 99, p.shape), p.dtype) for i, p in pools.items()}

    return dataclasses.replace(memory, rows=some(memory.rows), keys=some(memory.keys))


@pytest.mark.parametrize("format", ["values", "bytes"])
def test_only_the_named_blocks_change(format: str) -> None:
    source, target = filled(12, format, 0), filled(7, format, 1)
    pairs = [(source.rows, target.rows), (source.keys, target.keys)]
    want = [
        (name, layer, np.array(target_pools[layer]), np.asarray(pools[layer]))
        for name, (pools, target_pools) in zip(("rows", "keys"), pairs, strict=True)
        for layer in pools
    ]
    out = nowhere(target)
    after = COPY(target, source, jnp.array([3, 6, out, out]), jnp.array([11, 2, 0, 5]))
    for name, layer, pool, old in want:
        pool[[3, 6]] = old[[11, 2]]
        np.testing.assert_array_equal(getattr(after, name)[layer], pool)
    assert len(want) == 4 and out == 7


def test_one_compilation_serves_all_ids() -> None:
    source, target = filled(12, "values", 0), filled(7, "values", 1)
    target = COPY(target, source, jnp.array([1, 2, 7, 7]), jnp.array([1, 2, 0, 0]))
    count = COPY._cache_size()
    COPY(target, source, jnp.array([5, 4, 3, 7]), jnp.array([9, 8, 7, 0]))
    assert COPY._cache_size() == count


def test_bytes_are_those_of_the_layout() -> None:
    memory = filled(5, "bytes", 2)
    data = np.asarray(to_bytes(memory, read_blocks(memory, jnp.array([4, 1]))))
    made = layout.block_layout(TINY, CACHE)
    for region in made.regions:
        pools = memory.keys if region.kind == "index" else memory.rows
        want = np.asarray(pools[region.layer])[[4, 1]]
        np.testing.assert_array_equal(data[:, region.start : region.stop], want)
    assert data.shape == (2, made.size) and not data[:, made.payload :].any()
    other = write_blocks(memory, jnp.array([2, 3]), from_bytes(memory, jnp.asarray(data)))
    np.testing.assert_array_equal(other.rows[4][2], memory.rows[4][4])
    np.testing.assert_array_equal(other.keys[2][3], memory.keys[2][1])


def test_a_block_has_the_released_size() -> None:
    def make() -> jax.Array:
        memory = create_paged(v41_flash(), CacheConfig(), blocks=9, slots=2, format="bytes")
        return to_bytes(memory, read_blocks(memory, jnp.arange(1, 9)))

    assert jax.eval_shape(make).shape == (8, 114_048)  # 902 tokens: 912,384 bytes


def test_errors_name_the_remedy() -> None:
    values, packed = filled(3, "values", 0), filled(3, "bytes", 0)
    ids = jnp.array([1])
    with pytest.raises(ValueError, match="the same model, block_tokens, format and dtype"):
        write_blocks(packed, ids, read_blocks(values, ids))
    with pytest.raises(ValueError, match="format is 'values'"):
        to_bytes(values, read_blocks(values, ids))
    with pytest.raises(ValueError, match="sender and receiver differ"):
        from_bytes(packed, jnp.zeros((1, 3), jnp.uint8))
