"""Shapes by name: V4.1-Flash's experts, alone and as one of 16 ranks, and small ones for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import schedule, tpu
from pallas_kernels.grouped_matmul.api import gated, grouped_matmul
from pallas_kernels.grouped_matmul.weights import Weights, pack

LIMIT = 10.0


class Shape(NamedTuple):
    """M rows for E experts [N, D]; `gate` says that N is 2 I and the activation follows."""

    rows: int
    experts: int
    outputs: int
    inputs: int
    format: str
    gate: bool
    dtype: Any = jnp.bfloat16

    def function(self, kernels: str) -> Callable[..., Any]:
        """The op for this shape."""
        if not self.gate:
            return functools.partial(grouped_matmul, kernels=kernels)
        return functools.partial(gated, limit=LIMIT, kernels=kernels)

    def arguments(self) -> tuple[Any, ...]:
        """Abstract arguments."""
        shape = jax.ShapeDtypeStruct
        values = shape((self.experts, self.outputs, self.inputs), self.dtype)
        weights: Weights = jax.eval_shape(functools.partial(pack, name=self.format), values)
        given = (shape((self.rows, self.inputs), self.dtype), weights)
        sizes = shape((self.experts,), jnp.int32)
        scale = (shape((self.rows,), jnp.float32),) if self.gate else ()
        return (*given, sizes, *scale)

    def plan(self) -> schedule.Visits:
        """Visits when every expert has as many rows."""
        sizes = jnp.full(self.experts, self.rows // self.experts, jnp.int32)
        return schedule.visits(sizes, self.rows, tpu.row_block(self.rows, self.experts))

    def prefetched(self) -> tuple[Any, ...]:
        """Scalars that steer the kernel's blocks."""
        return tuple(self.plan())

    def executions(self) -> tuple[int, ...]:
        """Of decoding a chunk of weights, if they are coded, and of multiplying by one."""
        plan = self.plan()
        changes = 1 + int((jnp.diff(plan.expert) != 0).sum())
        chunks = self.width // tpu.chunk(self.width)
        products = int((plan.end > plan.begin).sum()) * chunks
        return (products,) if self.format == "values" else (changes * chunks, products)

    @property
    def width(self) -> int:
        """Outputs of a call."""
        return self.outputs // 2 if self.gate else self.outputs

    def copied_bytes(self) -> int:
        """Nothing: all operands are pipelined."""
        return 0

    def operations(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.rows * self.outputs * self.inputs

    def minimum_bytes(self) -> int:
        """Rows, every expert's weights once, and results."""
        row, weights = self.arguments()[:2]
        outputs = self.width * (row.dtype.itemsize if self.gate else 4)
        arrays = [row, *jax.tree.leaves(weights)]
        return sum(a.size * a.dtype.itemsize for a in arrays) + self.rows * outputs


def _pair(name: str, rows: int, experts: int, format: str) -> dict[str, Shape]:
    return {
        f"v41_{name}_gate_up": Shape(rows, experts, 2 * 2304, 5120, format, True),
        f"v41_{name}_down": Shape(rows, experts, 5120, 2304, format, False),
    }


SHAPES = {
    **_pair("decode_64_of_16_ranks_fp4", 384, 24, "fp4"),
    **_pair("decode_64_of_16_ranks_fp8", 384, 24, "fp8"),
    **_pair("prefill_4096_of_16_ranks_fp4", 24_576, 24, "fp4"),
    **_pair("prefill_4096_of_16_ranks_values", 24_576, 24, "values"),
}
TINY = {
    "values": Shape(48, 4, 64, 64, "values", True, jnp.float32),
    "fp8": Shape(48, 4, 64, 64, "fp8", True, jnp.float32),
    "fp4": Shape(48, 4, 64, 64, "fp4", True, jnp.float32),
    "fp4_bf16": Shape(40, 4, 256, 64, "fp4", False),
}
