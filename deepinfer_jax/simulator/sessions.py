"""Closed loops: requests that arrive some time after an earlier one of their session has ended.

Letter: `Q` requests; Q itself is "nobody".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.traces import Int64, Trace

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Who follows whom, and when (`SEMANTICS.md` 12)."""

    parent: Array  # [Q] int32, -1 for a request that arrives by the clock
    delay: Array  # [Q] int64 ticks from the parent's end to the arrival
    first_child: Array  # [Q] int32
    next_sibling: Array  # [Q] int32
    next_open: Array  # [Q + 1] int32, first request at or after an index that arrives by the clock


def dependencies(parent: npt.ArrayLike, delay: npt.ArrayLike) -> Dependencies:
    """The tables of `parent` [Q] (-1: none) and `delay` [Q] ticks (ignored without a parent).

    Raises:
      ValueError: a parent that does not come before its child, or a negative delay.
    """
    parents, delays = np.asarray(parent, np.int64), np.asarray(delay, np.int64)
    requests = len(parents)
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(requests)))
    if len(wrong):
        raise ValueError(
            f"request {wrong[0]} follows request {parents[wrong[0]]}, but a parent must be an "
            "earlier request; sort the requests, or give -1 for none"
        )
    follows = parents >= 0
    if np.any(delays[follows] < 0):
        first = np.flatnonzero(follows & (delays < 0))[0]
        raise ValueError(
            f"request {first} arrives {delays[first]} ticks after its parent's end, but a delay "
            "must not be negative; give 0 or more"
        )
    first_child, sibling = np.full(requests, requests), np.full(requests, requests)
    for child in np.flatnonzero(follows)[::-1]:
        sibling[child], first_child[parents[child]] = first_child[parents[child]], child
    places = np.append(np.where(follows, requests, np.arange(requests)), requests)
    next_open = np.minimum.accumulate(places[::-1])[::-1]
    return Dependencies(
        parent=parents.astype(np.int32),
        delay=np.where(follows, delays, 0),
        first_child=first_child.astype(np.int32),
        next_sibling=sibling.astype(np.int32),
        next_open=next_open.astype(np.int32),
    )


def of_trace(trace: Trace) -> Dependencies:
    """Each request follows the last answer that its client waited for before it.

    That is the latest earlier request of its session; of a trace that records how long answers took
    (`answer_seconds`), the latest one with such a time: others ran beside their successor. The delay
    is the trace's think time (0 where it is unknown).

    Args:
      trace: requests in arrival order.

    Raises:
      ValueError: the trace has no sessions, or no think times.
    """
    if trace.session is None or trace.think_seconds is None:
        missing = "sessions" if trace.session is None else "think times"
        raise ValueError(
            f"{trace.source}: a closed loop needs sessions and think times, but the trace has no "
            f"{missing}; use a 'sessions' file or kind='agents', or leave closed_loop out"
        )
    waited = np.ones(len(trace), bool)
    if trace.answer_seconds is not None:
        waited = ~np.isnan(trace.answer_seconds)
    seconds = np.nan_to_num(trace.think_seconds).clip(0)
    return dependencies(_last_waited(trace.session, waited), np.rint(seconds * TICKS_PER_SECOND))


def _last_waited(session: Int64, waited: npt.NDArray[np.bool_]) -> Int64:
    last: dict[int, int] = {}
    parent = np.full(len(session), -1, np.int64)
    for request, (one, answered) in enumerate(zip(session.tolist(), waited.tolist(), strict=True)):
        parent[request] = last.get(one, -1)
        if answered or one not in last:
            last[one] = request
    return parent
