"""Engines per tier follow the last round's quota demand (`SEMANTICS.md` 5, phase 3)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy import prefill as policies
from deepinfer_jax.simulator import queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.containers import put
from deepinfer_jax.simulator.inplace import while_loop
from deepinfer_jax.simulator.state import State

Array = Any


def tier_round(c: Cluster, state: State) -> State:
    """New targets from the round's quota demand; engines follow as they drain."""
    engines = jnp.sum(queries.takes_prompts(c, state))
    shares = policies.tier_shares(state.demand, engines).astype(jnp.int64)
    return state.replace(
        target_engines=jnp.where(jnp.any(state.demand > 0), shares, state.target_engines),
        demand=state.queued,
        idle_rounds=state.idle_rounds + 1,
        next_round=state.next_round + c.scenario.tier_round_ticks,
        place_pending=jnp.asarray(True),
    )


def retier(c: Cluster, state: State) -> State:
    """Moves drained engines from tiers above their target to tiers below, lowest first."""
    takers = queries.takes_prompts(c, state)

    def counts(tier: Array) -> Array:
        return jnp.sum(takers[:, None] & (tier[:, None] == jnp.arange(c.shape.tiers)), axis=0)

    def movable(tier: Array) -> Array:
        surplus = (counts(tier) > state.target_engines)[tier]
        return takers & (state.quota_used == 0) & surplus

    def possible(tier: Array) -> Array:
        return jnp.any(movable(tier)) & jnp.any(counts(tier) < state.target_engines)

    def move(tier: Array) -> Array:
        short = jnp.argmax(counts(tier) < state.target_engines).astype(jnp.int32)
        return put(tier, short, jnp.argmax(movable(tier)))

    return state.replace(tier=while_loop(possible, move, state.tier, c.zero))
