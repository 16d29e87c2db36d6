"""Time arithmetic for the two time types: exact int64 ticks and differentiable float64 ticks.

A tick is a nanosecond, work is in femtoseconds, a sub is 1/256 femtosecond (`SEMANTICS.md` section 1).
The functions look at the dtype: integers divide with floor and keep the remainder, floats divide.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_TICK

SUBS_PER_FEMTOSECOND = 256
SUBS_PER_TICK = SUBS_PER_FEMTOSECOND * FEMTOSECONDS_PER_TICK
NEVER = 2**62
"""A time after every event, in ticks."""

Array = Any


def is_exact(time: Array) -> bool:
    """Whether a time array is of the integer type."""
    return bool(jnp.issubdtype(jnp.asarray(time).dtype, jnp.integer))


def ceil_ticks(femtoseconds: Array) -> Array:
    """Ticks of a transfer or a predicted cost: rounded up in integers, exact in floats."""
    if is_exact(femtoseconds):
        return -((-femtoseconds) // FEMTOSECONDS_PER_TICK)
    return femtoseconds / FEMTOSECONDS_PER_TICK


def advance_subs(tick: Array, remainder: Array, subs: Array) -> tuple[Array, Array]:
    """Clock (tick, remainder) after `subs`; the remainder keeps what a tick cannot hold."""
    if not is_exact(tick):
        return tick + subs / SUBS_PER_TICK, remainder
    total = remainder + subs
    return tick + total // SUBS_PER_TICK, total % SUBS_PER_TICK


def advance_femtoseconds(tick: Array, remainder: Array, femtoseconds: Array) -> tuple[Array, Array]:
    """Clock after a whole number of femtoseconds, without overflow for steps of hours."""
    if not is_exact(tick):
        return tick + femtoseconds / FEMTOSECONDS_PER_TICK, remainder
    whole, rest = femtoseconds // FEMTOSECONDS_PER_TICK, femtoseconds % FEMTOSECONDS_PER_TICK
    return advance_subs(tick + whole, remainder, rest * SUBS_PER_FEMTOSECOND)


def run_subs(steps: Array, first: Array, slope: Array) -> Array:
    """Subs of `steps` decode steps of which step i (from 0) lasts `first + i * slope`."""
    return steps * first + slope * (steps * (steps - 1) // 2)


def steps_to_reach(target: Array, first: Array, slope: Array) -> Array:
    """Smallest number of steps whose `run_subs` is at least `target` (0 if target <= 0).

    The quadratic is solved in float64 and corrected by exact evaluation; the estimate is off by at
    most one step because step counts stay far below 2**50.
    """
    target_f, first_f, slope_f = (jnp.asarray(x, jnp.float64) for x in (target, first, slope))
    middle = first_f - slope_f / 2
    root = jnp.sqrt(middle * middle + 2 * slope_f * jnp.maximum(target_f, 1.0))
    steps = jnp.ceil(2 * target_f / jnp.maximum(middle + root, 1e-300)).astype(jnp.int64)
    steps = jnp.maximum(steps, 1)
    for _ in range(2):
        steps = steps - (run_subs(steps - 1, first, slope) >= target)
    for _ in range(2):
        steps = steps + (run_subs(steps, first, slope) < target)
    return jnp.where(target <= 0, 0, steps)


def steps_within(budget: Array, first: Array, slope: Array) -> Array:
    """Largest number of steps whose `run_subs` is at most `budget`."""
    steps = steps_to_reach(budget, first, slope)
    return steps - (run_subs(steps, first, slope) > budget)
