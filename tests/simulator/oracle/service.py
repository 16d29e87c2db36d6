"""The whole service, one event at a time, in the order of section 1; conservation of section 9."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer_jax.simulator.cluster import ClusterConfig, Status
from tests.simulator.oracle import dynamics, formation, handoff, prefill, retention, routing
from tests.simulator.oracle.clock import (
    DEPARTURE,
    DYNAMICS,
    FETCH,
    FORMATION,
    GRACE_END,
    HAND_OFF,
    INCIDENT,
    MATCH_END,
    ROUND,
    ROUTE,
    SCALING_ROUND,
    START,
    STEP_END,
    SWEEP,
    TRANSFER_END,
    WRITE_BACK,
)
from tests.simulator.oracle.world import LIVES, STAGES, World


@dataclasses.dataclass
class Result:
    """Per request (ticks, -1 where it did not happen), per engine, and totals.

    A repeated stage shows its latest time, `first_token` its first, `prefill_start` the first
    chunk of the latest pass. Ranks are numbered within their engine.
    """

    arrival: list[int]
    matched: list[int]
    pulled: list[int]
    fetched: list[int]
    prefill_start: list[int]
    first_token: list[int]
    handed_off: list[int]
    decode_start: list[int]
    finish: list[int]
    status: list[int]
    block_hit_tokens: list[int]
    compute_hit_tokens: list[int]
    prefill_engine: list[int]
    prefill_rank: list[int]
    decode_engine: list[int]
    decode_rank: list[int]
    preemptions: list[int]
    emitted: list[int]
    tokens: list[list[int]]
    prefill_steps: list[int]
    decode_steps: list[int]
    mixed_steps: list[int]
    busy: list[int]
    fetched_bytes: int
    swa_bytes: int
    handoff_bytes: int
    blocks_published: int
    blocks_evicted: int
    blocks_present: int
    anchors: int
    crashes: list[int]
    lives: list[list[int]]  # ticks off, starting, serving, leaving
    blocks_lost: int
    forwards: int
    unreadable_blocks: int
    unreadable_matches: int
    scalings: list[tuple[int, ...]]
    storage_reads: int
    storage_bytes: int
    storage_ticks: int
    nodes_busy: list[int]
    sweeps: int
    expired: int
    reclaimed: int
    held_at_sweeps: int
    events: list[tuple[int, int, str, int, int]]


def run(cluster: ClusterConfig, workload: Any) -> Result:
    """Simulate `workload` on `cluster` to the end.

    Raises:
      ValueError: the requests are not in the order of arrival.
    """
    world = World(cluster, workload)
    arrivals = [r.arrival for r in world.requests if r.parent < 0]
    if arrivals != sorted(arrivals):
        raise ValueError("arrival is not ascending; requests are numbered by arrival: sort them")
    warm(world)
    routing.deal_tiers(world)
    dynamics.schedule(world)
    retention.schedule(world)
    for request in world.requests:
        if request.parent >= 0:
            continue
        at = request.arrival + cluster.match_ticks
        world.agenda.add(at, MATCH_END, (request.index,), request)
    while (event := next_event(world)) is not None:
        world.now = event[0]
        process(world, *event[1:])
    for engine in world.engines:
        engine.enter(engine.life, world.now)
    for request in world.requests:
        if request.status is None:
            world.end(request, Status.STUCK)
    check_conservation(world)
    return result(world)


def warm(world: World) -> None:
    """Section 4: prompts published, and anchored, before time zero."""
    cluster = world.cluster
    cache = world.cache_of(cluster.warm_engine)
    for index in cluster.warm_requests if cache is not None else ():
        request = world.requests[index]
        blocks = world.capped_blocks(request.input_tokens)
        segment = world.trie.ending_at(request.match_node, blocks)
        assert cache is not None
        retention.use(world, cache, request.publish_node, request)
        cache.publish(request.publish_node)
        if cluster.swa and segment is not None:
            cache.write_anchor(segment, cluster.warm_engine, 0)


def next_event(world: World) -> tuple[int, int, tuple[int, ...], Any] | None:
    """The first of everything pending by (time, phase, index); None at the end."""
    pending: list[tuple[Any, ...]] = []
    if world.ended():
        world.agenda.remove(lambda phase, index, what: phase in (DYNAMICS, ROUND))
    heap = world.agenda.heap
    rounds = any(event[1] == ROUND and event[4] != SWEEP for event in heap)
    if not world.nothing_to_come():
        world.lonely_rounds = 0
    if world.route:
        pending.append((world.now, ROUTE, (), None))
    for engine in world.engines:
        if engine.dirty and engine.step is None:
            pending.append((world.now, FORMATION, (engine.index,), engine))
        if dynamics.ready(world, engine) and not world.ended():
            pending.append((world.now, DYNAMICS, (DEPARTURE, engine.index), engine))
    if pending or not world.nothing_to_come() or (rounds and world.lonely_rounds < 2):
        pending += [(*entry[:3], None) for entry in heap[:1]]
    if not pending:
        return None
    first = min(pending, key=lambda event: event[:3])
    if first[3] is None and first[1] != ROUTE:
        return world.agenda.pop()
    return first  # type: ignore[return-value]


def process(world: World, phase: int, index: tuple[int, ...], what: Any) -> None:
    """One event."""
    if phase == STEP_END:
        formation.end_step(world, what)
    elif phase == TRANSFER_END:
        ended = {
            FETCH: routing.fetched,
            HAND_OFF: handoff.handed_off,
            WRITE_BACK: prefill.written_back,
        }
        ended[index[1]](world, what)
    elif phase == DYNAMICS:
        happens = {
            START: dynamics.start,
            GRACE_END: dynamics.end_grace,
            INCIDENT: dynamics.incident,
            DEPARTURE: dynamics.depart,
        }
        happens[index[0]](world, what)
    elif phase == ROUND:
        rounds = {SCALING_ROUND: dynamics.scaling_round, SWEEP: retention.sweep}
        rounds.get(index[0], routing.tier_round)(world)
    elif phase == MATCH_END:
        routing.match(world, what)
    elif phase == ROUTE:
        routing.route_one(world)
    else:
        formation.form(world, what)


def check_conservation(world: World) -> None:
    """Section 9; with a STUCK request, what it holds is not back."""
    lost = world.counters["lost"]
    for cache in world.caches:
        gone = cache.evicted + lost + world.counters["expired"] + world.counters["reclaimed"]
        assert world.caches[1:] or cache.published == cache.used() + gone
    for kind in ("fetch", "swa", "handoff"):
        name = {"fetch": "fetched_bytes", "swa": "swa_bytes", "handoff": "handoff_bytes"}[kind]
        by_link = sum(e.bytes[kind] for e in world.engines)
        assert by_link == sum(getattr(r, name) for r in world.requests)
    for request in world.requests:
        assert len(request.tokens) == request.emitted
        if request.status == Status.COMPLETED:
            assert request.emitted == request.output_tokens
    if any(r.status == Status.STUCK for r in world.requests):
        return
    for cache in world.caches:
        assert not any(cache.pins)
    assert not any(world.fifos)
    for engine in world.engines:
        assert engine.quota == 0 and not engine.placed and engine.step is None
        for rank in engine.ranks:
            assert rank.quota == 0 and not rank.reservations
            queues = (rank.fifo, rank.waiting, rank.joins)
            lists = (rank.admitted, rank.running, rank.assigned)
            assert not any(queues) and not any(lists)


def result(world: World) -> Result:
    """Collect what happened."""
    requests, engines, caches = world.requests, world.engines, world.caches
    return Result(
        arrival=[r.arrival for r in requests],
        **{stage: [r.at[stage] for r in requests] for stage in STAGES},
        status=[int(r.status) for r in requests if r.status is not None],
        block_hit_tokens=[r.block_hit for r in requests],
        compute_hit_tokens=[r.hit for r in requests],
        prefill_engine=[r.engine for r in requests],
        prefill_rank=[r.rank for r in requests],
        decode_engine=[r.decode_engine for r in requests],
        decode_rank=[r.decode_rank for r in requests],
        preemptions=[r.preemptions for r in requests],
        emitted=[r.emitted for r in requests],
        tokens=[r.tokens for r in requests],
        prefill_steps=[e.counts["prefill"] for e in engines],
        decode_steps=[e.counts["decode"] for e in engines],
        mixed_steps=[e.counts["mixed"] for e in engines],
        busy=[e.busy for e in engines],
        fetched_bytes=sum(r.fetched_bytes for r in requests),
        swa_bytes=sum(r.swa_bytes for r in requests),
        handoff_bytes=sum(r.handoff_bytes for r in requests),
        blocks_published=sum(c.published for c in caches),
        blocks_evicted=sum(c.evicted for c in caches),
        blocks_present=sum(c.used() for c in caches),
        anchors=sum(c.anchors_written for c in caches),
        crashes=[r.crashes for r in requests],
        lives=[[e.lives[life] for life in LIVES] for e in engines],
        blocks_lost=world.counters["lost"],
        forwards=world.counters["forwards"],
        unreadable_blocks=world.counters["unreadable"],
        unreadable_matches=world.counters["cut"],
        scalings=world.scalings,
        storage_reads=world.storage_reads,
        storage_bytes=world.storage_bytes,
        storage_ticks=world.storage_ticks,
        nodes_busy=world.nodes_busy if world.cluster.storage_reads else [],
        sweeps=world.sweeps,
        expired=world.counters["expired"],
        reclaimed=world.counters["reclaimed"],
        held_at_sweeps=world.held_at_sweeps,
        events=world.events,
    )
