"""Window attention for TPUs: a block of query rows and the two blocks of window rows it can see.

Query row q sees no window row outside q .. q + W - 1 + (block's rows), so with window blocks of W
rows and query blocks that divide W, block b of queries needs window blocks i and i + 1, i = b B // W.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats
from pallas_kernels.softmax import absorb, add_sink, fresh, normed
from pallas_kernels.window_attention.reference import Attended

VMEM = 64 << 20  # bytes a kernel may ask for; below what v5e, v5p, v6e (128 MiB) and 7x have


def query_block(rows: int, window: int, heads: int) -> int:
    """Query rows per step: all of a decode step, else as many as make 512 rows of the matmul."""
    block = max(8, 512 // heads)
    if rows <= block:
        return rows
    while window % block:
        block //= 2
    return block


def window_attention(
    query: jax.Array,
    rows: jax.Array,
    first: jax.Array,
    last: jax.Array,
    sink: jax.Array,
    *,
    window: int,
    interpret: Any = False,
) -> Attended:
    """See the reference; `window` is W, and row q sees rows q .. q + W at most, N = W + Q."""
    sequences, count, heads, width = query.shape
    size = query_block(count, window, heads)

    def at_query(s: jax.Array, b: jax.Array) -> tuple[Any, ...]:
        return s, b, 0, 0

    def keys(which: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, window, width), lambda s, b: (s, b * size // window + which, 0))

    bound = pl.BlockSpec((None, size, 1), lambda s, b: (s, b, 0))
    per_head = pl.BlockSpec((None, size, heads, 1), at_query)
    shape = jax.ShapeDtypeStruct
    mixed, top, total = pl.pallas_call(
        functools.partial(_body, window, rows.shape[1], count),
        grid=(sequences, pl.cdiv(count, size)),
        in_specs=[
            pl.BlockSpec((None, size, heads, width), at_query),
            keys(0, rows.shape[-1]),
            keys(1, rows.shape[-1]),
            bound,
            bound,
            pl.BlockSpec((heads, 1), lambda s, b: (0, 0)),
        ],
        out_specs=[pl.BlockSpec((None, size, heads, width), at_query), per_head, per_head],
        out_shape=[
            shape(query.shape, query.dtype),
            shape((*query.shape[:3], 1), jnp.float32),
            shape((*query.shape[:3], 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="window_attention",
    )(query, rows, rows, first[..., None], last[..., None], sink[:, None])
    return Attended(mixed, top[..., 0], total[..., 0])


def _body(
    window: int,
    count: int,
    queries: int,
    query_ref: Any,
    near_ref: Any,
    far_ref: Any,
    first_ref: Any,
    last_ref: Any,
    sink_ref: Any,
    mixed_ref: Any,
    top_ref: Any,
    total_ref: Any,
) -> None:
    size, heads, width = query_ref.shape
    query = query_ref[...].reshape(size * heads, width)
    base = pl.program_id(1) * size // window * window
    row = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    first = jnp.where(row < queries, first_ref[...], count)
    last = jnp.where(row < queries, last_ref[...], -1)
    state = fresh(size * heads, width)
    for which, ref in enumerate((near_ref, far_ref)):
        begin = base + which * window
        keys, shown = visible(ref, begin, count, first, last, query.dtype)
        shown = jnp.broadcast_to(shown[:, None], (size, heads, window))
        state = absorb(state, query, keys, shown.reshape(size * heads, window) > 0)
    sink = jnp.broadcast_to(sink_ref[...][None], (size, heads, 1)).reshape(size * heads, 1)
    state = add_sink(state, sink)
    mixed_ref[...] = normed(state).reshape(size, heads, width).astype(mixed_ref.dtype)
    top_ref[...] = state.top.reshape(size, heads, 1)
    total_ref[...] = state.total.reshape(size, heads, 1)


def visible(
    ref: Any, begin: jax.Array, count: int, first: jax.Array, last: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Window rows begin .. of a block, decoded, and which query sees which.

    Args:
      ref: [K, C] values or packed E4M3 rows.
      count: rows there are; beyond them, and where nobody looks, the block may hold anything.
      first, last: int32 [B, 1].

    Returns:
      [K, C], zero where nobody looks, and int32 [B, K], one where shown.
    """
    size = ref.shape[0]
    sees = last >= first
    low = jnp.min(jnp.where(sees, first, count))
    high = jnp.minimum(jnp.max(jnp.where(sees, last, -1)), count - 1)
    at = begin + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    keys = decode_rows(ref[...]) if ref.dtype == jnp.uint8 else ref[...]
    keys = jnp.where((at >= low) & (at <= high), keys, 0).astype(dtype)
    across = begin + jax.lax.broadcasted_iota(jnp.int32, (first.shape[0], size), 1)
    return keys, ((across >= first) & (across <= last)).astype(jnp.int32)


def decode_rows(packed: jax.Array) -> jax.Array:
    """float32 [K, C] of packed E4M3 rows uint8 [K, C + C / 32].

    A scale reaches its 32 channels by a product with zeros and ones, exact for powers of two.
    """
    width = packed.shape[-1] * 32 // 33
    byte = packed.astype(jnp.int32)
    scale = formats.e8m0_value(byte[:, width:])
    group = jax.lax.broadcasted_iota(jnp.int32, (width // 32, width), 0)
    channel = jax.lax.broadcasted_iota(jnp.int32, (width // 32, width), 1)
    spread = jnp.where(channel // 32 == group, 1.0, 0.0)
    scale = jnp.where(jnp.isnan(scale), 0, scale)
    scales = jnp.dot(
        scale.astype(jnp.bfloat16), spread.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )
    return formats.e4m3_value(byte[:, :width]) * scales
