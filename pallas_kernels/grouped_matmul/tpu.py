"""Grouped matmul for TPUs: per visit, a block of rows times a tile of one expert's weights.

Coded weights are decoded in the kernel, when a visit's expert is not the one before. Two FP4
channels share a byte, and lanes are costly to interleave, so x comes as even and odd channels and
meets low and high half bytes apart. A tile is worked on in chunks of outputs, in a loop: the wider
the tile, the fewer times all rows are read, and the chunk keeps the program short.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import decoding, formats
from pallas_kernels.grouped_matmul.reference import activate
from pallas_kernels.grouped_matmul.schedule import bound, visits
from pallas_kernels.grouped_matmul.weights import GROUP, Weights

VMEM = 56 << 20  # bytes; a TPU 7x core has 64 MiB, the others 128
TILE = 36 << 20  # bytes of it for the weights' tiles, coded and decoded, and the results
ROWS, CHUNK = 512, 256  # greatest block of rows; outputs at a time


def row_block(rows: int, experts: int) -> int:
    """Rows per visit: a power of two near an expert's fair share, 16 to ROWS."""
    fair = max(16, rows // max(experts, 1))
    return min(ROWS, 1 << (fair - 1).bit_length())


def chunk(width: int) -> int:
    """Outputs at a time: a power of two up to CHUNK that divides them, from 128 on, or all."""
    return next((n for n in (CHUNK, 128) if width % n == 0), width)


class Form(NamedTuple):
    """What is fixed while the kernel is traced; N outputs of one part."""

    packing: int  # channels per element of the weights
    coded: bool
    parts: int  # 2: gates and ups
    limit: float | None  # of the activation; None: no activation
    outputs: int  # N
    inputs: int

    def columns(self, block: int, itemsize: int) -> int:
        """Outputs per tile: all, or a divisor in whole chunks whose arrays take at most TILE."""
        stored = self.parts * self.inputs * (1.1 / self.packing if self.coded else itemsize)
        decoded = self.parts * self.inputs * itemsize * self.coded
        most = TILE / (2 * stored + decoded + 2 * block * 4)
        one = chunk(self.outputs)
        pieces = self.outputs // one
        return one * max(
            n for n in range(1, pieces + 1) if pieces % n == 0 and n <= max(1, most // one)
        )

    def split(self, refs: Any) -> tuple[Any, Any, Any, Any, Any]:
        """(x's halves, per part (data[, scales]), scale, out, per part decoded halves)."""
        refs = list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]  # noqa: E731
        halves = take(self.packing)
        weights = [take(1 + self.coded) for _ in range(self.parts)]
        scale = take(self.limit is not None)
        (out,) = take(1)
        return (
            halves,
            weights,
            scale,
            out,
            [take(self.packing) for _ in range(len(refs) // self.packing)],
        )


def form(weights: Weights, limit: float | None) -> Form:
    """The form of a call; with a limit, weights are gates above ups."""
    parts = 1 if limit is None else 2
    _, rows, stored = weights.data.shape
    return Form(
        weights.packing,
        weights.scales is not None,
        parts,
        limit,
        rows // parts,
        stored * weights.packing,
    )


def grouped_matmul(
    x: jax.Array, weights: Weights, sizes: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """See the reference."""
    return _call(form(weights, None), x, weights, sizes, None, jnp.float32, interpret)


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
    return _call(form(weights, limit), x, weights, sizes, scale, x.dtype, interpret)


def _call(
    form: Form,
    x: jax.Array,
    weights: Weights,
    sizes: jax.Array,
    scale: jax.Array | None,
    dtype: Any,
    interpret: Any,
) -> jax.Array:
    """The kernel on every tile of outputs and, inside, every visit."""
    rows = x.shape[0]
    block = row_block(rows, sizes.shape[0])
    columns = form.columns(block, x.dtype.itemsize)
    tiles = form.outputs // columns
    plan = visits(sizes, rows, block)
    arrays: list[jax.Array] = [x[:, i :: form.packing] for i in range(form.packing)]
    specs = [pl.BlockSpec((block, a.shape[1]), lambda n, v, e, b, *_: (b[v], 0)) for a in arrays]
    for part in range(form.parts):
        for array in jax.tree.leaves(weights):
            arrays.append(array)
            at = functools.partial(_weight_block, part * tiles)
            specs.append(pl.BlockSpec((None, columns, array.shape[2]), at))
    if scale is not None:
        arrays.append(scale[:, None])
        specs.append(pl.BlockSpec((block, 1), lambda n, v, e, b, *_: (b[v], 0)))
    decoded = pltpu.VMEM((columns, form.inputs // form.packing), x.dtype)
    return pl.pallas_call(
        functools.partial(_body, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(tiles, bound(rows, block, sizes.shape[0])),
            in_specs=specs,
            out_specs=pl.BlockSpec((block, columns), lambda n, v, e, b, *_: (b[v], n)),
            scratch_shapes=[decoded] * (form.parts * form.packing * form.coded),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, form.outputs), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(*plan, *arrays)


def _weight_block(skip: int, n: Any, v: Any, expert: Any, *_: Any) -> tuple[Any, Any, int]:
    return expert[v], n + skip, 0


def _body(
    form: Form, expert: Any, block: Any, begin: Any, end: Any, fresh: Any, *refs: Any
) -> None:
    halves, weights, scale, out_ref, decoded = form.split(refs)
    v, dtype = pl.program_id(1), halves[0].dtype
    size = chunk(out_ref.shape[1])

    def chunks(work: Any) -> None:
        def one(c: jax.Array, _: None) -> None:
            work(pl.ds(pl.multiple_of(c * size, size), size))

        jax.lax.fori_loop(0, out_ref.shape[1] // size, one, None)

    def decode(at: Any) -> None:
        for (data, scales), made in zip(weights, decoded, strict=True):
            values = _decode(data[at], scales[at], form.packing, dtype)
            for half, value in zip(made, values, strict=True):
                half[at] = value

    def multiply(at: Any) -> None:
        products = [_product(halves, part, at) for part in decoded or weights]
        if form.limit is not None:
            both = jnp.concatenate([p.astype(dtype) for p in products], axis=-1)
            products = [activate(both, scale[0][...], form.limit)]
        row = block[v] * out_ref.shape[0] + jax.lax.broadcasted_iota(
            jnp.int32, (out_ref.shape[0], size), 0
        )
        mine = (row >= begin[v]) & (row < end[v])
        out_ref[:, at] = jnp.where(mine, products[0], out_ref[:, at])

    @pl.when(fresh[v] == 1)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    if form.coded:
        new = (v == 0) | (expert[v] != expert[jnp.maximum(v - 1, 0)])
        pl.when(new)(lambda: chunks(decode))

    @pl.when(end[v] > begin[v])
    def _() -> None:
        chunks(multiply)


def _product(x_refs: Any, weights_refs: Any, at: Any) -> jax.Array:
    """float32 [B, n]: a block's rows times weights [n, D], transposed; both in halves or whole."""
    products = [
        jax.lax.dot_general(
            x[...],
            weights[at].astype(x.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        for x, weights in zip(x_refs, weights_refs, strict=True)
    ]
    return functools.reduce(jnp.add, products)


def _decode(codes: jax.Array, scales: jax.Array, packing: int, dtype: Any) -> tuple[jax.Array, ...]:
    """[n, D] in `dtype` of FP8 codes, or even and odd channels [n, D / 2] of FP4 codes."""
    value = formats.e8m0_value(scales.astype(jnp.int32))
    scale = decoding.spread(value, codes.shape[1], GROUP // packing)
    if packing == 1:
        return ((decoding.e4m3(codes, jnp.float32) * scale).astype(dtype),)
    unit = scale * decoding.E2M1_UNIT
    return tuple((half * unit).astype(dtype) for half in decoding.e2m1(codes, jnp.float32))
