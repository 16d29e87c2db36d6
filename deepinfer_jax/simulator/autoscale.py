"""The scaling loop: demand of a round, engines wanted, engines started and sent away (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy import scaling
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import get
from deepinfer_jax.simulator.state import LEAVING, OFF, SERVING, STARTING, State, append

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
    row, turns = [state.now], state.turn
    for pool, (scaled, mode) in enumerate(
        ((c.shape.scale_prompt, Mode.PROMPT), (c.shape.scale_decode, Mode.COMPLETION))
    ):
        if not scaled:
            row += [-1, -1, -1]
            continue
        members = c.scenario.modes == int(mode)
        current = jnp.sum(members & _held(state)).astype(jnp.int64)
        demand = _demand(c, state, mode)
        wanted = _wanted(c, pool, current, demand)
        turns = _turns(c, state, members, wanted - current, turns)
        row += [current, demand, wanted]
    log, count = append(state.scale_log, state.scale_rounds, *row)
    return state.replace(
        turn=turns,
        scale_log=log,
        scale_rounds=count,
        scale_demand=state.waiting_tokens,
        next_scale=state.next_scale + c.dynamics.scale_round_ticks,
        idle_rounds=state.idle_rounds + 1,
    )


def _held(state: State) -> Array:
    return (state.life == STARTING) | (state.life == SERVING)


def _demand(c: Cluster, state: State, mode: Mode) -> Array:
    """New prompt tokens of the round, or requests that decode or are about to."""
    if mode == Mode.PROMPT:
        return state.scale_demand
    ranks = jnp.repeat(c.scenario.modes == int(Mode.COMPLETION), c.shape.ranks)
    return (jnp.sum(jnp.where(ranks, state.assigned, 0)) + state.orphans).astype(jnp.int64)


def _wanted(c: Cluster, pool: int, current: Array, demand: Array) -> Array:
    capacity, *limits = (c.dynamics.pools[pool, k] for k in range(6))
    used = demand / (capacity * jnp.maximum(current, 1))
    minimum, maximum, spare, up, down = limits
    return scaling.target(
        current, demand, capacity, minimum, maximum, spare, up, down, used, c.dynamics.hold_above
    )


def _turns(c: Cluster, state: State, members: Array, more: Array, turns: Array) -> Array:
    """`turns` [M] with the lives that `more` engines (fewer, if negative) of `members` begin."""
    healthy = jnp.min(state.healthy_at.reshape(c.shape.engines, c.shape.ranks), axis=1) < NEVER
    off = members & (state.life == OFF) & healthy
    starting, serving = members & (state.life == STARTING), members & (state.life == SERVING)
    begin = off & (jnp.cumsum(off) <= more)
    cancelled = starting & (_from_the_end(starting) <= -more)
    left = -more - jnp.sum(cancelled)
    leave = serving & (_from_the_end(serving) <= left)
    turns = jnp.where(begin, STARTING + 1, turns)
    turns = jnp.where(cancelled, OFF + 1, turns)
    return jnp.where(leave, LEAVING + 1, turns).astype(turns.dtype)


def _from_the_end(mask: Array) -> Array:
    """How many of `mask` stand at or after each place."""
    return jnp.cumsum(mask[::-1])[::-1]
