"""The life of an engine: it starts, serves, leaves, goes off; what its memory loses (`SEMANTICS.md` 11).

Whatever changes a life notes it in `turn`; the loop then calls `turn` before anything else, so that the
program holds the change once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Mode
from deepinfer_jax.simulator.containers import get, put
from deepinfer_jax.simulator.inplace import when
from deepinfer_jax.simulator.scenario import SERIES_BINS
from deepinfer_jax.simulator.state import LEAVING, OFF, SERVING, STARTING, State
from deepinfer_jax.simulator.steps import engine_row, go_idle, set_engine_row

Array = Any


def change(state: State, engine: Array, life: Array | int) -> State:
    """`engine` will have another life before anything else happens."""
    return state.replace(turn=put(state.turn, life + 1, engine))


def turn(c: Cluster, state: State, engine: Array) -> State:
    """The noted life begins; a start that can never be is an end."""
    was, life = get(state.life, engine), get(state.turn, engine) - 1
    numbers = c.dynamics
    at = _earliest_start(
        c, state, engine, jnp.where(was == OFF, numbers.start_ticks, numbers.restart_ticks)
    )
    life = jnp.where((life == STARTING) & (at >= NEVER), OFF, life)
    state = state.replace(**counted(state, state.now, jnp.arange(c.shape.engines) == engine))
    graced = (life == LEAVING) & (get(c.scenario.modes, engine) == int(Mode.COMPLETION))
    state = state.replace(
        turn=put(state.turn, 0, engine),
        life=put(state.life, life, engine),
        start_at=put(state.start_at, jnp.where(life == STARTING, at, NEVER), engine),
        grace_at=put(
            state.grace_at, jnp.where(graced, state.now + numbers.grace_ticks, NEVER), engine
        ),
        grace_over=put(state.grace_over, False, engine),
    )
    ends = life == OFF
    crashed = (life == STARTING) & (was != OFF)
    if c.shape.cache_scope == "local":
        state = when(ends | crashed, lambda s: _lose_blocks(c, s, engine), state, c.zero)
    if c.shape.swa:
        state = when(ends, lambda s: lose_anchors(s, engine), state, c.zero)
    return when(ends, lambda s: go_idle(s, engine), state, c.zero)


def counted(state: State, until: Array, engines: Array) -> dict[str, Array]:
    """The fields that count lives, up to `until`, of `engines` (bool [M])."""
    since = jnp.where(engines, state.life_since, until)
    lives = state.life[:, None] == jnp.arange(4)
    serving = state.life >= SERVING
    bins = jnp.arange(SERIES_BINS)[:, None]
    begin = bins * jnp.maximum(1, state.bin_ticks)
    end = jnp.where(bins == SERIES_BINS - 1, until, begin + state.bin_ticks)
    inside = jnp.maximum(jnp.minimum(end, until) - jnp.maximum(begin, since), 0)
    return {
        "life_ticks": state.life_ticks + jnp.where(lives, (until - since)[:, None], 0),
        "served": state.served + jnp.where(serving, inside, 0).astype(state.served.dtype),
        "life_since": jnp.where(engines, until, state.life_since),
    }


def _earliest_start(c: Cluster, state: State, engine: Array, ticks: Array) -> Array:
    """`ticks` from now, but not before the engine has a healthy rank; NEVER if it will have none."""
    healthy = jnp.min(engine_row(c, state.healthy_at, engine))
    return jnp.where(healthy >= NEVER, NEVER, jnp.maximum(state.now + ticks, healthy))


def start(c: Cluster, state: State, engine: Array) -> State:
    """`engine` begins to serve with its healthy ranks."""
    healthy = engine_row(c, state.healthy_at, engine) <= state.now
    state = change(state, engine, SERVING).replace(
        start_at=put(state.start_at, NEVER, engine),
        alive=set_engine_row(c, state.alive, healthy, engine),
        place_pending=jnp.asarray(True),
    )
    if c.shape.completion:
        completes = get(c.scenario.modes, engine) == int(Mode.COMPLETION)
        state = state.replace(adopt_left=jnp.where(completes, state.orphans, 0))
    if c.shape.tiers == 1:
        return state
    others = queries.takes_prompts(c, state)
    member = others[:, None] & (state.tier[:, None] == jnp.arange(c.shape.tiers))
    short = jnp.sum(member, axis=0) < state.target_engines
    tier = jnp.where(jnp.any(short), jnp.argmax(short), get(state.tier, engine))
    return state.replace(tier=put(state.tier, tier, engine))


def _lose_blocks(c: Cluster, state: State, engine: Array) -> State:
    """The engine's own prefix cache is empty."""
    row = jnp.zeros(c.shape.nodes, jnp.int32)
    return state.replace(
        present=put(state.present, row, engine),
        newer=put(state.newer, row, engine),
        older=put(state.older, row, engine),
        blocks_lost=state.blocks_lost + get(state.used, engine),
        used=put(state.used, 0, engine),
    )


def lose_anchors(state: State, host: Array) -> State:
    """The sliding-window states in the host memory of an engine's machine are gone."""
    gone = (state.anchor_host == host) & (state.anchor_expiry > state.now)
    return state.replace(anchor_expiry=jnp.where(gone, state.now, state.anchor_expiry))
