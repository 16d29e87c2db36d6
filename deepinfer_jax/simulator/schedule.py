"""Incidents of a service as a list in ticks: those given, and failures drawn from rates."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.cluster import Incident
from deepinfer_jax.simulator.plain_config import choose
from deepinfer_jax.simulator.service import Failures

KINDS = {kind.name.lower(): kind for kind in Incident}


def incidents(failures: Failures, counts: dict[Incident, int], seed: int) -> tuple[Any, ...]:
    """((tick, kind, index), ...) in the order of time.

    Args:
      failures: events by hand, and rates per part and hour.
      counts: parts of each kind that has a rate: GPUs, hosts, storage nodes.
      seed: with kind, index and number of a failure it fixes when it happens, whatever else is set.

    Raises:
      ValueError: an event of another form, or rates without an end.
    """
    made = [_given(event) for event in failures.events]
    rates = {
        Incident.GPU: failures.gpu_per_hour,
        Incident.HOST: failures.host_per_hour,
        Incident.STORAGE: failures.storage_per_hour,
    }
    if min(rates.values()) < 0:
        raise ValueError(f"failures: rates per hour {tuple(rates.values())} must not be negative")
    if any(rates.values()) and not 0 < failures.until_seconds < np.inf:
        raise ValueError(
            f"failures.until_seconds={failures.until_seconds}, but rates need an end: give the "
            "seconds of simulated time in which parts fail"
        )
    for kind, rate in rates.items():
        if rate:
            for index in range(counts[kind]):
                made += _drawn(kind, index, 3600 / rate, failures.until_seconds, seed)
    return tuple(sorted(made))


def _given(event: tuple[Any, ...]) -> tuple[int, int, int]:
    if len(event) != 3 or not isinstance(event[1], str):
        raise ValueError(f"failures.events holds {event!r}: give (seconds, kind, index)")
    seconds, kind, index = event
    chosen = KINDS[choose("failures.events", kind, tuple(KINDS))]
    return round(seconds * TICKS_PER_SECOND), int(chosen), int(index)


def _drawn(
    kind: Incident, index: int, mean: float, until: float, seed: int
) -> list[tuple[int, int, int]]:
    """Exponential gaps of `mean` seconds from a counter-based stream of one part."""
    key = np.array([seed % 2**64, (int(kind) << 40) + index], np.uint64)
    gaps = np.random.Generator(np.random.Philox(key=key))
    made, time = [], gaps.exponential(mean)
    while time < until:
        made.append((round(time * TICKS_PER_SECOND), int(kind), index))
        time += gaps.exponential(mean)
    return made
