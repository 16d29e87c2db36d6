"""Storage nodes under the shared store: which blocks can be read while some are down (`SEMANTICS.md` 11).

A block is erasure-coded in 10 data and 2 parity fragments (the chapter, section 11.4): any two nodes
may be down, and from the third on some blocks cannot be read until a node is back.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.cluster import FRAGMENTS, NEEDED
from deepinfer_jax.simulator.containers import get
from deepinfer_jax.simulator.inplace import when, while_loop
from deepinfer_jax.simulator.queries import GOLDEN, mix
from deepinfer_jax.simulator.state import State

Array = Any


def readable(c: Cluster, state: State, segment: Array, block: Array) -> Array:
    """Whether at least 10 of the 12 nodes that hold fragments of a block are up."""
    nodes = jnp.arange(c.shape.storage_nodes)
    golden = jnp.uint64(GOLDEN)
    key = mix(golden * (segment.astype(jnp.uint64) + 1) + block.astype(jnp.uint64))
    keys = (mix(key + golden * (nodes.astype(jnp.uint64) + 1)) >> 1).astype(jnp.int64)
    tied = (keys[None, :] == keys[:, None]) & (nodes[None, :] < nodes[:, None])
    place = jnp.sum((keys[None, :] < keys[:, None]) | tied, axis=1)
    return jnp.sum((place < FRAGMENTS) & (state.node_up_at <= state.now)) >= NEEDED


def readable_prefix(
    c: Cluster, state: State, deepest: Array, blocks: Array
) -> tuple[State, Array, Array]:
    """(state, deepest segment, leading blocks) of a match of `blocks` up to what can be read."""
    if not c.shape.storage_nodes:
        return state, deepest, blocks

    def first_gone(segment: Array, limit: Array) -> Array:
        """The first block of a segment below `limit` that cannot be read, or `limit`."""
        start = get(c.workload.node_start, segment)
        return while_loop(
            lambda b: (b < limit) & readable(c, state, segment, b), lambda b: b + 1, start, c.zero
        )

    def up(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        segment, limit = carry
        found = first_gone(segment, limit)
        return get(c.workload.node_parent, segment), jnp.minimum(limit, found)

    def look(limit: Array) -> Array:
        return while_loop(lambda x: x[0] != 0, up, (deepest, limit), c.zero)[1]

    many = jnp.sum(state.node_up_at > state.now) > FRAGMENTS - NEEDED
    limit = when(many, look, blocks, c.zero)

    def beyond(segment: Array) -> Array:
        return (segment != 0) & (get(c.workload.node_start, segment) >= limit)

    segment = while_loop(beyond, lambda n: get(c.workload.node_parent, n), deepest, c.zero)
    state = state.replace(
        unreadable_blocks=state.unreadable_blocks + (blocks - limit),
        unreadable_matches=state.unreadable_matches + (limit < blocks),
    )
    return state, segment, limit
