"""Requests that choose a decode rank again: orphans, redirected ones, a departing engine's (`SEMANTICS.md` 11).

They stand in one lane. An event that lets them choose sets `adopt_left`; the loop then calls `adopt`
before anything else, once for each of them. While anybody waits in the lane after that, no rank is
eligible, so that going round the whole lane changes nobody's turn.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import handoff, queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import ceil_ticks
from deepinfer_jax.simulator.containers import add, get, pop_front, put
from deepinfer_jax.simulator.events import HANDOFF, schedule
from deepinfer_jax.simulator.inplace import either, fori_loop, when, while_loop
from deepinfer_jax.simulator.state import GOING, GROUPED, MOVING, State, move
from deepinfer_jax.simulator.steps import interrupt

Array = Any


def adopt(c: Cluster, state: State) -> State:
    """The first of the lane chooses; after the last one, those who leave together are sent."""
    request = get(state.orphan_head, 0)
    head = pop_front(state.following, state.orphan_head, jnp.int32(0))
    state = state.replace(
        orphan_head=head, orphans=state.orphans - 1, adopt_left=state.adopt_left - 1
    )
    if not c.shape.departures:
        return handoff.choose(c, state, request, handoff.reserve_and_send)
    going = get(state.stage, request) == GOING

    def send(c: Cluster, state: State, rank: Array, request: Array) -> State:
        return either(
            going,
            lambda s: _join_group(c, s, rank, request),
            lambda s: handoff.reserve_and_send(c, s, rank, request),
            state,
            c.zero,
        )

    state = handoff.choose(c, state, request, send)
    together = (state.adopt_left == 0) & jnp.any(state.stage == GROUPED)
    return when(together, lambda s: _send_groups(c, s), state, c.zero)


def _join_group(c: Cluster, state: State, rank: Array, request: Array) -> State:
    """The request reserves its blocks at `rank` and travels with others to the same engine."""
    prompt = get(state.prompt, request).astype(jnp.int64)
    state = state.replace(reserved=add(state.reserved, queries.blocks_for(c, prompt), rank))
    if c.shape.kv_limited:
        state = interrupt(state, rank // c.shape.ranks)
    return move(state, request, GROUPED)


def _send_groups(c: Cluster, state: State) -> State:
    """One transfer from the departing engine to each destination, in their order."""
    source = get(state.source, jnp.argmax(state.stage == GROUPED))
    each = handoff.moved_bytes(c, state.prompt.astype(jnp.int64))

    def send(destination: Array, state: State) -> State:
        group = (state.stage == GROUPED) & (state.target // c.shape.ranks == destination)
        total = jnp.sum(jnp.where(group, each, 0))
        busy = ceil_ticks(total * c.scenario.handoff_rate)
        free = state.now + busy
        if c.shape.handoff_fifo:
            kept = get(state.handoff_free, source)
            free = jnp.maximum(state.now, kept) + busy
            free_at = jnp.where(jnp.any(group), free, kept)
            state = state.replace(handoff_free=put(state.handoff_free, free_at, source))
        state = state.replace(handoff_bytes=state.handoff_bytes + total)

        def leave(carry: tuple[State, Array]) -> tuple[State, Array]:
            state, left = carry
            request = jnp.argmax(left).astype(jnp.int32)
            state = move(state, request, MOVING)
            end = free + c.scenario.handoff_ticks
            return schedule(c, state, end, request, HANDOFF), put(left, False, request)

        return while_loop(lambda x: jnp.any(x[1]), leave, (state, group), c.zero)[0]

    return fori_loop(c.shape.engines, send, state, c.zero)
