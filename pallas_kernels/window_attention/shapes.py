"""Shapes by name: V4.1-Flash, and small ones for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.window_attention.api import window_attention
from pallas_kernels.window_attention.tpu import query_block


class Shape(NamedTuple):
    """S sequences of Q rows; window W, H heads, C channels; rows packed as FP8 or not."""

    sequences: int
    rows: int
    window: int
    heads: int
    width: int
    packed: bool
    dtype: Any = jnp.bfloat16

    def function(self, kernels: str) -> Callable[..., Any]:
        """The op for this shape."""
        return functools.partial(window_attention, window=self.window, kernels=kernels)

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arguments of `reference.window_attention`."""
        s, q, n = self.sequences, self.rows, self.window + self.rows
        row = (jnp.uint8, self.width * 33 // 32) if self.packed else (self.dtype, self.width)
        bound = jax.ShapeDtypeStruct((s, q), jnp.int32)
        return (
            jax.ShapeDtypeStruct((s, q, self.heads, self.width), self.dtype),
            jax.ShapeDtypeStruct((s, n, row[1]), row[0]),
            bound,
            bound,
            jax.ShapeDtypeStruct((self.heads,), jnp.float32),
        )

    def prefetched(self) -> tuple[Any, ...]:
        """Scalars that steer the kernel's blocks: none."""
        return ()

    def executions(self) -> tuple[int, ...]:
        """Of the kernel's one tile: each grid step."""
        return (self.sequences * -(-self.rows // query_block(self.rows, self.window, self.heads)),)

    def copied_bytes(self) -> int:
        """Nothing: all operands are pipelined."""
        return 0

    def operations(self) -> int:
        """Multiplications and additions of the two products."""
        return 4 * self.sequences * self.rows * self.heads * self.window * self.width

    def minimum_bytes(self) -> int:
        """Queries, the rows somebody sees, bounds, and results."""
        s, q, h = self.sequences, self.rows, self.heads
        item = jnp.dtype(self.dtype).itemsize
        row = self.width * 33 // 32 if self.packed else self.width * item
        return s * ((self.window + q - 1) * row + 2 * q * h * (self.width * item + 4) + 8 * q)


SHAPES = {
    "v41_decode_64": Shape(64, 1, 128, 64, 512, True),
    "v41_decode_64_values": Shape(64, 1, 128, 64, 512, False),
    "v41_verify_64": Shape(64, 6, 128, 64, 512, True),
    "v41_prefill_4096": Shape(1, 4096, 128, 64, 512, True),
    "v41_prefill_4096_values": Shape(1, 4096, 128, 64, 512, False),
}
TINY = {
    "decode": Shape(3, 1, 8, 4, 32, False, jnp.float32),
    "verify": Shape(3, 6, 8, 4, 32, True, jnp.float32),
    "prefill": Shape(2, 300, 128, 8, 64, False, jnp.float32),
    "prefill_bf16": Shape(1, 140, 128, 8, 64, True),
}
