"""Prefix cache on the segment trie: presence, pins, an LRU ring per cache, SWA anchors (`SEMANTICS.md` 4).

The LRU ring is a doubly linked list of the segments that hold blocks; segment 0, the empty prefix, is
its seam: `newer[0]` is the least recent segment and `older[0]` the most recent one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import add, get, put
from deepinfer_jax.simulator.inplace import when, while_loop
from deepinfer_jax.simulator.scenario import Dynamics, Scenario, Shape
from deepinfer_jax.simulator.state import State
from deepinfer_jax.simulator.workload import Workload

Array = Any


class Cluster(NamedTuple):
    """What every stage needs besides the state."""

    shape: Shape
    scenario: Scenario
    workload: Workload

    @property
    def zero(self) -> Array:
        """0, but not to the compiler (see `containers.while_loop`)."""
        return jnp.minimum(self.scenario.block_tokens, 0)

    @property
    def dynamics(self) -> Dynamics:
        """The numbers of section 11, of a cluster that has them."""
        assert self.scenario.dynamics is not None
        return self.scenario.dynamics


def cache_of(shape: Shape, engine: Array) -> Array:
    """Index of the cache an engine reads and writes."""
    return engine if shape.cache_scope == "local" else jnp.zeros_like(engine)


def deepest_match(c: Cluster, state: State, cache: Array, node: Array) -> tuple[State, Array]:
    """Deepest segment at or above `node` that holds blocks. Its ancestors are then full."""

    def absent(carry: tuple[Array, Array]) -> Array:
        present, node = carry
        return (node != 0) & (get(present, cache, node) == 0)

    def up(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        present, node = carry
        return present, get(c.workload.node_parent, node)

    present, node = while_loop(absent, up, (state.present, node), c.zero)
    return state.replace(present=present), node


def deepest_matches(c: Cluster, state: State, node: Array) -> tuple[State, Array]:
    """`deepest_match` of one prefix in every cache at once. [C]"""
    caches = jnp.arange(c.shape.caches)

    def absent(present: Array, nodes: Array) -> Array:
        return (nodes != 0) & (present[caches, nodes] == 0)

    def up(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        present, nodes = carry
        return present, jnp.where(absent(present, nodes), c.workload.node_parent[nodes], nodes)

    start = (state.present, jnp.full(c.shape.caches, node))
    present, nodes = while_loop(lambda carry: jnp.any(absent(*carry)), up, start, c.zero)
    return state.replace(present=present), nodes


def matched_blocks(c: Cluster, state: State, cache: Array, node: Array) -> Array:
    """Leading blocks present when `node` is the deepest match."""
    return get(c.workload.node_start, node) + get(state.present, cache, node)


def anchor_live(c: Cluster, state: State, cache: Array, node: Array) -> Array:
    """Whether SWA state stands exactly at the end of what is matched (the segment must be full)."""
    full = matched_blocks(c, state, cache, node) == get(c.workload.node_end, node)
    return full & (state.now < get(state.anchor_expiry, cache, node))


def write_anchor(c: Cluster, state: State, cache: Array, node: Array, host: Array) -> State:
    """Puts the one host copy of the SWA state at the end of `node` on `host` (not at node 0)."""
    node_expiry = get(state.anchor_expiry, cache, node)
    expiry = jnp.where(node == 0, node_expiry, _expiry(c, state))
    kept = get(state.anchor_host, cache, node)
    return state.replace(
        anchor_expiry=put(state.anchor_expiry, expiry, cache, node),
        anchor_host=put(state.anchor_host, jnp.where(node == 0, kept, host), cache, node),
    )


def renew_anchor(c: Cluster, state: State, cache: Array, node: Array, used: Array) -> State:
    """A used anchor lives for another TTL."""
    expiry = jnp.where(used, _expiry(c, state), get(state.anchor_expiry, cache, node))
    return state.replace(anchor_expiry=put(state.anchor_expiry, expiry, cache, node))


def _expiry(c: Cluster, state: State) -> Array:
    ttl = c.scenario.swa_ttl_ticks
    return jnp.where(ttl >= NEVER, NEVER, state.now + ttl).astype(state.now.dtype)


def segment_ending_at(c: Cluster, node: Array, blocks: Array) -> Array:
    """The segment at or above `node` that ends at `blocks`, or 0."""
    found = lax.while_loop(
        lambda n: get(c.workload.node_end, n) > blocks,
        lambda n: get(c.workload.node_parent, n),
        node,
    )
    return jnp.where(get(c.workload.node_end, found) == blocks, found, 0)


def touch(c: Cluster, state: State, cache: Array, leaf: Array) -> State:
    """Makes the path of a present `leaf` the most recent, root side last."""
    if not c.shape.bounded_cache:
        return state

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        newer, older, node = carry
        newer, older = unlink(newer, older, cache, node)
        newer, older = _append(newer, older, cache, node)
        return newer, older, get(c.workload.node_parent, node)

    start = (state.newer, state.older, leaf)
    newer, older, _ = while_loop(lambda carry: carry[2] != 0, step, start, c.zero)
    return state.replace(newer=newer, older=older)


def pin(c: Cluster, state: State, leaf: Array, change: int) -> State:
    """Adds `change` to the pins of `leaf` and its ancestors; pinned segments are not evicted."""
    if not c.shape.bounded_cache or c.shape.cache_scope != "shared":
        return state

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pins, node = carry
        return add(pins, change, node), get(c.workload.node_parent, node)

    pins, _ = while_loop(lambda carry: carry[1] != 0, step, (state.pins, leaf), c.zero)
    return state.replace(pins=pins)


def publish(c: Cluster, state: State, cache: Array, leaf: Array) -> State:
    """Makes the whole path of `leaf` present and most recent, then trims the least recent tails."""
    ends, starts, parents = c.workload.node_end, c.workload.node_start, c.workload.node_parent

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        present, newer, older, gained, node = carry
        held, length = get(present, cache, node), get(ends, node) - get(starts, node)
        if c.shape.bounded_cache:
            newer, older = when(
                held > 0,
                lambda ring: unlink(ring[0], ring[1], cache, node),
                (newer, older),
                c.zero,
            )
            newer, older = _append(newer, older, cache, node)
        present = put(present, length, cache, node)
        return present, newer, older, gained + length - held, get(parents, node)

    def more(carry: tuple[Array, ...]) -> Array:
        present, _, _, _, node = carry
        if c.shape.bounded_cache:
            return node != 0
        full = get(ends, node) - get(starts, node)
        return (node != 0) & (get(present, cache, node) < full)

    start = (state.present, state.newer, state.older, jnp.int32(0), leaf)
    present, newer, older, gained, _ = while_loop(more, step, start, c.zero)
    state = state.replace(
        present=present,
        newer=newer,
        older=older,
        used=add(state.used, gained, cache),
        published=state.published + gained,
    )
    return _evict(c, state, cache) if c.shape.bounded_cache else state


def _evict(c: Cluster, state: State, cache: Array) -> State:
    def over(carry: tuple[Array, ...]) -> Array:
        used, node = carry[4], carry[5]
        return (used > c.scenario.cache_blocks) & (node != 0)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        present, newer, older, pins, used, node = carry
        held = get(present, cache, node)
        cut = jnp.minimum(held, used - c.scenario.cache_blocks).astype(jnp.int32)
        cut = jnp.where(get(pins, node) > 0, 0, cut)
        following = get(newer, cache, node)
        present = put(present, held - cut, cache, node)
        newer, older = when(
            cut == held, lambda ring: unlink(ring[0], ring[1], cache, node), (newer, older), c.zero
        )
        return present, newer, older, pins, used - cut, following

    used, oldest = get(state.used, cache), get(state.newer, cache, 0)
    start = (state.present, state.newer, state.older, state.pins, used, oldest)
    present, newer, older, pins, left, _ = while_loop(over, step, start, c.zero)
    return state.replace(
        present=present,
        newer=newer,
        older=older,
        pins=pins,
        used=put(state.used, left, cache),
        evicted=state.evicted + used - left,
    )


def unlink(newer: Array, older: Array, cache: Array, node: Array) -> tuple[Array, Array]:
    """The LRU ring of `cache` without `node`."""
    after, before = get(newer, cache, node), get(older, cache, node)
    return put(newer, after, cache, before), put(older, before, cache, after)


def _append(newer: Array, older: Array, cache: Array, node: Array) -> tuple[Array, Array]:
    last = get(older, cache, 0)
    newer = put(put(newer, node, cache, last), 0, cache, node)
    return newer, put(put(older, last, cache, node), node, cache, 0)
