"""Shapes by name: V4.1-Flash, and small ones for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.schedule import block_of
from pallas_kernels.sparse_attention.tpu import UNROLL


class Shape(NamedTuple):
    """S sequences of Q rows that select K of the rows of T pages each; H heads, C channels."""

    sequences: int
    rows: int
    selected: int
    pages: int
    page_rows: int
    heads: int
    width: int
    dtype: Any = jnp.bfloat16

    def function(self, kernels: str) -> Callable[..., Any]:
        """The op for this shape."""
        return functools.partial(sparse_attention, page_rows=self.page_rows, kernels=kernels)

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arguments of `reference.sparse_attention`."""
        s, q, shape = self.sequences, self.rows, jax.ShapeDtypeStruct
        pool = (self.sequences * self.pages * self.page_rows, 1, self.width // 4)
        return (
            shape((s, q, self.heads, self.width), self.dtype),
            shape(pool, jnp.uint32),
            shape((s, self.pages), jnp.int32),
            shape((s, q, self.selected), jnp.int32),
            shape((s, q, self.selected), jnp.bool_),
        )

    def prefetched(self) -> tuple[Any, ...]:
        """Scalars that steer the kernel's blocks: none."""
        return ()

    def executions(self) -> tuple[int, ...]:
        """When all are valid: of ordering a query, of turns that start copies of the first block
        and of later ones, of attending to a block, and of writing the results.
        """
        block, steps = block_of(self.selected), self.sequences * self.rows
        blocks, turns = -(-self.selected // block), block // UNROLL
        return steps, steps * turns, steps * (blocks - 1) * turns, steps * blocks, steps

    def operations(self) -> int:
        """Multiplications and additions of the two products."""
        return 4 * self.sequences * self.rows * self.heads * self.selected * self.width

    def copied_bytes(self) -> int:
        """What the kernel fetches itself: a word for four channels of each row."""
        return self.sequences * self.rows * self.selected * self.width

    def minimum_bytes(self) -> int:
        """Queries, indices, selected rows as FP4, and results."""
        s, q, item = self.sequences, self.rows, jnp.dtype(self.dtype).itemsize
        row = self.width * 9 // 16
        return s * q * (self.selected * (row + 4) + 2 * self.heads * (self.width * item + 4))


SHAPES = {
    "v41_decode_64": Shape(64, 1, 512, 1024, 64, 64, 512),
    "v41_verify_64": Shape(64, 6, 512, 1024, 64, 64, 512),
    "v41_prefill_1024": Shape(1, 1024, 512, 1024, 64, 64, 512),
}
TINY = {
    "decode": Shape(2, 1, 20, 4, 8, 8, 64, jnp.float32),
    "prefill": Shape(2, 3, 37, 6, 16, 8, 64, jnp.float32),
    "bf16": Shape(2, 2, 24, 4, 8, 16, 512),
}
