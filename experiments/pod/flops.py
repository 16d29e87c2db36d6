"""Matrix products of a traced program, each as often as its loops turn.

A compiler's own count has each loop's body once. Here a scan counts its length, a branch its most
expensive side, and a loop that ends by data what its caller expects of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

Turns = Callable[[int], float]
"""How often a loop is expected to turn that lies in so many others that end by data."""


def matmul_flops(jaxpr: core.ClosedJaxpr, turns: Turns, depth: int = 0) -> float:
    """Two per multiply-add of every matrix product, of one device's part under `shard_map`."""
    total = 0.0
    for equation in jaxpr.jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product(equation)
        elif name == "scan":
            total += params["length"] * matmul_flops(params["jaxpr"], turns, depth)
        elif name == "while":
            body = matmul_flops(params["body_jaxpr"], turns, depth + 1)
            total += turns(depth) * body if body else 0
        elif name == "cond":
            total += max(matmul_flops(branch, turns, depth) for branch in params["branches"])
        else:
            total += sum(matmul_flops(inner, turns, depth) for inner in _inner(params))
    return total


def _inner(params: dict[str, Any]) -> list[core.ClosedJaxpr]:
    """Programs that an equation calls."""
    found = [params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params]
    return [j if isinstance(j, core.ClosedJaxpr) else core.ClosedJaxpr(j, ()) for j in found]


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)
