"""What a kernel's pipeline moves between HBM and VMEM: its block mappings, walked over its grid.

A block is fetched when its index differs from the step before, and written back when the next
step's does. Bytes are those of TPU tiles: the last axis in whole lanes of 128, the one before in
whole sublanes of 8. Operands that stay in HBM ("any") are copied by the kernel itself, so their
bytes are the op's to tell (`copied` of its shapes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

SUBLANES, LANES = 8, 128


class Traffic(NamedTuple):
    """Of one call, all its kernels together."""

    steps: int  # of the grids
    read: int  # bytes
    written: int  # bytes


def tile_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes that an array of this shape occupies in HBM."""
    if len(shape) < 2:
        return -(-math.prod(shape) // LANES) * LANES * itemsize
    *lead, rows, columns = shape
    padded = -(-rows // SUBLANES) * SUBLANES * (-(-columns // LANES) * LANES)
    return math.prod(lead) * padded * itemsize


def traffic(
    function: Callable[..., Any], arguments: Sequence[Any], prefetched: Sequence[Any] = ()
) -> Traffic:
    """Traffic of the kernels that `function` calls.

    Args:
      arguments: abstract ones will do.
      prefetched: the scalar arrays that steer the block indices, in the kernel's order.
    """
    total = Traffic(0, 0, 0)
    for mapping in _kernels(jax.make_jaxpr(function)(*arguments).jaxpr):
        total = Traffic(*(a + b for a, b in zip(total, _walk(mapping, prefetched), strict=True)))
    return total


def _kernels(jaxpr: Any) -> Iterator[Any]:
    """Grid mappings of the kernels in a jaxpr, those inside other jaxprs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["grid_mapping"]
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _kernels(inner)


def _walk(mapping: Any, prefetched: Sequence[Any]) -> Traffic:
    steps = np.indices(mapping.grid).reshape(len(mapping.grid), -1)
    moved = [0, 0]
    for position, block in enumerate(mapping.block_mappings):
        if not _is_pipelined(block):
            continue
        start = jax.vmap(lambda *at, b=block: b.compute_start_indices_interpret(at, *prefetched))
        index = np.stack([np.broadcast_to(i, steps.shape[1]) for i in start(*steps)])
        changes = 1 + int((np.diff(index) != 0).any(0).sum())
        shape = [getattr(d, "block_size", 1) for d in block.block_shape]
        size = tile_bytes(shape, np.dtype(block.array_aval.dtype).itemsize)
        moved[position >= mapping.num_inputs] += changes * size
    return Traffic(steps.shape[1], *moved)


def _is_pipelined(block: Any) -> bool:
    """False for operands that the kernel finds in HBM, whole."""
    return "any" not in str(block.transformed_block_aval).lower().split("[")[0]
