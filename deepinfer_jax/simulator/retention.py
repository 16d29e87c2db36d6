"""Garbage collection of the caches: uses that renew a segment's TTL, and the periodic sweep (`SEMANTICS.md` 13).

What is deleted is decided by `policy.retention`; here its entries are the segments of a cache, the
deepest first, so that a prefix outlives what hangs from it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.policy import retention as policy
from deepinfer_jax.simulator import cache
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.inplace import fori_loop, when, while_loop
from deepinfer_jax.simulator.state import State

Array = Any


def touch(c: Cluster, state: State, store: Array, leaf: Array, request: Array) -> State:
    """`cache.touch` of a present path, as a use by `request`."""
    return cache.touch(c, _use(c, state, store, leaf, request), store, leaf)


def publish(c: Cluster, state: State, store: Array, leaf: Array, request: Array) -> State:
    """`cache.publish` of a path, as a use by `request`."""
    return cache.publish(c, _use(c, state, store, leaf, request), store, leaf)


def _use(c: Cluster, state: State, store: Array, leaf: Array, request: Array) -> State:
    """Renews the path of `leaf`; a segment that holds nothing forgets its earlier life."""
    if not c.shape.retention:
        return state
    numbers = c.scenario.retention
    assert numbers is not None
    kind = jnp.int32(0)
    if c.workload.traffic is not None:
        kind = get(c.workload.traffic, request)
    ttl = get(numbers.ttl_ticks, kind)
    expiry = jnp.where(ttl >= NEVER, NEVER, state.now + ttl).astype(state.now.dtype)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        present, last_use, expiries, traffic, node = carry
        held = get(present, store, node) > 0
        former = jnp.where(held, get(expiries, store, node), 0)
        lowest = jnp.where(held, jnp.minimum(get(traffic, store, node), kind), kind)
        last_use = put(last_use, state.now, store, node)
        expiries = put(expiries, jnp.maximum(former, expiry), store, node)
        traffic = put(traffic, lowest, store, node)
        return present, last_use, expiries, traffic, get(c.workload.node_parent, node)

    start = (state.present, state.last_use, state.expiry, state.traffic, leaf)
    present, last_use, expiries, traffic, _ = while_loop(
        lambda carry: carry[4] != 0, step, start, c.zero
    )
    return state.replace(present=present, last_use=last_use, expiry=expiries, traffic=traffic)


def sweep(c: Cluster, state: State) -> State:
    """Every cache gives up what has expired, and what its watermark asks for."""
    assert c.scenario.retention is not None
    state = fori_loop(c.shape.caches, lambda k, s: _sweep_cache(c, s, k), state, c.zero)
    return state.replace(
        next_sweep=state.next_sweep + c.scenario.retention.sweep_ticks,
        sweeps=state.sweeps + 1,
        held_at_sweeps=state.held_at_sweeps + jnp.sum(state.used),
    )


def _sweep_cache(c: Cluster, state: State, store: Array) -> State:
    present = get(state.present, store)
    deletable = (present > 0) & (state.pins == 0)
    aged = deletable & (get(state.expiry, store) <= state.now)
    gone = _victims(c, state, store, deletable) if c.shape.watermark else aged
    expired = jnp.sum(jnp.where(aged, present, 0), dtype=jnp.int64)
    freed = jnp.sum(jnp.where(gone, present, 0), dtype=jnp.int64)
    state = state.replace(
        present=put(state.present, jnp.where(gone, 0, present), store),
        used=add(state.used, -freed, store),
        expired=state.expired + expired,
        reclaimed=state.reclaimed + freed - expired,
    )
    if not c.shape.bounded_cache:
        return state
    return when(freed > 0, lambda s: _unlink_absent(c, s, store), state, c.zero)


def _victims(c: Cluster, state: State, store: Array, deletable: Array) -> Array:
    """[N] bool: what `policy.retention.victims` chooses among the segments, the deepest first."""
    numbers = c.scenario.retention
    assert numbers is not None
    last_use = get(state.last_use, store)
    amount = policy.reclaim_amount(get(state.used, store), numbers.high_blocks, numbers.low_blocks)
    chosen: Array = policy.victims(
        last_use[::-1],
        get(state.present, store)[::-1],
        deletable[::-1],
        state.now,
        (get(state.expiry, store) - last_use)[::-1],
        amount,
        c.shape.retention,
        get(state.traffic, store)[::-1],
    )
    return chosen[::-1]


def _unlink_absent(c: Cluster, state: State, store: Array) -> State:
    """Takes the segments without blocks out of the LRU ring."""

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        present, newer, older, node = carry
        following = get(newer, store, node)
        newer, older = when(
            get(present, store, node) == 0,
            lambda ring: cache.unlink(ring[0], ring[1], store, node),
            (newer, older),
            c.zero,
        )
        return present, newer, older, following

    start = (state.present, state.newer, state.older, get(state.newer, store, 0))
    present, newer, older, _ = while_loop(lambda carry: carry[3] != 0, step, start, c.zero)
    return state.replace(present=present, newer=newer, older=older)
