"""The life of an engine: it starts, serves, leaves, goes off; what its memory loses (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import handoff, queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.inplace import when
from deepinfer_jax.simulator.scenario import SERIES_BINS
from deepinfer_jax.simulator.state import LEAVING, OFF, SERVING, STARTING, State
from deepinfer_jax.simulator.steps import engine_row, set_engine_row

Array = Any


def enter(state: State, engine: Array, life: int) -> State:
    """`engine` lives on as `life`; the time of its former life is counted."""
    state = state.replace(**counted(state, engine, state.now))
    return state.replace(
        life=put(state.life, life, engine),
        life_since=put(state.life_since, state.now, engine),
    )


def counted(state: State, engine: Array, until: Array) -> dict[str, Array]:
    """`life_ticks` and `served` with the engine's current life up to `until`."""
    life, since = get(state.life, engine), get(state.life_since, engine)
    edges = jnp.arange(SERIES_BINS) * jnp.maximum(1, state.bin_ticks)
    ends = jnp.where(jnp.arange(SERIES_BINS) == SERIES_BINS - 1, until, edges + state.bin_ticks)
    shares = jnp.maximum(jnp.minimum(ends, until) - jnp.maximum(edges, since), 0)
    shares = jnp.where(life >= SERVING, shares, 0).astype(state.served.dtype)
    column = jnp.arange(state.life.shape[0]) == engine
    return {
        "life_ticks": add(state.life_ticks, until - since, engine, life),
        "served": state.served + jnp.where(column, shares[:, None], 0),
    }


def earliest_start(c: Cluster, state: State, engine: Array, ticks: Array) -> Array:
    """`ticks` from now, but not before the engine has a healthy rank; NEVER if it will have none."""
    healthy = jnp.min(engine_row(c, state.healthy_at, engine))
    return jnp.where(healthy >= NEVER, NEVER, jnp.maximum(state.now + ticks, healthy))


def begin_start(c: Cluster, state: State, engine: Array, ticks: Array) -> State:
    """`engine` is STARTING, for `ticks` at least; OFF if no rank of it will ever be healthy."""
    at = earliest_start(c, state, engine, ticks)
    state = enter(state, engine, STARTING)
    state = state.replace(start_at=put(state.start_at, at, engine))
    return when(at >= NEVER, lambda s: go_off(c, s, engine), state, c.zero)


def start(c: Cluster, state: State, engine: Array) -> State:
    """`engine` begins to serve with its healthy ranks."""
    healthy = engine_row(c, state.healthy_at, engine) <= state.now
    state = enter(state, engine, SERVING)
    state = state.replace(
        start_at=put(state.start_at, NEVER, engine),
        alive=set_engine_row(c, state.alive, healthy, engine),
        place_pending=jnp.asarray(True),
    )
    if c.shape.tiers > 1:
        state = _join_tier(c, state, engine)
    if not c.shape.completion:
        return state
    completes = get(c.scenario.modes, engine) == int(Mode.COMPLETION)
    return when(completes, lambda s: handoff.adopt_orphans(c, s), state, c.zero)


def _join_tier(c: Cluster, state: State, engine: Array) -> State:
    """The lowest tier with fewer engines than its target, if there is one."""
    others = queries.takes_prompts(c, state) & (jnp.arange(c.shape.engines) != engine)
    tiers = jnp.arange(c.shape.tiers)
    short = jnp.sum(others[:, None] & (state.tier[:, None] == tiers), axis=0) < state.target_engines
    tier = jnp.where(jnp.any(short), jnp.argmax(short), get(state.tier, engine))
    return state.replace(tier=put(state.tier, tier, engine))


def begin_departure(c: Cluster, state: State, engine: Array) -> State:
    """A SERVING engine takes nothing new; the grace of a COMPLETION engine begins."""
    completes = get(c.scenario.modes, engine) == int(Mode.COMPLETION)
    grace = state.now + c.scenario.dynamics.grace_ticks
    state = enter(state, engine, LEAVING)
    return state.replace(
        grace_at=put(state.grace_at, jnp.where(completes, grace, NEVER), engine),
        grace_over=put(state.grace_over, False, engine),
    )


def go_off(c: Cluster, state: State, engine: Array) -> State:
    """`engine` is given back, with what its memory held."""
    state = enter(state, engine, OFF)
    state = state.replace(
        start_at=put(state.start_at, NEVER, engine),
        grace_at=put(state.grace_at, NEVER, engine),
        grace_over=put(state.grace_over, False, engine),
        dirty=put(state.dirty, False, engine),
    )
    return lose_anchors(c, lose_blocks(c, state, engine), engine)


def lose_blocks(c: Cluster, state: State, engine: Array) -> State:
    """The engine's own prefix cache is empty."""
    if c.shape.cache_scope != "local":
        return state
    row = jnp.zeros(c.shape.nodes, jnp.int32)
    return state.replace(
        present=put(state.present, row, engine),
        newer=put(state.newer, row, engine),
        older=put(state.older, row, engine),
        blocks_lost=state.blocks_lost + get(state.used, engine),
        used=put(state.used, 0, engine),
    )


def lose_anchors(c: Cluster, state: State, host: Array) -> State:
    """The sliding-window states in the host memory of an engine's machine are gone."""
    if not c.shape.swa:
        return state
    gone = (state.anchor_host == host) & (state.anchor_expiry > state.now)
    return state.replace(anchor_expiry=jnp.where(gone, state.now, state.anchor_expiry))
