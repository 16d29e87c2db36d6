"""Window attention for TPUs: a block of query rows and the one or two blocks of window rows it sees.

A step of few rows is one block and sees all window rows. Of more rows, row q sees none outside
q .. q + W, so with window blocks of W rows and query blocks of B that divide W, block b of queries
needs window blocks i and i + 1, i = b B // W. Sums leave with heads on lanes, for a column of them
would occupy a lane each of 128.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import decoding, formats
from pallas_kernels.softmax import Attended, absorb, add_sink, fresh, normed

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
    blocks = pl.cdiv(count, size)

    def keys(which: int) -> pl.BlockSpec:
        if blocks == 1:
            return pl.BlockSpec((None, *rows.shape[1:]), lambda s, b: (s, 0, 0))
        block = (None, window, rows.shape[2])
        return pl.BlockSpec(block, lambda s, b: (s, b * size // window + which, 0))

    parts = [keys(which) for which in range(1 if blocks == 1 else 2)]
    per_query = pl.BlockSpec((None, size, heads, width), lambda s, b: (s, b, 0, 0))
    mixed, sums = pl.pallas_call(
        functools.partial(_body, window, rows.shape[1], count, len(parts)),
        grid=(sequences, blocks),
        in_specs=[
            per_query,
            pl.BlockSpec((None, size, 2), lambda s, b: (s, b, 0)),
            pl.BlockSpec((heads, 1), lambda s, b: (0, 0)),
            *parts,
        ],
        out_specs=[per_query, pl.BlockSpec((None, 2 * size, heads), lambda s, b: (s, b, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((sequences, 2 * blocks * size, heads), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="window_attention",
    )(query, jnp.stack([first, last], axis=-1), sink[:, None], *[rows] * len(parts))
    top, total = jnp.moveaxis(sums.reshape(sequences, blocks, 2, size, heads), 2, 0)
    return Attended(
        mixed,
        top.reshape(sequences, -1, heads)[:, :count],
        total.reshape(sequences, -1, heads)[:, :count],
    )


def _body(
    window: int,
    count: int,
    queries: int,
    parts: int,
    query_ref: Any,
    bounds_ref: Any,
    sink_ref: Any,
    *refs: Any,
) -> None:
    (mixed_ref, sums_ref), keys_refs = refs[parts:], refs[:parts]
    size, heads, width = query_ref.shape
    query = query_ref[...].reshape(size * heads, width)
    base = pl.program_id(1) * size // window * window
    row = pl.program_id(1) * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    first = jnp.where(row < queries, bounds_ref[:, :1], count)
    last = jnp.where(row < queries, bounds_ref[:, 1:], -1)
    state = fresh(size * heads, width)
    for which, ref in enumerate(keys_refs):
        keys, shown = visible(ref, base + which * window, count, first, last, query.dtype)
        shown = jnp.broadcast_to(shown[:, None], (size, heads, ref.shape[0]))
        state = absorb(state, query, keys, shown.reshape(size * heads, ref.shape[0]) > 0)
    sink = jnp.broadcast_to(sink_ref[...][None], (size, heads, 1)).reshape(size * heads, 1)
    state = add_sink(state, sink)
    mixed_ref[...] = normed(state).reshape(size, heads, width).astype(mixed_ref.dtype)
    sums_ref[:size] = per_head(state.top, size, heads)
    sums_ref[size:] = per_head(state.total, size, heads)


def per_head(column: jax.Array, size: int, heads: int) -> jax.Array:
    """[B, H] of a column [B * H, 1], from sublanes to lanes: the diagonal of a broadcast."""
    spread = jnp.broadcast_to(column, (size * heads, heads)).reshape(size, heads, heads)
    row = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 2)
    return jnp.where(row == lane, spread, 0).sum(1)


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
    """float32 [K, C] of packed E4M3 rows uint8 [K, C + C / 32]."""
    width = packed.shape[-1] * 32 // 33
    scale = formats.e8m0_value(packed[:, width:].astype(jnp.int32))
    scale = jnp.where(jnp.isnan(scale), 0, scale)
    return decoding.e4m3(packed[:, :width], jnp.float32) * decoding.spread(scale, width, 32)
