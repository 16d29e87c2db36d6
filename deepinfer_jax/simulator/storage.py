"""Storage nodes under the shared store: which blocks can be read, and how long reads take (`SEMANTICS.md` 11, 15).

A stripe of blocks is erasure-coded in 10 data and 2 parity fragments (the chapter, section 11.4): any two
nodes may be down, and from the third on some stripes cannot be read until a node is back. A read asks
11 of the holders and is done at the tenth reply, so it waits for the slowest but one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER, ceil_ticks
from deepinfer_jax.simulator.cluster import FRAGMENTS, NEEDED
from deepinfer_jax.simulator.containers import get
from deepinfer_jax.simulator.inplace import when, while_loop
from deepinfer_jax.simulator.queries import GOLDEN, mix
from deepinfer_jax.simulator.state import State

Array = Any

QUANTILES, UNIT = 4096, 2**20


def exponential_table() -> np.ndarray:
    """[QUANTILES] int64: mean of the unit exponential in each of its equal parts, times `UNIT`."""
    rest = 1 - np.arange(QUANTILES + 1) / QUANTILES
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.where(rest > 0, rest - rest * np.log(rest), 0.0)
    return np.rint(UNIT * QUANTILES * (whole[:-1] - whole[1:])).astype(np.int64)


def _stripe_key(c: Cluster, segment: Array, block: Array) -> Array:
    stripe = (block // c.scenario.stripe_blocks).astype(jnp.uint64)
    return mix(jnp.uint64(GOLDEN) * (segment.astype(jnp.uint64) + 1) + stripe)


def _node_keys(c: Cluster, key: Array) -> Array:
    """[S] uint64: a hash of `key` and each node."""
    nodes = jnp.arange(c.shape.storage_nodes).astype(jnp.uint64)
    return mix(key + jnp.uint64(GOLDEN) * (nodes + 1))


def _places(c: Cluster, key: Array) -> Array:
    """[S] rank of every node for a stripe; the first 12 hold its fragments."""
    nodes = jnp.arange(c.shape.storage_nodes)
    keys = (_node_keys(c, key) >> 1).astype(jnp.int64)
    tied = (keys[None, :] == keys[:, None]) & (nodes[None, :] < nodes[:, None])
    return jnp.sum((keys[None, :] < keys[:, None]) | tied, axis=1)


def readable(c: Cluster, state: State, segment: Array, block: Array) -> Array:
    """Whether at least 10 of the 12 nodes that hold fragments of a block are up."""
    place = _places(c, _stripe_key(c, segment, block))
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
        stop = jnp.minimum(limit, get(c.workload.node_end, segment))
        found = while_loop(
            lambda b: (b < stop) & readable(c, state, segment, b), lambda b: b + 1, start, c.zero
        )
        return jnp.where(found < stop, found, limit)

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


def _over_stripes(
    c: Cluster,
    deepest: Array,
    blocks: Array,
    visit: Callable[[Array, Array, Array], Array],
    start: Array,
) -> Array:
    """Folds `visit(carry, stripe key, blocks of the stripe)` over what `blocks` leading blocks need."""
    size = c.scenario.stripe_blocks

    def stripe(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        segment, block, value = carry
        limit = jnp.minimum(get(c.workload.node_end, segment), blocks)
        following = jnp.minimum((block // size + 1) * size, limit).astype(block.dtype)
        value = visit(value, _stripe_key(c, segment, block), following - block)
        above = get(c.workload.node_parent, segment)
        done = following >= limit
        segment = jnp.where(done, above, segment)
        block = jnp.where(done, get(c.workload.node_start, above), following)
        return segment, block, value

    first = (deepest, get(c.workload.node_start, deepest), start)
    return while_loop(lambda carry: carry[0] != 0, stripe, first, c.zero)[2]


def _asked(c: Cluster, state: State, key: Array, stream: Array) -> Array:
    """[S] bool: the holders that a read asks for their fragment of a stripe."""
    place = _places(c, key)
    holds = (place < FRAGMENTS) & (state.node_up_at <= state.now)
    live = jnp.sum(holds)
    first = (mix(key + stream) >> 33).astype(jnp.int64) % live
    # Place among the holders that are up.
    before = jnp.sum(holds[None, :] & (place[None, :] < place[:, None]), axis=1)
    return holds & ((before - first) % live < c.scenario.storage_asked)


def read(c: Cluster, state: State, request: Array) -> tuple[State, Array]:
    """(state, tick at which the last stripe of the request's hit has its tenth fragment)."""
    blocks = get(state.hit_blocks, request)
    deepest = jnp.where(blocks > 0, get(state.hit_node, request), 0)
    seed = ~c.scenario.seed.astype(jnp.uint64)
    stream = mix(seed + jnp.uint64(GOLDEN) * state.placements.astype(jnp.uint64))

    def ask(size: Array, key: Array, count: Array) -> Array:
        fragment = -(-(count.astype(jnp.int64) * c.scenario.block_bytes) // NEEDED)
        return size + jnp.where(_asked(c, state, key, stream), fragment, 0)

    size = _over_stripes(c, deepest, blocks, ask, jnp.zeros(c.shape.storage_nodes, jnp.int64))
    drawn = (_node_keys(c, stream) >> 52).astype(jnp.int32)
    access = c.scenario.storage_read_ticks * jnp.asarray(exponential_table())[drawn]
    access = access // UNIT if c.shape.exact else access / UNIT
    lasts = jnp.where(size > 0, access + ceil_ticks(size * c.scenario.storage_rate), 0)
    arrives = jnp.maximum(state.now, state.node_free) + lasts

    def wait(end: Array, key: Array, count: Array) -> Array:
        del count
        replies = jnp.where(_asked(c, state, key, stream), arrives, NEVER)
        return jnp.maximum(end, jnp.sort(replies)[NEEDED - 1])

    end = _over_stripes(c, deepest, blocks, wait, state.now)
    state = state.replace(
        node_free=jnp.where(size > 0, arrives, state.node_free),
        node_busy=state.node_busy + lasts,
        storage_bytes=state.storage_bytes + jnp.sum(size),
        storage_reads=state.storage_reads + (blocks > 0),
        storage_ticks=state.storage_ticks + (end - state.now),
    )
    return state, end
