"""A planned departure ends: the engine goes off, or forwards what it still has (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import handoff, life, queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER, ceil_ticks
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.events import HANDOFF, call_off, schedule
from deepinfer_jax.simulator.incidents import empty_engine, keep_sent
from deepinfer_jax.simulator.inplace import either, fori_loop, when, while_loop
from deepinfer_jax.simulator.state import (
    GROUPED,
    IDLE,
    LANDED,
    LEAVING,
    MOVING,
    WAITING,
    State,
    move,
)
from deepinfer_jax.simulator.steps import interrupt

Array = Any


def end_grace(state: State, engine: Array) -> State:
    """The engine may forward at its first boundary from now on."""
    state = state.replace(
        grace_at=put(state.grace_at, NEVER, engine),
        grace_over=put(state.grace_over, True, engine),
    )
    return interrupt(state, engine)


def ready(c: Cluster, state: State) -> Array:
    """bool [M]: LEAVING engines between two steps that go off or forward now."""
    assigned = jnp.sum(state.assigned.reshape(c.shape.engines, c.shape.ranks), axis=1)
    empty = (state.prompts == 0) & (state.held == 0) & (assigned == 0)
    leaving = (state.life == LEAVING) & (state.step_kind == IDLE)
    return leaving & (empty | (state.grace_over & (assigned > 0)))


def depart(c: Cluster, state: State, engine: Array) -> State:
    """An engine that is `ready` forwards its requests, or goes off without any."""
    if not c.shape.completion:
        return life.go_off(c, state, engine)
    assigned = jnp.sum(get(state.assigned.reshape(c.shape.engines, c.shape.ranks), engine))
    return either(
        assigned > 0,
        lambda s: _forward(c, s, engine),
        lambda s: life.go_off(c, s, engine),
        state,
        c.zero,
    )


def _forward(c: Cluster, state: State, engine: Array) -> State:
    """Landed and running requests leave in one transfer per destination; those bound here turn."""
    here = state.target // c.shape.ranks == engine
    landed = (state.stage == LANDED) & here
    bound = ((state.stage == WAITING) | (state.stage == MOVING)) & here
    state = call_off(c, state, bound)
    state = _each(c, state, landed, lambda s, request: _take_along(c, s, engine, request))
    state = empty_engine(c, state, engine)

    def choose(state: State, request: Array) -> State:
        def send(state: State, rank: Array) -> State:
            return either(
                get(landed, request),
                lambda s: _join_group(c, s, rank, request),
                lambda s: handoff.reserve_and_send(c, s, rank, request),
                state,
                c.zero,
            )

        return handoff.choose_again(c, state, request, send)

    state = _each(c, state, landed | bound, choose)
    return fori_loop(c.shape.engines, lambda d, s: _send_group(c, s, engine, d), state, c.zero)


def _each(c: Cluster, state: State, chosen: Array, visit: Any) -> State:
    """`visit(state, request)` for every request of bool [Q + 1], ascending."""

    def turn(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, left = carry
        request = jnp.argmax(left).astype(jnp.int32)
        return visit(state, request), put(left, False, request)

    return while_loop(lambda x: jnp.any(x[1]), turn, (state, chosen), c.zero)[0]


def _take_along(c: Cluster, state: State, engine: Array, request: Array) -> State:
    """What the request has decoded here is part of its context from now on; its KV is here."""
    before = get(state.emitted, request)
    state = keep_sent(c, state, request)
    sent = get(state.emitted, request) - before
    return state.replace(
        prompt=add(state.prompt, sent, request),
        source=put(state.source, engine, request),
        held=add(state.held, 1, engine),
        forwards=state.forwards + 1,
    )


def _join_group(c: Cluster, state: State, rank: Array, request: Array) -> State:
    """The request reserves its blocks at `rank` and travels with others to the same engine."""
    prompt = get(state.prompt, request).astype(jnp.int64)
    state = state.replace(reserved=add(state.reserved, queries.blocks_for(c, prompt), rank))
    if c.shape.kv_limited:
        state = interrupt(state, rank // c.shape.ranks)
    return move(state, request, GROUPED)


def _send_group(c: Cluster, state: State, engine: Array, destination: Array) -> State:
    """One transfer from `engine` to `destination`."""
    group = (state.stage == GROUPED) & (state.target // c.shape.ranks == destination)
    each = handoff.moved_bytes(c, state.prompt.astype(jnp.int64))
    total = jnp.sum(jnp.where(group, each, 0))
    free = state.now + ceil_ticks(total * c.scenario.handoff_rate)
    if c.shape.handoff_fifo:
        begins = jnp.maximum(state.now, get(state.handoff_free, engine))
        free = begins + ceil_ticks(total * c.scenario.handoff_rate)
        kept = get(state.handoff_free, engine)
        free_at = jnp.where(jnp.any(group), free, kept)
        state = state.replace(handoff_free=put(state.handoff_free, free_at, engine))
    state = state.replace(handoff_bytes=state.handoff_bytes + total)

    def send(state: State, request: Array) -> State:
        state = move(state, request, MOVING)
        return schedule(c, state, free + c.scenario.handoff_ticks, request, HANDOFF)

    return when(jnp.any(group), lambda s: _each(c, s, group, send), state, c.zero)
