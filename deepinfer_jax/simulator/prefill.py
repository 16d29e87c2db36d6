"""Prefill: the rank FIFOs and the quota-limited batches and chunks of a step (`SEMANTICS.md` 6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.cost.quota import largest_chunk
from deepinfer_jax.policy.prefill import least_quota_rank
from deepinfer_jax.simulator import queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import add, get, push_back, put
from deepinfer_jax.simulator.inplace import either, fori_loop, while_loop
from deepinfer_jax.simulator.state import PLACED, State, move
from deepinfer_jax.simulator.steps import engine_row, interrupt

Array = Any


def debit(c: Cluster, state: State, engine: Array, request: Array) -> State:
    """The rank of `engine` with least quota load takes the request and its predicted cost."""
    rank = jnp.int32(0)
    if c.shape.ranks > 1:
        load = engine_row(c, state.rank_quota, engine)
        if c.shape.crashes:
            worst = jnp.asarray(NEVER, load.dtype)
            load = jnp.where(engine_row(c, state.alive, engine), load, worst)
        rank = least_quota_rank(load).astype(jnp.int32)
    rank = engine * c.shape.ranks + rank
    cost = queries.owed_quota(c, state, request)
    return state.replace(
        rank=put(state.rank, rank, request),
        quota_used=add(state.quota_used, cost, engine),
        rank_quota=add(state.rank_quota, cost, rank),
    )


def enqueue(c: Cluster, state: State, request: Array) -> State:
    """The request joins the prefill FIFO of its rank; the engine looks at it at its next boundary."""
    following, head, tail = push_back(
        state.following, state.fifo_head, state.fifo_tail, get(state.rank, request), request
    )
    state = state.replace(following=following, fifo_head=head, fifo_tail=tail)
    state = move(state, request, PLACED)
    return interrupt(state, get(state.engine, request))


# Forming a batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A rank's batch while it is being formed."""

    state: State
    request: Array  # the next to look at
    count: Array
    time: Array  # femtoseconds, base included
    tokens: Array  # rows included
    new_tokens: Array
    free: Array  # blocks
    cut: Array
    closed: Array  # bool


def form_batch(c: Cluster, state: State, rank: Array, local: Array, mixed: Array) -> Batch:
    """The FIFO prefix of `rank` within quota, tokens and requests; the last prompt may be cut.

    `local` engines (NORMAL, MIXED) also need a slot and blocks; `mixed` ones count decode rows.
    """
    rows = get(state.rows, rank)
    zero = jnp.zeros((), jnp.int64)
    blocks = queries.rank_free_blocks(c, state, rank) if c.shape.normal or c.shape.mixed else zero
    head = get(state.fifo_head, rank)
    batch = Batch(
        state=state,
        request=head,
        count=jnp.int32(0),
        time=jnp.asarray(c.scenario.cost.prefill_base),
        tokens=jnp.where(mixed, rows.astype(jnp.int64) * (1 + c.shape.nextn), 0),
        new_tokens=zero,
        free=blocks,
        cut=jnp.int32(0),
        closed=head == c.shape.requests,
    )
    decoding = mixed & (rows > 0)
    batch = while_loop(
        lambda b: ~b.closed, lambda b: _consider(c, b, rank, local, decoding), batch, c.zero
    )
    return dataclasses.replace(
        batch,
        state=batch.state.replace(
            batch_requests=put(batch.state.batch_requests, batch.count, rank),
            batch_cut=put(batch.state.batch_cut, batch.cut, rank),
        ),
    )


def _chunk(c: Cluster, batch: Batch, remaining: Array, context: Array, must: Array) -> Array:
    """Tokens of the next prompt that fit; `must` takes at least one chunk multiple."""
    cost = c.scenario.cost
    budget = c.scenario.step_quota - batch.time
    space = jnp.minimum(remaining, c.scenario.batch_tokens - batch.tokens)
    whole = (space == remaining) & (cost.prefill_work(remaining, context) <= budget)
    chunk = lax.cond(
        whole,
        lambda: remaining,
        lambda: largest_chunk(cost, space, context, budget).astype(jnp.int64),
    )
    multiple = c.scenario.chunk_multiple
    chunk = jnp.where(chunk < remaining, chunk // multiple * multiple, chunk)
    return jnp.where((chunk == 0) & must, jnp.minimum(remaining, multiple), chunk)


def _consider(c: Cluster, b: Batch, rank: Array, local: Array, decoding: Array) -> Batch:
    state, request = b.state, b.request
    prompt, context = get(state.prompt, request), get(state.context, request)
    remaining, context64 = (prompt - context).astype(jnp.int64), context.astype(jnp.int64)
    chunk = _chunk(c, b, remaining, context64, (b.count == 0) & ~decoding)
    enters = local & ~get(state.admitted, request)
    blocks = queries.blocks_for(c, prompt.astype(jnp.int64))
    slot = get(state.rows, rank) + get(state.in_prefill, rank) < c.shape.slots
    taken = (chunk > 0) & (~enters | (slot & (b.free >= blocks)))
    taken = taken & (b.count < c.scenario.batch_requests)
    enters = enters & taken
    starts = taken & (context == get(state.hit_compute, request))
    held = jnp.where(enters, blocks, 0)
    state = state.replace(
        admitted=put(state.admitted, get(state.admitted, request) | enters, request),
        in_prefill=add(state.in_prefill, enters, rank),
        reserved=add(state.reserved, held, rank),
        prefill_start=put(
            state.prefill_start,
            jnp.where(
                starts,
                get(state.clock_tick, rank // c.shape.ranks),
                get(state.prefill_start, request),
            ),
            request,
        ),
    )
    work = c.scenario.cost.prefill_work(chunk, context64)
    following = get(state.following, request)
    return Batch(
        state=state,
        request=following,
        count=b.count + taken,
        time=b.time + jnp.where(taken, work, 0),
        tokens=b.tokens + jnp.where(taken, chunk, 0),
        new_tokens=b.new_tokens + jnp.where(taken, chunk, 0),
        free=b.free - held,
        cut=jnp.where(taken & (chunk < remaining), chunk, 0).astype(jnp.int32),
        closed=~taken | (chunk < remaining) | (following == c.shape.requests),
    )


def form_batches(
    c: Cluster, state: State, engine: Array, wanting: Array, local: Array, mixed: Array
) -> tuple[State, Array, Array]:
    """Batches of the ranks of `engine` that are `wanting` [J].

    Returns (state, femtoseconds [J] with 0 where no batch, new tokens of all ranks).
    """
    first = engine * c.shape.ranks

    def visit(j: Array, carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, times, tokens = carry
        batch = form_batch(c, state, first + j, local, mixed)
        time = jnp.where(batch.count > 0, batch.time, 0)
        return batch.state, put(times, time, j), tokens + batch.new_tokens

    def skip(j: Array, carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, times, tokens = carry
        state = state.replace(batch_requests=put(state.batch_requests, 0, first + j))
        return state, times, tokens

    def each(j: Array, carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        return either(get(wanting, j), lambda x: visit(j, x), lambda x: skip(j, x), carry, c.zero)

    times = jnp.zeros(c.shape.ranks, jnp.asarray(c.scenario.cost.prefill_base).dtype)
    start = (state, times, jnp.int64(0))
    return fori_loop(c.shape.ranks, each, start, c.zero)


def prefill_exchange(c: Cluster, tokens: Array) -> Array:
    """Femtoseconds of the expert exchange of a step with `tokens` new tokens on all ranks."""
    cost = c.scenario.cost
    time = cost.prefill_exchange_base + cost.prefill_exchange_token * tokens
    return jnp.where(tokens > 0, time, 0)
