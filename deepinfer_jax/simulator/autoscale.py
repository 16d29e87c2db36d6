"""The scaling loop: demand of a round, engines wanted, engines started and sent away (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy import scaling
from deepinfer_jax.simulator import life
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import get
from deepinfer_jax.simulator.inplace import while_loop
from deepinfer_jax.simulator.state import OFF, ORPHAN, SERVING, STARTING, State, append

Array = Any


def wait(state: State, request: Array, sign: int) -> State:
    """A matched prompt joins (1) or leaves (-1) a tier's FIFO; its new tokens are demand."""
    if state.waiting_tokens is None:
        return state
    tokens = (get(state.prompt, request) - get(state.context, request)).astype(jnp.int64)
    return state.replace(
        waiting_tokens=state.waiting_tokens + sign * tokens,
        scale_demand=state.scale_demand + max(sign, 0) * tokens,
    )


def scaling_round(c: Cluster, state: State) -> State:
    """Both pools move towards their demand, within their limits."""
    row = [state.now]
    for pool, (scaled, mode) in enumerate(
        ((c.shape.scale_prompt, Mode.PROMPT), (c.shape.scale_decode, Mode.COMPLETION))
    ):
        if scaled:
            state, numbers = _scale(c, state, pool, mode)
            row += numbers
        else:
            row += [-1, -1, -1]
    log, count = append(state.scale_log, state.scale_rounds, *row)
    return state.replace(
        scale_log=log,
        scale_rounds=count,
        scale_demand=state.waiting_tokens,
        next_scale=state.next_scale + c.scenario.dynamics.scale_round_ticks,
        idle_rounds=state.idle_rounds + 1,
    )


def _demand(c: Cluster, state: State, mode: Mode) -> Array:
    if mode == Mode.PROMPT:
        return state.scale_demand
    orphans = jnp.int64(0)
    if c.shape.completion:
        orphans = jnp.sum(state.stage == ORPHAN)
    ranks = jnp.repeat(c.scenario.modes == int(Mode.COMPLETION), c.shape.ranks)
    return (jnp.sum(jnp.where(ranks, state.assigned, 0)) + orphans).astype(jnp.int64)


def _scale(c: Cluster, state: State, pool: int, mode: Mode) -> tuple[State, list[Array]]:
    numbers = c.scenario.dynamics
    capacity, *limits = (numbers.pools[pool, k] for k in range(6))
    members = c.scenario.modes == int(mode)
    current = _held(state, members)
    demand = _demand(c, state, mode)
    used = demand / (capacity * jnp.maximum(current, 1))
    minimum, maximum, spare, up, down = limits
    wanted = scaling.target(
        current, demand, capacity, minimum, maximum, spare, up, down, used, numbers.hold_above
    )
    state = _grow(c, state, members, wanted - current)
    state = _shrink(c, state, members, STARTING, current - wanted)
    state = _shrink(c, state, members, SERVING, _held(state, members) - wanted)
    return state, [current, demand, wanted]


def _held(state: State, members: Array) -> Array:
    held = members & ((state.life == STARTING) | (state.life == SERVING))
    return jnp.sum(held).astype(jnp.int64)


def _grow(c: Cluster, state: State, members: Array, count: Array) -> State:
    """Starts the lowest engines that are off and can start, up to `count`."""
    per_engine = (c.shape.engines, c.shape.ranks)

    def able(state: State) -> Array:
        healthy = jnp.min(state.healthy_at.reshape(per_engine), axis=1) < NEVER
        return members & (state.life == OFF) & healthy

    def start(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, left = carry
        engine = jnp.argmax(able(state)).astype(jnp.int32)
        ticks = c.scenario.dynamics.start_ticks
        return life.begin_start(c, state, engine, ticks), left - 1

    return while_loop(lambda x: (x[1] > 0) & jnp.any(able(x[0])), start, (state, count), c.zero)[0]


def _shrink(c: Cluster, state: State, members: Array, kind: int, count: Array) -> State:
    """Sends away the highest engines of a life, up to `count`."""
    leave = life.go_off if kind == STARTING else life.begin_departure

    def go(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, left = carry
        among = members & (state.life == kind)
        engine = (c.shape.engines - 1 - jnp.argmax(among[::-1])).astype(jnp.int32)
        return leave(c, state, engine), left - 1

    return while_loop(
        lambda x: (x[1] > 0) & jnp.any(members & (x[0].life == kind)), go, (state, count), c.zero
    )[0]
