"""How many engines a stage should have next, from its demand, limits and quota utilisation."""

from __future__ import annotations

from deepinfer_jax.policy.view import Array, namespace


def prefill_demand(input_tokens: Array, hit_tokens: Array) -> Array:
    """Prefill demand: the tokens no cache supplies, summed over requests. [Q], [Q] -> scalar."""
    return namespace(input_tokens, hit_tokens).sum(input_tokens - hit_tokens)


def decode_demand(running: Array) -> Array:
    """Decode demand: requests running, summed over engines. [M] -> scalar."""
    return namespace(running).sum(running)


def target(
    current: Array,
    demand: Array,
    capacity_per_engine: Array,
    minimum: Array,
    maximum: Array,
    spare: Array,
    max_step_up: Array,
    max_step_down: Array,
    utilisation: Array,
    hold_above: float = 0.8,
) -> Array:
    """Engines to have next round; any shape, elementwise.

    ceil(demand / capacity) + spare, at most `max_step_up` above and `max_step_down` below the
    current number, not below it while utilisation > `hold_above`, and last within the bounds,
    which win over the rate limits. Source: the chapter, section 11.5.

    Args:
      current: engines now.
      demand: `prefill_demand` or `decode_demand`, integer, in the unit of the capacity.
      capacity_per_engine: demand one engine carries at the wanted load, a positive integer.
      minimum: fewest engines.
      maximum: most engines.
      spare: engines on top, the redundancy that covers a crash until it has restarted.
      max_step_up: engines added per round at most.
      max_step_down: engines removed per round at most.
      utilisation: share of the quota in use, 0 to 1.
      hold_above: utilisation above which nothing is removed.
    """
    xp = namespace(current, demand, capacity_per_engine, utilisation)
    wanted = -(-demand // capacity_per_engine) + spare
    step = xp.clip(wanted - current, -max_step_down, max_step_up)
    step = xp.where(utilisation > hold_above, xp.maximum(step, 0), step)
    return xp.clip(current + step, minimum, maximum)


def time_average(counts: Array, durations: Array) -> Array:
    """Mean number of engines over a schedule: `counts` [n] held for `durations` [n] each."""
    xp = namespace(counts, durations)
    return xp.sum(counts * durations) / xp.sum(durations)
