"""The end of a prefill step: quota credited, prompts finished, published and sent on (`SEMANTICS.md` 6)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import cache, decode, handoff, queries, retention
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.containers import add, get, pop_front, put
from deepinfer_jax.simulator.events import WRITE_BACK, schedule
from deepinfer_jax.simulator.inplace import when, while_loop
from deepinfer_jax.simulator.state import SERVING, State, append
from deepinfer_jax.simulator.steps import over_ranks

Array = Any


def end_batches(c: Cluster, state: State, engine: Array, local: Array) -> State:
    """The chunks of a step that just ended are computed: credit quota, finish prompts."""
    state = state.replace(place_pending=jnp.asarray(True))

    def visit(state: State, rank: Array) -> State:
        def more(state: State) -> Array:
            return get(state.batch_requests, rank) > 0

        def one(state: State) -> State:
            left = get(state.batch_requests, rank) - 1
            state = state.replace(batch_requests=put(state.batch_requests, left, rank))
            cut = jnp.where(left == 0, get(state.batch_cut, rank), 0)
            return _end_chunk(c, state, engine, rank, cut, local)

        return while_loop(more, one, state, c.zero)

    return over_ranks(c, engine, state, visit)


def _end_chunk(
    c: Cluster, state: State, engine: Array, rank: Array, cut: Array, local: Array
) -> State:
    request = get(state.fifo_head, rank)
    context, prompt = get(state.context, request), get(state.prompt, request)
    done = jnp.where(cut > 0, context + cut, prompt)
    before = queries.owed_quota(c, state, request)
    state = state.replace(context=put(state.context, done, request))
    credit = before - queries.owed_quota(c, state, request)
    state = state.replace(
        quota_used=add(state.quota_used, -credit, engine),
        rank_quota=add(state.rank_quota, -credit, rank),
        prompt_tokens=add(state.prompt_tokens, (context - done).astype(jnp.int64), engine),
    )
    if c.shape.swa and c.shape.swa_anchors == "every_chunk":
        state = _anchor_chunk(c, state, engine, request, done)
    return when(cut == 0, lambda s: _end_prompt(c, s, engine, rank, request, local), state, c.zero)


def _anchor_chunk(c: Cluster, state: State, engine: Array, request: Array, end: Array) -> State:
    """`every_chunk`: SWA state is kept where a chunk ends on a segment's end."""
    block = c.scenario.block_tokens
    leaf = get(c.workload.match_node, request)
    node = cache.segment_ending_at(c, leaf, end // block)
    node = jnp.where(end % block == 0, node, 0)
    return cache.write_anchor(c, state, cache.cache_of(c.shape, engine), node, engine)


def _end_prompt(
    c: Cluster, state: State, engine: Array, rank: Array, request: Array, local: Array
) -> State:
    first = get(state.first_token, request)
    sent = get(state.emitted, request) + 1
    state = state.replace(
        fifo_head=pop_front(state.following, state.fifo_head, rank),
        prompts=add(state.prompts, -1, engine),
        first_token=put(state.first_token, jnp.where(first < 0, state.now, first), request),
        emitted=put(state.emitted, sent, request),
    )
    if state.stay_log is not None:
        log, count = append(state.stay_log, state.stays, request, -1, state.now, 0, 0, 1)
        state = state.replace(stay_log=log, stays=count)
    state = _store(c, state, engine, request)
    prompt = get(state.prompt, request).astype(jnp.int64)
    over = sent >= get(c.workload.output_tokens, request)
    if c.shape.normal or c.shape.mixed:
        state = _leave_prefill(c, state, rank, request, local & over)
        state = when(local & ~over, lambda s: _stay(c, s, rank, request, prompt), state, c.zero)
    state = when(over, lambda s: decode.finish(c, s, request, engine), state, c.zero)
    if not c.shape.prompt:
        return state
    return when(~local & ~over, lambda s: handoff.choose_rank(c, s, request), state, c.zero)


def _leave_prefill(c: Cluster, state: State, rank: Array, request: Array, release: Array) -> State:
    """NORMAL and MIXED: a finished prompt gives up its place in prefill, and its blocks if it ends."""
    held = queries.blocks_for(c, get(state.prompt, request).astype(jnp.int64))
    admitted = get(state.admitted, request).astype(jnp.int32)
    return state.replace(
        in_prefill=add(state.in_prefill, -admitted, rank),
        admitted=put(state.admitted, False, request),
        reserved=add(state.reserved, jnp.where(release, -held, 0), rank),
    )


def _stay(c: Cluster, state: State, rank: Array, request: Array, prompt: Array) -> State:
    """NORMAL and MIXED: the request keeps its slot and blocks and decodes on the same rank."""
    state = state.replace(
        assigned=add(state.assigned, 1, rank),
        pending_tokens=add(state.pending_tokens, prompt, rank),
    )
    return decode.join(c, state, rank, request)


def _store(c: Cluster, state: State, engine: Array, request: Array) -> State:
    """Publishes a prompt's blocks (now, or when they are written back) and anchors its SWA state."""
    if c.shape.cache_scope == "none":
        return state
    store = cache.cache_of(c.shape, engine)
    if c.shape.swa:
        node = get(c.workload.match_node, request)
        state = cache.write_anchor(c, state, store, node, engine)
    if c.shape.write_back:
        return schedule(c, state, state.now + c.scenario.write_back_ticks, request, WRITE_BACK)
    return retention.publish(c, state, store, get(c.workload.publish_node, request), request)


def end_write_back(c: Cluster, state: State, request: Array) -> State:
    """The blocks of a prompt reach the cache of the engine that prefilled it."""
    engine = get(state.engine, request)
    store = cache.cache_of(c.shape, engine)
    leaf = get(c.workload.publish_node, request)
    if c.shape.dynamics and c.shape.cache_scope == "local":
        there = get(state.life, engine) >= SERVING
        leaf = jnp.where(there, leaf, 0)
    return retention.publish(c, state, store, leaf, request)
