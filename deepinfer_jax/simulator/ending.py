"""The end of a request, whatever its status: it is counted, and what follows it is on its way."""

from __future__ import annotations

from typing import Any

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.containers import get, put
from deepinfer_jax.simulator.events import REMATCH, schedule
from deepinfer_jax.simulator.inplace import while_loop
from deepinfer_jax.simulator.state import State

Array = Any


def end(c: Cluster, state: State, request: Array, status: Array | int) -> State:
    """`request` ends now with `status`; its children arrive after their delays (`SEMANTICS.md` 12)."""
    state = state.replace(status=put(state.status, status, request), ended=state.ended + 1)
    after = c.workload.after
    if after is None:
        return state

    def follow(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, child = carry
        arrival = state.now + get(after.delay, child)
        state = state.replace(arrival=put(state.arrival, arrival, child))
        state = schedule(c, state, arrival + c.scenario.match_ticks, child, REMATCH)
        return state, get(after.next_sibling, child)

    first = get(after.first_child, request)
    return while_loop(lambda x: x[1] < c.shape.requests, follow, (state, first), c.zero)[0]
