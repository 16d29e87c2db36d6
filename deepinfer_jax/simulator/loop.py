"""The event loop: picks what is next by (time, phase, index) and does it, until nothing is left."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.simulator import (
    autoscale,
    cache,
    departure,
    formation,
    handoff,
    incidents,
    life,
    orphans,
    placement,
    prompts,
    retention,
    tiers,
)
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import get, heap_pop
from deepinfer_jax.simulator.events import FETCH, HANDOFF, PHASE_BIT, WRITE_BACK, kind_and_request
from deepinfer_jax.simulator.inplace import either, fori_loop, when, while_loop
from deepinfer_jax.simulator.scenario import Scenario, Shape
from deepinfer_jax.simulator.state import IDLE, State, initial_state
from deepinfer_jax.simulator.workload import Workload

Array = Any

STEP_END, TRANSFER, ROUND, MATCH, PLACE, FORM, NOTHING = range(7)
START, GRACE, INCIDENT, LEAVE, SCALE, TURN, ADOPT, SWEEP = range(7, 15)


def run(shape: Shape, scenario: Scenario, workload: Workload) -> State:
    """The final state of one scenario. Pure; trace it under `jit` with 64-bit types enabled."""
    scenario, workload = jax.tree.map(jnp.asarray, (scenario, workload))
    c = Cluster(shape, scenario, workload)
    state = _warm(c, initial_state(shape, scenario, workload.after))
    return while_loop(lambda s: _next(c, s)[0] != NOTHING, lambda s: _step(c, s), state, c.zero)


def _warm(c: Cluster, state: State) -> State:
    """Prompts whose blocks are in the cache before time zero."""
    if not c.shape.warm:
        return state
    store = jnp.int32(0)
    engine = c.scenario.warm_engine.astype(jnp.int32)
    if c.shape.cache_scope == "local":
        store = engine

    def visit(k: Array, state: State) -> State:
        request = get(c.scenario.warm_requests, k)
        if c.shape.swa:
            leaf = get(c.workload.match_node, request)
            state = cache.write_anchor(c, state, store, leaf, engine)
        leaf = get(c.workload.publish_node, request)
        return retention.publish(c, state, store, leaf, request)

    return fori_loop(c.shape.warm, visit, state, c.zero)


def _next(c: Cluster, state: State) -> tuple[Array, Array, Array, Array]:
    """(kind, time, index, from_heap) of the next thing to do."""
    step_end = jnp.min(state.step_end)
    heap_any = state.heap_size > 0
    heap_time = jnp.where(heap_any, state.heap_time[0], NEVER)
    code = state.heap_code[0]
    rematch = (code >> PHASE_BIT) > 0
    arriving = state.arrivals < c.shape.requests
    pointer = jnp.minimum(state.arrivals, c.shape.requests - 1)
    match_time = get(c.workload.arrival, pointer) + c.scenario.match_ticks
    match_time = jnp.where(arriving, match_time, NEVER)
    _, heap_request = kind_and_request(code)

    time = jnp.minimum(jnp.minimum(step_end, heap_time), match_time)
    to_form = state.dirty & (state.step_kind == IDLE)
    forming = jnp.any(to_form)
    now_busy = state.place_pending | forming
    if c.shape.departures:
        leaving = departure.ready(c, state) & (state.ended < c.shape.requests)
        now_busy = now_busy | jnp.any(leaving)
    round_time = jnp.asarray(NEVER, time.dtype)
    if c.shape.dynamics:
        time, others = _dynamic_times(c, state, time, now_busy)
        round_time = others[ROUND]
    elif c.shape.tiers > 1:
        unended = state.ended < c.shape.requests
        alive = (time < NEVER) | (state.idle_rounds < 2)
        round_time = jnp.where(alive & unended, state.next_round, NEVER)
        time = jnp.minimum(time, round_time)
    sweep_time = jnp.asarray(NEVER, time.dtype)
    if c.shape.retention:
        unended = state.ended < c.shape.requests
        happens = unended & ((time < NEVER) | now_busy)
        sweep_time = jnp.where(happens, state.next_sweep, NEVER)
        time = jnp.minimum(time, sweep_time)

    late = now_busy & (time > state.now)
    heap_first = (heap_time == time) & ~rematch
    from_heap = (heap_time == time) & (
        ~rematch | (match_time > time) | (heap_request < state.arrivals)
    )
    kind = jnp.where(
        late,
        jnp.where(state.place_pending, PLACE, FORM),
        jnp.where(
            step_end == time,
            STEP_END,
            jnp.where(heap_first, TRANSFER, jnp.where(round_time == time, ROUND, MATCH)),
        ),
    )
    if c.shape.retention:
        kind = jnp.where((kind == MATCH) & (sweep_time == time), SWEEP, kind)
    if c.shape.dynamics:
        # What happens at this time before matches and tier rounds, the first in the order last.
        early = (kind == ROUND) | (kind == MATCH)
        if c.shape.retention:
            early = early | (kind == SWEEP)
        for other in (SCALE, INCIDENT, GRACE, START):
            kind = jnp.where(early & (others[other] == time), other, kind)
        if c.shape.departures:
            first = late | early & (kind != START) & (kind != GRACE) & (kind != INCIDENT)
            kind = jnp.where(jnp.any(leaving) & first, LEAVE, kind)
    kind = jnp.where(~now_busy & (time >= NEVER), NOTHING, kind)
    if c.shape.dynamics:
        # What an event began is finished before anything else.
        adopting, turning = state.adopt_left > 0, jnp.any(state.turn > 0)
        kind = jnp.where(turning, TURN, jnp.where(adopting, ADOPT, kind))
        late = late | turning | adopting
    index = jnp.where(
        kind == STEP_END,
        jnp.argmin(state.step_end),
        jnp.where(
            kind == FORM,
            jnp.argmax(to_form),
            jnp.where(from_heap, heap_request, state.arrivals),
        ),
    )
    if c.shape.dynamics:
        index = jnp.where(kind == START, jnp.argmin(state.start_at), index)
        index = jnp.where(kind == GRACE, jnp.argmin(state.grace_at), index)
        index = jnp.where(kind == TURN, jnp.argmax(state.turn > 0), index)
    if c.shape.departures:
        index = jnp.where(kind == LEAVE, jnp.argmax(leaving), index)
    return kind, jnp.where(late, state.now, time), index.astype(jnp.int32), from_heap


def _dynamic_times(
    c: Cluster, state: State, time: Array, now_busy: Array
) -> tuple[Array, dict[int, Array]]:
    """(time of the next event of a phase, time of the next of each kind of phases 2 and 3)."""
    unended = state.ended < c.shape.requests
    never = jnp.asarray(NEVER, time.dtype)
    others = {
        START: jnp.where(unended, jnp.min(state.start_at), NEVER),
        GRACE: jnp.where(unended, jnp.min(state.grace_at), NEVER),
    }
    time = jnp.minimum(time, jnp.minimum(others[START], others[GRACE]))
    pending = (time < NEVER) | now_busy
    turning = unended & (pending | (state.idle_rounds < 2))
    others[ROUND] = jnp.where(turning, state.next_round, NEVER) if c.shape.tiers > 1 else never
    others[SCALE] = jnp.where(turning, state.next_scale, NEVER) if c.shape.scaling else never
    time = jnp.minimum(time, jnp.minimum(others[ROUND], others[SCALE]))
    others[INCIDENT] = never
    if c.shape.incidents:
        following = get(c.dynamics.incident_time, state.next_incident)
        others[INCIDENT] = jnp.where(unended & ((time < NEVER) | now_busy), following, NEVER)
        time = jnp.minimum(time, others[INCIDENT])
    return time, others


def _step(c: Cluster, state: State) -> State:
    kind, time, index, from_heap = _next(c, state)
    state = state.replace(now=time)
    if c.shape.rounds:
        if c.shape.dynamics:
            turning = (kind == ROUND) | (kind == SCALE)
            quiet = (kind == PLACE) | (kind == FORM) | (kind == LEAVE) | (kind == INCIDENT)
            if c.shape.retention:
                quiet = quiet | (kind == SWEEP)
            resting = (quiet | turning) & ~_underway(c, state)
            # A round adds one; with something underway it shall leave 0.
            before = jnp.where(resting, state.idle_rounds, jnp.where(turning, -1, 0))
            inside = (kind == TURN) | (kind == ADOPT)
            before = jnp.where(inside, state.idle_rounds, before)
        else:
            resting = (kind == ROUND) & ~_underway(c, state)
            if c.shape.retention:
                resting = resting | (kind == SWEEP)
            before = jnp.where(resting, state.idle_rounds, 0)
        state = state.replace(idle_rounds=before)
    handlers = {
        STEP_END: lambda s: formation.end_step(c, s, index),
        TRANSFER: lambda s: _transfer(c, s),
        ROUND: lambda s: tiers.tier_round(c, s),
        MATCH: lambda s: _match(c, s, index, from_heap),
        PLACE: lambda s: placement.place(c, s),
        FORM: lambda s: formation.form(c, s, index),
    }
    if c.shape.tiers == 1:
        del handlers[ROUND]
    if c.shape.dynamics:
        handlers[START] = lambda s: life.start(c, s, index)
        handlers[TURN] = lambda s: life.turn(c, s, index)
        if c.shape.completion:
            handlers[ADOPT] = lambda s: orphans.adopt(c, s)
    if c.shape.incidents:
        handlers[INCIDENT] = lambda s: incidents.incident(c, s)
    if c.shape.departures:
        handlers[GRACE] = lambda s: departure.end_grace(s, index)
        handlers[LEAVE] = lambda s: departure.depart(c, s, index)
    if c.shape.retention:
        handlers[SWEEP] = lambda s: retention.sweep(c, s)
    if c.shape.scaling:
        handlers[SCALE] = lambda s: autoscale.scaling_round(c, s)
    if not (c.shape.fetches or c.shape.completion or c.shape.write_back):
        del handlers[TRANSFER]
    for wanted, handler in handlers.items():
        state = when(kind == wanted, handler, state, c.zero)
    return state


def _underway(c: Cluster, state: State) -> Array:
    """Whether a step, a transfer or a match is still to come."""
    stepping = jnp.any(state.step_end < NEVER)
    if c.shape.dynamics:
        stepping = stepping | jnp.any(state.start_at < NEVER) | jnp.any(state.grace_at < NEVER)
    return stepping | (state.heap_size > 0) | (state.arrivals < c.shape.requests)


def _pop(c: Cluster, state: State) -> State:
    times, codes, size = heap_pop(state.heap_time, state.heap_code, state.heap_size, c.zero)
    return state.replace(heap_time=times, heap_code=codes, heap_size=size)


def _arrive(c: Cluster, state: State) -> State:
    """Goes on to the next request that arrives by the clock."""
    following = state.arrivals + 1
    if c.workload.after is not None:
        following = get(c.workload.after.next_open, following)
    return state.replace(arrivals=following)


def _match(c: Cluster, state: State, request: Array, from_heap: Array) -> State:
    if not c.shape.rematches:
        return placement.match(c, _arrive(c, state), request)
    arrive = lambda s: _arrive(c, s)  # noqa: E731
    state = either(from_heap, lambda s: _pop(c, s), arrive, state, c.zero)
    return placement.match(c, state, request)


def _transfer(c: Cluster, state: State) -> State:
    kind, request = kind_and_request(state.heap_code[0])
    state = _pop(c, state)
    if c.shape.fetches:
        state = when(kind == FETCH, lambda s: placement.end_fetch(c, s, request), state, c.zero)
    if c.shape.completion:
        state = when(kind == HANDOFF, lambda s: handoff.end_handoff(c, s, request), state, c.zero)
    if c.shape.write_back:
        state = when(
            kind == WRITE_BACK, lambda s: prompts.end_write_back(c, s, request), state, c.zero
        )
    return state
