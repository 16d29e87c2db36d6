"""Decode: joining slots, finishing, preemption, and the formation of decode steps (`SEMANTICS.md` 8)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import cache, handoff, queries, retention
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Mode, Status
from deepinfer_jax.simulator.containers import add, get, pop_front, push_front, push_second, put
from deepinfer_jax.simulator.ending import end
from deepinfer_jax.simulator.events import REMATCH, schedule
from deepinfer_jax.simulator.inplace import either, while_loop
from deepinfer_jax.simulator.state import AWAY, LANDED, PLACED, State, append, move
from deepinfer_jax.simulator.steps import engine_row, go_idle, over_ranks, set_engine_row, start_run

Array = Any


def join(c: Cluster, state: State, rank: Array, request: Array) -> State:
    """An assigned request with reserved blocks takes a free slot; one must be free."""
    slot = jnp.argmax(get(state.slot_request, rank) == c.shape.requests)
    now_step = get(state.steps, rank // c.shape.ranks)
    prompt = get(state.prompt, request).astype(jnp.int64)
    owed = get(c.workload.output_tokens, request) - get(state.emitted, request)
    needed = queries.steps_needed(c, request, owed, get(state.steps_done, request))
    growth = 256 * owed.astype(jnp.int64) // needed
    finish = now_step + needed
    state = state.replace(
        slot_request=put(state.slot_request, request, rank, slot),
        slot_finish=put(state.slot_finish, finish, rank, slot),
        slot_join=put(state.slot_join, now_step, rank, slot),
        slot_growth=put(state.slot_growth, growth, rank, slot),
        slot_prompt=put(state.slot_prompt, prompt, rank, slot),
        rows=add(state.rows, 1, rank),
        kv=add(state.kv, 256 * prompt, rank),
        growth=add(state.growth, growth, rank),
        next_finish=put(state.next_finish, jnp.minimum(get(state.next_finish, rank), finish), rank),
        pending_tokens=add(state.pending_tokens, -prompt, rank),
        reserved=add(state.reserved, -queries.blocks_for(c, prompt), rank),
        decode_start=put(state.decode_start, state.now, request),
        target=put(state.target, rank, request),
    )
    return move(state, request, LANDED)


def _vacate(c: Cluster, state: State, rank: Array, slot: Array) -> State:
    """Takes the request out of a slot; its blocks are free from now on."""
    stayed = get(state.steps, rank // c.shape.ranks) - get(state.slot_join, rank, slot)
    growth = get(state.slot_growth, rank, slot)
    held = 256 * get(state.slot_prompt, rank, slot) + stayed * growth
    slot_finish = put(state.slot_finish, NEVER, rank, slot)
    return state.replace(
        slot_request=put(state.slot_request, c.shape.requests, rank, slot),
        slot_finish=slot_finish,
        slot_growth=put(state.slot_growth, 0, rank, slot),
        rows=add(state.rows, -1, rank),
        kv=add(state.kv, -held, rank),
        growth=add(state.growth, -growth, rank),
        next_finish=put(state.next_finish, jnp.min(get(slot_finish, rank)), rank),
        assigned=add(state.assigned, -1, rank),
    )


def log_stay(c: Cluster, state: State, rank: Array, slot: Array, emitted: Any = None) -> State:
    """Records a stay that ends: (request, engine, engine's step at the join, steps, steps of the
    request's earlier stays, tokens sent), when `emitted` tokens were sent in all (None: the whole output)."""
    if state.stay_log is None:
        return state
    request, joined = get(state.slot_request, rank, slot), get(state.slot_join, rank, slot)
    engine = rank // c.shape.ranks
    if emitted is None:
        emitted = get(c.workload.output_tokens, request)
    sent = emitted - get(state.emitted, request)
    row = (request, engine, joined, get(state.steps, engine) - joined)
    log, count = append(state.stay_log, state.stays, *row, get(state.steps_done, request), sent)
    return state.replace(stay_log=log, stays=count)


def finish(c: Cluster, state: State, request: Array, engine: Array) -> State:
    """The last token of `request` has been sent by `engine`."""
    outputs = get(c.workload.output_tokens, request)
    state = state.replace(
        finish=put(state.finish, state.now, request),
        emitted=put(state.emitted, outputs, request),
    )
    state = move(end(c, state, request, int(Status.COMPLETED)), request, AWAY)
    if c.shape.cache_scope == "none":
        return state
    store = cache.cache_of(c.shape, engine)
    leaf = get(c.workload.output_node, request)
    if c.shape.publish_output:
        state = retention.publish(c, state, store, leaf, request)
    if c.shape.swa and c.shape.swa_anchors == "output_end":
        total = get(c.workload.input_tokens, request) + outputs
        blocks = jnp.maximum(total - c.scenario.reserve, 0) // c.scenario.block_tokens
        node = cache.segment_ending_at(c, leaf, blocks)
        state = cache.write_anchor(c, state, store, node, engine)
    return state


def finish_due(c: Cluster, state: State, engine: Array) -> State:
    """Finishes every running request of `engine` whose last step just ended, by rank, then index."""
    reached = get(state.steps, engine)

    def due(state: State) -> Array:
        return jnp.any(engine_row(c, state.next_finish, engine) <= reached)

    def finish_one(state: State) -> State:
        late = engine_row(c, state.next_finish, engine) <= reached
        rank = engine * c.shape.ranks + jnp.argmax(late).astype(jnp.int32)
        done = get(state.slot_finish, rank) <= reached
        occupants = jnp.where(done, get(state.slot_request, rank), c.shape.requests)
        slot = jnp.argmin(occupants).astype(jnp.int32)
        request = get(state.slot_request, rank, slot)
        stayed = reached - get(state.slot_join, rank, slot)
        state = log_stay(c, state, rank, slot)
        state = state.replace(steps_done=add(state.steps_done, stayed.astype(jnp.int32), request))
        state = _vacate(c, state, rank, slot)
        state = finish(c, state, request, engine)
        return handoff.admit_waiting(c, state, rank)

    return while_loop(due, finish_one, state, c.zero)


def advance(c: Cluster, state: State, engine: Array, made: Array) -> State:
    """Adds the tokens of `made` steps that the engine's running requests just ended."""
    kv = engine_row(c, state.kv, engine) + made * engine_row(c, state.growth, engine)
    return finish_due(c, state.replace(kv=set_engine_row(c, state.kv, kv, engine)), engine)


def preempt(c: Cluster, state: State, engine: Array) -> State:
    """Longest outputs leave every rank of `engine` whose next step does not fit its blocks."""
    if not c.shape.kv_limited:
        return state

    def visit(state: State, rank: Array) -> State:
        def over(state: State) -> Array:
            return (queries.rank_free_blocks(c, state, rank) < 0) & (get(state.rows, rank) > 0)

        return while_loop(over, lambda s: _preempt_one(c, s, engine, rank), state, c.zero)

    return over_ranks(c, engine, state, visit)


def _preempt_one(c: Cluster, state: State, engine: Array, rank: Array) -> State:
    requests = get(state.slot_request, rank)
    stayed = get(state.steps, engine) - get(state.slot_join, rank)
    busy = requests != c.shape.requests
    sent = state.emitted[requests] + (stayed * get(state.slot_growth, rank)) // 256
    most = jnp.max(jnp.where(busy, sent, -1))
    slot = jnp.argmin(jnp.where(busy & (sent == most), requests, c.shape.requests)).astype(
        jnp.int32
    )
    request = get(requests, slot)
    state = log_stay(c, state, rank, slot, most)
    state = state.replace(
        emitted=put(state.emitted, most, request),
        steps_done=add(state.steps_done, get(stayed, slot).astype(jnp.int32), request),
        preemptions=add(state.preemptions, 1, request),
    )
    state = move(_vacate(c, state, rank, slot), request, AWAY)
    if c.shape.completion:
        away = get(c.scenario.modes, engine) == int(Mode.COMPLETION)
        state = either(
            away,
            lambda s: schedule(c, s, s.now + c.scenario.match_ticks, request, REMATCH),
            lambda s: _recompute(c, s, engine, rank, request),
            state,
            c.zero,
        )
        return handoff.admit_waiting(c, state, rank)
    return _recompute(c, state, engine, rank, request)


def _recompute(c: Cluster, state: State, engine: Array, rank: Array, request: Array) -> State:
    """Back to the prefill FIFO of the same rank, from position 0, behind a head already admitted."""
    prompt = get(c.workload.input_tokens, request) + get(state.emitted, request)
    state = state.replace(
        prompt=put(state.prompt, prompt, request),
        context=put(state.context, 0, request),
        hit_compute=put(state.hit_compute, 0, request),
    )
    head = get(state.fifo_head, rank)
    following, fifo_head, fifo_tail = either(
        get(state.admitted, head),
        lambda x: push_second(x[0], x[1], x[2], rank, request),
        lambda x: push_front(x[0], x[1], x[2], rank, request),
        (state.following, state.fifo_head, state.fifo_tail),
        c.zero,
    )
    cost = queries.owed_quota(c, state, request)
    state = move(state, request, PLACED)
    return state.replace(
        following=following,
        fifo_head=fifo_head,
        fifo_tail=fifo_tail,
        quota_used=add(state.quota_used, cost, engine),
        rank_quota=add(state.rank_quota, cost, rank),
        prompts=add(state.prompts, 1, engine),
        prompt_tokens=add(state.prompt_tokens, prompt, engine),
    )


def safe_steps(c: Cluster, state: State, engine: Array) -> Array:
    """Steps that cannot exhaust any rank's blocks: every request counted with a full block of waste."""
    if not c.shape.kv_limited:
        return jnp.int64(NEVER)
    rows = engine_row(c, state.rows, engine).astype(jnp.int64)
    room = c.scenario.kv_blocks - engine_row(c, state.reserved, engine)
    tokens = c.scenario.block_tokens * room - rows * (c.shape.nextn + c.scenario.block_tokens)
    growth = jnp.maximum(engine_row(c, state.growth, engine), 1)
    more = (256 * tokens - engine_row(c, state.kv, engine)) // growth
    return jnp.min(jnp.where(rows > 0, 1 + jnp.maximum(more, 0), NEVER))


def run_or_idle(c: Cluster, state: State, engine: Array, limit: Array) -> State:
    """A run of decode steps if anybody runs, else nothing."""
    limit = jnp.minimum(limit, safe_steps(c, state, engine))
    return either(
        jnp.any(engine_row(c, state.rows, engine) > 0),
        lambda s: start_run(c, s, engine, limit),
        lambda s: go_idle(s, engine),
        state,
        c.zero,
    )


def join_landed(c: Cluster, state: State, engine: Array) -> State:
    """Landed requests take the free slots of every rank of a COMPLETION engine, in FIFO order."""

    def visit(state: State, rank: Array) -> State:
        def joinable(state: State) -> Array:
            waiting = get(state.join_head, rank) != c.shape.requests
            return waiting & (get(state.rows, rank) < c.shape.slots)

        def join_one(state: State) -> State:
            request = get(state.join_head, rank)
            head = pop_front(state.following, state.join_head, rank)
            return join(c, state.replace(join_head=head), rank, request)

        return while_loop(joinable, join_one, state, c.zero)

    return over_ranks(c, engine, state, visit)
