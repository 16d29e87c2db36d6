"""A planned departure ends: the engine goes off, or forwards what it still has (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import handoff, life
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.events import call_off
from deepinfer_jax.simulator.incidents import empty_engine, keep_sent
from deepinfer_jax.simulator.inplace import either, when, while_loop
from deepinfer_jax.simulator.state import (
    GOING,
    IDLE,
    LANDED,
    LEAVING,
    MOVING,
    OFF,
    ORPHAN,
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
        return life.change(state, engine, OFF)
    assigned = jnp.sum(get(state.assigned.reshape(c.shape.engines, c.shape.ranks), engine))
    return either(
        assigned > 0,
        lambda s: _forward(c, s, engine),
        lambda s: life.change(s, engine, OFF),
        state,
        c.zero,
    )


def _forward(c: Cluster, state: State, engine: Array) -> State:
    """Landed and running requests, and those bound for `engine`, choose again."""
    here = state.target // c.shape.ranks == engine
    landed = (state.stage == LANDED) & here
    bound = ((state.stage == WAITING) | (state.stage == MOVING)) & here
    state = call_off(c, state, bound)

    def turn(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, left = carry
        request = jnp.argmax(left).astype(jnp.int32)
        mine = get(landed, request)
        state = when(mine, lambda s: _take_along(c, s, engine, request), state, c.zero)
        state = handoff.push_orphan(state, request)
        state = move(state, request, jnp.where(mine, GOING, ORPHAN))
        return state, put(left, False, request)

    everybody = landed | bound
    state = while_loop(lambda x: jnp.any(x[1]), turn, (state, everybody), c.zero)[0]
    state = empty_engine(c, state, engine)
    return state.replace(adopt_left=state.orphans)


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
