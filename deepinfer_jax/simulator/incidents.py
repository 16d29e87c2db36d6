"""Incidents: GPUs, hosts and storage nodes that fail, departures by plan; a crash (`SEMANTICS.md` 11)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from deepinfer_jax.simulator import cache, decode, handoff, life, queries
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Incident, Status
from deepinfer_jax.simulator.containers import add, get, pop_front, push_back, put
from deepinfer_jax.simulator.ending import end
from deepinfer_jax.simulator.events import REMATCH, call_off, schedule
from deepinfer_jax.simulator.inplace import either, fori_loop, when, while_loop
from deepinfer_jax.simulator.state import (
    AWAY,
    DECODE,
    FETCHING,
    LANDED,
    LEAVING,
    MOVING,
    OFF,
    ORPHAN,
    PLACED,
    SERVING,
    STARTING,
    WAITING,
    State,
    move,
)
from deepinfer_jax.simulator.steps import log_run, tally

Array = Any


def incident(c: Cluster, state: State) -> State:
    """The next incident of the list happens."""
    numbers, at = c.dynamics, state.next_incident
    kind, index = get(numbers.incident_kind, at), get(numbers.incident_index, at).astype(jnp.int32)
    state = state.replace(next_incident=at + 1)
    gpu = kind == Incident.GPU
    engine = jnp.where(gpu, index // c.shape.ranks, jnp.minimum(index, c.shape.engines - 1))
    engine = jnp.minimum(engine, c.shape.engines - 1)
    was = get(state.life, engine)
    if c.shape.crashes:
        host = kind == Incident.HOST
        rank = jnp.where(gpu, index, 0)
        never = numbers.repair_ticks >= NEVER
        healthy_at = jnp.where(never, NEVER, state.now + numbers.repair_ticks)
        healthy_at = jnp.where(gpu, healthy_at, get(state.healthy_at, rank))
        state = state.replace(healthy_at=put(state.healthy_at, healthy_at, rank))
        if c.shape.swa:
            state = when(host, lambda s: life.lose_anchors(s, engine), state, c.zero)
        hits = (host | gpu) & (was != OFF)
        state = when(hits, lambda s: crash(c, s, engine), state, c.zero)
    if c.shape.storage_nodes:
        node = jnp.minimum(index, c.shape.storage_nodes - 1)
        down = state.now + numbers.storage_repair_ticks
        up_at = jnp.where(kind == Incident.STORAGE, down, get(state.node_up_at, node))
        state = state.replace(node_up_at=put(state.node_up_at, up_at, node))
    if c.shape.departures:
        leaves = (kind == Incident.DEPART) & ((was == SERVING) | (was == STARTING))
        after = jnp.where(was == SERVING, LEAVING, OFF)
        state = when(leaves, lambda s: life.change(s, engine, after), state, c.zero)
    return state


def crash(c: Cluster, state: State, engine: Array) -> State:
    """`engine` loses its step and every request that it holds, and starts anew or goes off."""
    state = _stop(c, state, engine)
    lost, redirected = _affected(c, state, engine)
    state = call_off(c, state, lost | redirected)
    state = leave_lanes(c, state, lost)
    state = while_loop(lambda x: jnp.any(x[1]), lambda x: _lose_first(c, x), (state, lost), c.zero)[
        0
    ]
    state = empty_engine(c, state, engine)
    state = state.replace(
        held=put(state.held, 0, engine),
        fetch_free=put(state.fetch_free, 0, engine),
        handoff_free=put(state.handoff_free, 0, engine),
    )
    life_then = jnp.where(get(state.life, engine) == LEAVING, OFF, STARTING)
    state = life.change(state, engine, life_then)
    if not c.shape.completion:
        return state
    state = admit_everywhere(c, state)
    state = while_loop(
        lambda x: jnp.any(x[1]), lambda x: _redirect_first(x), (state, redirected), c.zero
    )[0]
    return state.replace(adopt_left=jnp.where(jnp.any(redirected), state.orphans, 0))


def _stop(c: Cluster, state: State, engine: Array) -> State:
    """The step under way is dropped; steps of a run that reached their boundary count."""
    made = get(queries.steps_reached(c, state), engine)
    kind = get(state.step_kind, engine)
    made = jnp.where(kind == DECODE, made, 0)
    if state.run_log is not None:
        state = when(made > 0, lambda s: log_run(s, engine, made), state, c.zero)
    lasted = jnp.where(kind == 0, 0, state.now - get(state.step_start, engine))
    state = tally(state, engine, kind, made, lasted, state.now)
    return state.replace(
        steps=add(state.steps, made, engine),
        since_prompt=put(state.since_prompt, 0, engine),
        step_kind=put(state.step_kind, 0, engine),
        step_end=put(state.step_end, NEVER, engine),
        run_steps=put(state.run_steps, 0, engine),
        clock_tick=put(state.clock_tick, -1, engine),
        clock_remainder=put(state.clock_remainder, 0, engine),
        dirty=put(state.dirty, False, engine),
    )


def _affected(c: Cluster, state: State, engine: Array) -> tuple[Array, Array]:
    """bool [Q + 1] each: requests that are lost with `engine`, and those bound for it."""
    stage = state.stage
    bound = (stage == WAITING) | (stage == MOVING)
    there = (stage == LANDED) & (state.target // c.shape.ranks == engine)
    placed = ((stage == FETCHING) | (stage == PLACED)) & (state.engine == engine)
    held = (bound | (stage == ORPHAN)) & (state.source == engine)
    lost = placed | held | there
    return lost, bound & (state.target // c.shape.ranks == engine) & ~lost


def leave_lanes(c: Cluster, state: State, gone: Array) -> State:
    """The requests `gone` leave the lanes of those who wait for blocks, and the orphans'."""
    if not c.shape.completion:
        return state
    nobody = c.shape.requests

    def keep(lanes: tuple[Array, ...], lane: Array) -> tuple[Array, ...]:
        last = get(lanes[2], lane)
        start = (*lanes, get(lanes[1], lane) == nobody)

        def turn(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            following, head, tail, _ = carry
            first = get(head, lane)
            head = pop_front(following, head, lane)
            following, head, tail = either(
                get(gone, first),
                lambda x: x,
                lambda x: push_back(x[0], x[1], x[2], lane, first),
                (following, head, tail),
                c.zero,
            )
            return following, head, tail, first == last

        return while_loop(lambda x: ~x[3], turn, start, c.zero)[:3]

    lanes = (state.following, state.orphan_head, state.orphan_tail)
    following, head, tail = keep(lanes, jnp.int32(0))
    left = state.orphans - jnp.sum(gone & (state.stage == ORPHAN))
    state = state.replace(
        following=following,
        orphan_head=head,
        orphan_tail=tail,
        orphans=left.astype(jnp.int32),
    )
    if not c.shape.kv_limited:
        return state
    lanes = (state.following, state.wait_head, state.wait_tail)
    lanes = fori_loop(c.shape.all_ranks, lambda r, x: keep(x, r), lanes, c.zero)
    return state.replace(following=lanes[0], wait_head=lanes[1], wait_tail=lanes[2])


def _lose_first(c: Cluster, carry: tuple[State, Array]) -> tuple[State, Array]:
    """The lowest of the lost requests gives back what it holds and is matched again, or ends."""
    state, lost = carry
    request = jnp.argmax(lost).astype(jnp.int32)
    stage = get(state.stage, request)
    if c.shape.cache_scope == "shared":
        node = jnp.where(stage == FETCHING, get(state.hit_node, request), 0)
        state = cache.pin(c, state, node, -1)
    if c.shape.completion:
        bound = (stage == WAITING) | (stage == MOVING)
        state = when(bound, lambda s: release_target(c, s, request), state, c.zero)
    state = when(stage == LANDED, lambda s: keep_sent(c, s, request), state, c.zero)
    crashes = get(state.crashes, request) + 1
    state = state.replace(
        crashes=put(state.crashes, crashes, request),
        preemptions=add(state.preemptions, 1, request),
        admitted=put(state.admitted, False, request),
    )
    state = move(state, request, AWAY)
    state = either(
        crashes > c.dynamics.retry_limit,
        lambda s: end(c, s, request, int(Status.CRASHED)),
        lambda s: schedule(c, s, s.now + c.scenario.match_ticks, request, REMATCH),
        state,
        c.zero,
    )
    return state, put(lost, False, request)


def release_target(c: Cluster, state: State, request: Array) -> State:
    """A request that waits for blocks or moves gives back its place at its target."""
    rank, prompt = get(state.target, request), get(state.prompt, request).astype(jnp.int64)
    moving = get(state.stage, request) == MOVING
    return state.replace(
        assigned=add(state.assigned, -1, rank),
        pending_tokens=add(state.pending_tokens, -prompt, rank),
        reserved=add(state.reserved, jnp.where(moving, -queries.blocks_for(c, prompt), 0), rank),
    )


def keep_sent(c: Cluster, state: State, request: Array) -> State:
    """A request that runs on a stopped engine has sent what its steps committed; its slot is stale."""
    rank = get(state.target, request)
    mine = get(state.slot_request, rank) == request
    slot = jnp.argmax(mine).astype(jnp.int32)

    def note(state: State) -> State:
        stayed = get(state.steps, rank // c.shape.ranks) - get(state.slot_join, rank, slot)
        sent = (stayed * get(state.slot_growth, rank, slot)) // 256
        emitted = get(state.emitted, request) + sent.astype(jnp.int32)
        state = decode.log_stay(c, state, rank, slot, emitted)
        return state.replace(
            emitted=put(state.emitted, emitted, request),
            steps_done=add(state.steps_done, stayed.astype(jnp.int32), request),
        )

    return when(jnp.any(mine), note, state, c.zero)


def empty_engine(c: Cluster, state: State, engine: Array) -> State:
    """Nobody is placed, assigned or running on `engine`; quota is back."""
    nobody, ranks = c.shape.requests, c.shape.ranks

    def rows(array: Array, value: Any) -> Array:
        shape = (c.shape.engines, ranks, *array.shape[1:])
        row = jnp.full(shape[1:], value, array.dtype)
        return put(array.reshape(shape), row, engine).reshape(array.shape)

    fills = {
        "rank_quota": 0, "fifo_head": nobody, "fifo_tail": nobody, "batch_requests": 0,
        "batch_cut": 0, "in_prefill": 0, "wait_head": nobody, "wait_tail": nobody,
        "join_head": nobody, "join_tail": nobody, "assigned": 0, "pending_tokens": 0,
        "reserved": 0, "rows": 0, "kv": 0, "growth": 0, "next_finish": NEVER,
        "slot_request": nobody, "slot_finish": NEVER, "slot_join": 0, "slot_growth": 0,
        "slot_prompt": 0,
    }  # fmt: skip
    state = state.replace(**{name: rows(getattr(state, name), v) for name, v in fills.items()})
    names = ("quota_used", "prompts", "prompt_tokens", "reading_tokens")
    return state.replace(**{name: put(getattr(state, name), 0, engine) for name in names})


def admit_everywhere(c: Cluster, state: State) -> State:
    """At every rank, ascending, heads of those who wait for blocks start if they fit."""
    if not c.shape.kv_limited:
        return state
    return fori_loop(
        c.shape.all_ranks,
        lambda r, s: handoff.admit_waiting(c, s, r, inside_run=True),
        state,
        c.zero,
    )


def _redirect_first(carry: tuple[State, Array]) -> tuple[State, Array]:
    state, redirected = carry
    request = jnp.argmax(redirected).astype(jnp.int32)
    state = move(handoff.push_orphan(state, request), request, ORPHAN)
    return state, put(redirected, False, request)
