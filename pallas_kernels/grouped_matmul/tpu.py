"""Grouped matmul for TPUs: per visit, a block of rows times a tile of one expert's weights.

Weights are decoded in the kernel. Two FP4 channels share a byte, and lanes are costly to
interleave, so x comes as even and odd channels and meets low and high half bytes apart.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats
from pallas_kernels.grouped_matmul.reference import activate
from pallas_kernels.grouped_matmul.schedule import bound, visits
from pallas_kernels.grouped_matmul.weights import GROUP, Weights

VMEM = 56 << 20  # bytes; a TPU 7x core has 64 MiB, the others 128
ROWS, COLUMNS = 512, 256  # greatest block of rows, greatest tile of outputs


def row_block(rows: int, experts: int) -> int:
    """Rows per visit: a power of two near an expert's fair share, 16 to ROWS."""
    fair = max(16, rows // max(experts, 1))
    return min(ROWS, 1 << (fair - 1).bit_length())


def tile(width: int) -> int:
    """Outputs per visit: the greatest power of two below COLUMNS that divides them, from 128 on."""
    return next((n for n in (COLUMNS, 128) if width % n == 0), width)


def grouped_matmul(
    x: jax.Array, weights: Weights, sizes: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """See the reference."""
    body = functools.partial(_plain, weights.packing)
    return _call(
        body, x, [(weights, 0)], sizes, None, weights.data.shape[1], jnp.float32, interpret
    )


def gated(
    x: jax.Array,
    weights: Weights,
    sizes: jax.Array,
    scale: jax.Array,
    limit: float,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See the reference."""
    hidden = weights.data.shape[1] // 2
    parts = [(weights, 0), (weights, hidden)]
    body = functools.partial(_gated, weights.packing, limit)
    return _call(body, x, parts, sizes, scale, hidden, x.dtype, interpret)


def _call(
    body: Any,
    x: jax.Array,
    parts: list[tuple[Weights, int]],
    sizes: jax.Array,
    scale: jax.Array | None,
    outputs: int,
    dtype: Any,
    interpret: Any,
) -> jax.Array:
    """The kernel `body` on every tile of outputs and, inside, every visit."""
    rows, packing = x.shape[0], parts[0][0].packing
    block, columns = row_block(rows, sizes.shape[0]), tile(outputs)
    halves = [x[:, i::packing] for i in range(packing)]
    plan = visits(sizes, rows, block)
    arrays: list[jax.Array] = list(halves)
    specs = [pl.BlockSpec((block, h.shape[1]), lambda n, v, e, b, *_: (b[v], 0)) for h in halves]
    for weights, begin in parts:
        skip = begin // columns
        for array in (weights.data, weights.scales):
            if array is None:
                continue
            arrays.append(array)
            specs.append(
                pl.BlockSpec(
                    (None, columns, array.shape[2]),
                    lambda n, v, e, b, *_, skip=skip: (e[v], n + skip, 0),
                )
            )
    if scale is not None:
        arrays.append(scale[:, None])
        specs.append(pl.BlockSpec((block, 1), lambda n, v, e, b, *_: (b[v], 0)))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(outputs // columns, bound(rows, block, sizes.shape[0])),
            in_specs=specs,
            out_specs=pl.BlockSpec((block, columns), lambda n, v, e, b, *_: (b[v], n)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(*plan, *arrays)


def _plain(packing: int, expert: Any, block: Any, begin: Any, end: Any, fresh: Any, *refs: Any):
    *inputs, out_ref = refs
    halves, weights = inputs[:packing], inputs[packing:]
    _visit(block, begin, end, fresh, out_ref, lambda: _product(halves, weights))


def _gated(
    packing: int,
    limit: float,
    expert: Any,
    block: Any,
    begin: Any,
    end: Any,
    fresh: Any,
    *refs: Any,
):
    *inputs, scale_ref, out_ref = refs
    halves, weights = inputs[:packing], inputs[packing:]
    half = len(weights) // 2

    def make() -> jax.Array:
        dtype = out_ref.dtype
        parts = [_product(halves, w).astype(dtype) for w in (weights[:half], weights[half:])]
        return activate(jnp.concatenate(parts, axis=-1), scale_ref[...], limit)

    _visit(block, begin, end, fresh, out_ref, make)


def _visit(block: Any, begin: Any, end: Any, fresh: Any, out_ref: Any, make: Any) -> None:
    """Write this visit's rows of the block, and zeros everywhere at the first visit."""
    v = pl.program_id(1)

    @pl.when(fresh[v] == 1)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(end[v] > begin[v])
    def _() -> None:
        row = block[v] * out_ref.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
        mine = (row >= begin[v]) & (row < end[v])
        out_ref[...] = jnp.where(mine, make(), out_ref[...])


def _product(halves: Any, weights: Any) -> jax.Array:
    """float32 [B, n]: the block's rows times a tile of weights [n, D], transposed."""
    if len(weights) == 1:
        return _times(halves[0][...], weights[0][...])
    byte = weights[0][...].astype(jnp.int32)
    scale = _spread(weights[1][...], byte.shape[1], GROUP // len(halves))
    dtype = halves[0].dtype
    if len(halves) == 1:
        return _times(halves[0][...], (formats.e4m3_value(byte) * scale).astype(dtype))
    low = (formats.e2m1_value(byte & 15) * scale).astype(dtype)
    high = (formats.e2m1_value(byte >> 4) * scale).astype(dtype)
    return _times(halves[0][...], low) + _times(halves[1][...], high)


def _times(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x, weights.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _spread(scales: jax.Array, width: int, group: int) -> jax.Array:
    """float32 [n, width]: each E8M0 scale of [n, width / group] under its channels.

    By a product with zeros and ones, exact for powers of two.
    """
    value = formats.e8m0_value(scales.astype(jnp.int32)).astype(jnp.bfloat16)
    row = jax.lax.broadcasted_iota(jnp.int32, (scales.shape[1], width), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (scales.shape[1], width), 1)
    ones = jnp.where(lane // group == row, 1.0, 0.0).astype(jnp.bfloat16)
    return jnp.dot(value, ones, preferred_element_type=jnp.float32)
