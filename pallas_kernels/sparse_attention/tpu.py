"""Sparse attention for TPUs: per query, its rows are copied from HBM one by one, in blocks.

Two buffers: a block is copied while the one before is decoded and attended to. Rows come as words
(`rows`), whose bytes hold channels in another order; queries are brought into it, and results out
of it, by products with zeros and ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats
from pallas_kernels.softmax import Attended, Softmax, absorb, fresh, normed
from pallas_kernels.sparse_attention.rows import channel_order
from pallas_kernels.sparse_attention.schedule import block_of, fetches
from pallas_kernels.window_attention.tpu import per_head

VMEM = 56 << 20  # bytes; a TPU 7x core has 64 MiB, the others 128
GROUP = 16  # channels under one scale
UNROLL = 8  # copies started per turn of the loop


def sparse_attention(
    query: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    index: jax.Array,
    valid: jax.Array,
    *,
    page_rows: int,
    interpret: Any = False,
) -> Attended:
    """See the reference."""
    sequences, count, heads, width = query.shape
    block = block_of(index.shape[-1])
    plan = fetches(tables, index, valid, page_rows, block)
    order = (channel_order(width)[:, None] == jnp.arange(width)).astype(query.dtype)
    per_query = pl.BlockSpec((None, None, heads, width), lambda s, q: (s, q, 0, 0))
    scalars = functools.partial(pl.BlockSpec, memory_space=pltpu.SMEM)
    mixed, sums = pl.pallas_call(
        functools.partial(_body, block),
        grid=(sequences, count),
        in_specs=[
            scalars((1, 1, plan.address.shape[-1]), lambda s, q: (s * count + q, 0, 0)),
            scalars((1, 1, 1), lambda s, q: (s * count + q, 0, 0)),
            per_query,
            pl.BlockSpec((width, width), lambda s, q: (0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[per_query, pl.BlockSpec((None, None, 2, heads), lambda s, q: (s, q, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((sequences, count, 2, heads), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, block, *pool.shape[1:]), pool.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="sparse_attention",
    )(
        plan.address.reshape(sequences * count, 1, -1),
        plan.selected.reshape(sequences * count, 1, 1),
        query,
        order,
        pool,
    )
    return Attended(mixed, sums[:, :, 0], sums[:, :, 1])


def _body(
    block: int,
    address_ref: Any,
    count_ref: Any,
    query_ref: Any,
    order_ref: Any,
    pool_ref: Any,
    mixed_ref: Any,
    sums_ref: Any,
    buffer: Any,
    semaphore: Any,
) -> None:
    heads, width = query_ref.shape
    count = count_ref[0, 0, 0]
    blocks = pl.cdiv(count, block)
    query = _ordered(query_ref[...], order_ref[...], 1)

    def copy(row: Any, slot: Any, at: Any) -> Any:
        return pltpu.make_async_copy(pool_ref.at[row], buffer.at[slot, at], semaphore.at[slot])

    def start(b: Any) -> None:
        def several(i: Any, _: None) -> None:
            for at in range(UNROLL):
                at = i * UNROLL + at
                copy(address_ref[0, 0, b * block + at], b % 2, at).start()

        jax.lax.fori_loop(0, block // UNROLL, several, None)

    def attend(b: Any, state: Softmax) -> Softmax:
        pl.when(b + 1 < blocks)(lambda: start(b + 1))
        whole = pool_ref.at[pl.ds(0, block)]  # as many bytes as all copies together
        pltpu.make_async_copy(whole, buffer.at[b % 2], semaphore.at[b % 2]).wait()
        keys = _decode(buffer[b % 2].reshape(block, width // 4)).astype(query.dtype)
        at = b * block + jax.lax.broadcasted_iota(jnp.int32, (heads, block), 1)
        return absorb(state, query, keys, at < count)

    pl.when(blocks > 0)(lambda: start(0))
    state = jax.lax.fori_loop(0, blocks, attend, fresh(heads, width))
    mixed = normed(state).astype(mixed_ref.dtype)
    mixed_ref[...] = _ordered(mixed, order_ref[...], 0).astype(mixed_ref.dtype)
    sums_ref[0:1] = per_head(state.top, 1, heads)
    sums_ref[1:2] = per_head(state.total, 1, heads)


def _ordered(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """x [H, C] with its channels in the order of words (axis 1), or back (axis 0); exact."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    made = jax.lax.dot_general(
        x,
        order,
        (((1,), (axis,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return made.astype(x.dtype)


def _decode(words: jax.Array) -> jax.Array:
    """float32 [K, C] of uint32 [K, C / 4], channels in the order of words."""
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    lanes = words.shape[1]
    scale = formats.e4m3_value(words >> 16 & 255)
    source = jax.lax.broadcasted_iota(jnp.int32, (lanes, 2 * lanes), 0)
    target = jax.lax.broadcasted_iota(jnp.int32, (lanes, 2 * lanes), 1)
    ones = jnp.where(source == target // (GROUP // 2), 1.0, 0.0).astype(jnp.bfloat16)
    scales = jnp.dot(scale.astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
    near, far = scales[:, :lanes], scales[:, lanes:]
    parts = [(0, near), (4, near), (8, far), (12, far)]
    return jnp.concatenate([formats.e2m1_value(words >> n & 15) * s for n, s in parts], axis=1)
