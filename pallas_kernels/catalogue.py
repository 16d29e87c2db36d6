"""Every kernel's named shapes, under one protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pallas_kernels.grouped_matmul import shapes as grouped_matmul
from pallas_kernels.sparse_attention import shapes as sparse_attention
from pallas_kernels.window_attention import shapes as window_attention


class Named(Protocol):
    """A shape of an op: how to call it, and what a call must do at least."""

    def function(self, kernels: str) -> Callable[..., Any]:
        """The op, by an implementation of `choice.KERNELS`."""
        ...

    def arguments(self) -> tuple[Any, ...]:
        """Abstract arguments of `function`."""
        ...

    def prefetched(self) -> tuple[Any, ...]:
        """A usual call's scalars that steer the kernel's blocks (`traffic.traffic`)."""
        ...

    def executions(self) -> tuple[int, ...]:
        """How often a usual call runs each of the kernel's tiles, in the kernel's order."""
        ...

    def copied_bytes(self) -> int:
        """What the kernel itself copies from HBM in a usual call, its pipeline apart."""
        ...

    def operations(self) -> int:
        """Floating-point operations of a usual call."""
        ...

    def minimum_bytes(self) -> int:
        """What a usual call must read and write, each byte once."""
        ...


SHAPES: dict[str, dict[str, Named]] = {
    "window_attention": dict(window_attention.SHAPES),
    "grouped_matmul": dict(grouped_matmul.SHAPES),
    "sparse_attention": dict(sparse_attention.SHAPES),
}


def named(op: str, name: str) -> Named:
    """The shape `name` of `op`.

    Raises:
      ValueError: no such op or shape.
    """
    if op not in SHAPES or name not in SHAPES[op]:
        known = ", ".join(f"{o}/{n}" for o, shapes in SHAPES.items() for n in shapes)
        raise ValueError(f"there is no kernel shape {op}/{name}; choose one of {known}")
    return SHAPES[op][name]
