"""Section 2: requests, ranks, engines, and the world that holds them all."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode, Status
from tests.simulator.oracle.cache import ROOT, Cache, Trie
from tests.simulator.oracle.clock import (
    DYNAMICS,
    INCIDENT,
    MATCH_END,
    ROUND,
    Agenda,
    Clock,
    ceil_divide,
)

UNITS = 256
"""Held tokens are kept in 1/256."""

STAGES = (
    "matched",
    "pulled",
    "fetched",
    "prefill_start",
    "first_token",
    "handed_off",
    "decode_start",
    "finish",
)


@dataclasses.dataclass(eq=False)
class Request:
    """One request: what the trace says, then what happened so far."""

    index: int
    arrival: int
    input_tokens: int
    output_tokens: int
    match_node: int
    publish_node: int
    output_node: int
    parent: int = -1
    delay: int = 0
    traffic: int = 0
    status: Status | None = None
    emitted: int = 0
    matches: int = 0
    prompt: int = 0  # P, what must be (or was) prefilled
    hit: int = 0  # H
    block_hit: int = 0  # L1
    cost: int = 0
    remaining: int = 0  # r of section 6
    context: int = 0  # c of section 6
    pinned: int = ROOT
    fetching: bool = False
    chunked: bool = False  # this pass has started
    engine: int = -1  # of the prefill
    rank: int = -1
    decode_engine: int = -1
    decode_rank: int = -1
    preemptions: int = 0
    crashes: int = 0
    source: int = -1  # engine that holds its KV between prefill and landing
    life: int = 0  # decode steps in all
    steps: int = 0  # s, decode steps since it joined
    needed: int = 0  # n
    growth: int = 0  # g, 1/256 tokens per step
    fetched_bytes: int = 0
    swa_bytes: int = 0
    handoff_bytes: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)  # when each was sent
    stay: list[int] = dataclasses.field(default_factory=list)  # when each step of it ended
    at: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(STAGES, -1))


LIVES = ("off", "starting", "serving", "leaving")


class Rank:
    """One DP rank."""

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.quota = 0
        self.fifo: deque[Request] = deque()  # prompts
        self.admitted: list[Request] = []  # NORMAL, MIXED: in prefill, slot and blocks held
        self.waiting: deque[Request] = deque()  # for blocks
        self.joins: deque[Request] = deque()  # handed off, for a slot
        self.running: list[Request] = []
        self.alive = True
        self.healthy_at = 0
        self.assigned: list[Request] = []  # COMPLETION: in transfer, waiting or running
        self.reservations: dict[int, int] = {}  # request -> blocks


@dataclasses.dataclass
class Step:
    """A step in progress; chunks and rows per rank."""

    kind: str
    start: int
    chunks: list[list[tuple[Request, int]]]
    rows: list[list[Request]]


class Engine:
    """One engine: its clock is the end of its step while it is in one."""

    def __init__(self, index: int, mode: Mode, ranks: int) -> None:
        self.index = index
        self.mode = mode
        self.ranks = [Rank(self, j) for j in range(ranks)]
        self.clock = Clock()
        self.idle = True
        self.dirty = False
        self.step: Step | None = None
        self.tier = 0
        self.quota = 0
        self.placed: list[Request] = []  # prompts whose prefill has not ended
        self.fetch_free = 0
        self.handoff_free = 0
        self.decode_steps = 0  # NORMAL: d
        self.life = "serving"
        self.since = 0
        self.lives = dict.fromkeys(LIVES, 0)
        self.grace_over = False
        self.starts_at = FOREVER
        self.counts = {"prefill": 0, "decode": 0, "mixed": 0}
        self.busy = 0
        self.bytes = {"fetch": 0, "swa": 0, "handoff": 0}

    @property
    def takes_prompts(self) -> bool:
        return self.mode != Mode.COMPLETION and self.life == "serving"

    def enter(self, life: str, now: int) -> None:
        """Section 11: another life begins."""
        self.lives[self.life] += now - self.since
        self.life, self.since = life, now


class World:
    """Everything that exists, and the one agenda."""

    def __init__(self, cluster: ClusterConfig, workload: Any) -> None:
        self.cluster = cluster
        self.now = 0
        self.agenda = Agenda()
        self.events: list[tuple[int, int, str, int, int]] = []
        self.requests = [
            Request(i, *(int(getattr(workload, name)[i]) for name in TRACE_FIELDS))
            for i in range(len(workload.arrival))
        ]
        after = workload.after
        for r in self.requests if after is not None else ():
            r.parent, r.delay = int(after.parent[r.index]), int(after.delay[r.index])
        for r in self.requests if workload.traffic is not None else ():
            r.traffic = int(workload.traffic[r.index])
        for r in self.requests:
            if r.parent >= 0:
                r.arrival = -1  # until the parent ends
        self.engines = [Engine(m, mode, cluster.ranks) for m, mode in enumerate(cluster.modes)]
        self.trie = Trie(workload)
        caches = {"none": 0, "shared": 1, "local": len(self.engines)}[cluster.cache_scope]
        self.caches = [
            Cache(self.trie, cluster.cache_blocks, cluster.swa_ttl_ticks) for _ in range(caches)
        ]
        self.route = False  # phase 5 is wanted
        self.fifos: list[deque[Request]] = [deque() for _ in range(cluster.tiers)]
        self.demand = [0] * cluster.tiers
        self.targets = [0] * cluster.tiers
        self.lonely_rounds = 0  # tier rounds in a row that found nothing else pending
        self.placements = 0
        self.orphans: deque[Request] = deque()
        self.demand_tokens = 0
        self.nodes_up_at = [0] * cluster.storage_nodes
        self.nodes_free = [0] * cluster.storage_nodes
        self.nodes_busy = [0] * cluster.storage_nodes
        self.storage_bytes = self.storage_reads = self.storage_ticks = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.sweeps = self.held_at_sweeps = 0
        self.scalings: list[tuple[int, ...]] = []
        for m, serves in enumerate(cluster.serving_at_first):
            self.engines[m].life = "serving" if serves else "off"
        self.handoffs = 0

    def ended(self) -> bool:
        """Whether every request has."""
        return all(request.status is not None for request in self.requests)

    def nothing_to_come(self) -> bool:
        """Whether only rounds, sweeps and incidents are on the agenda."""
        return all(
            phase == ROUND or (phase == DYNAMICS and index[0] == INCIDENT)
            for _, phase, index, _, _ in self.agenda.heap
        )

    def log(self, phase: int, kind: str, engine: int = -1, request: int = -1) -> None:
        """For debugging only."""
        self.events.append((self.now, phase, kind, engine, request))

    def cache_of(self, engine: int) -> Cache | None:
        """The cache that an engine reads and writes."""
        if not self.caches:
            return None
        return self.caches[0] if self.cluster.cache_scope == "shared" else self.caches[engine]

    def capped_blocks(self, tokens: int) -> int:
        """Full blocks before the reserve."""
        return max(0, tokens - self.cluster.reserve) // self.cluster.block_tokens

    def admission_blocks(self, request: Request) -> int:
        """What a request reserves before it runs."""
        tokens = request.prompt + 1 + self.cluster.nextn
        return ceil_divide(tokens, self.cluster.block_tokens)

    def unprocessed(self, engine: Engine) -> int:
        """1 if the engine's rows reached a boundary by now whose step end is not processed yet."""
        step = engine.step
        return int(step is not None and any(step.rows) and engine.clock.tick <= self.now)

    def held(self, rank: Rank) -> int:
        """1/256 tokens of the running requests at the last boundary at or before now."""
        extra = self.unprocessed(rank.engine)
        return sum(UNITS * r.prompt + (r.steps + extra) * r.growth for r in rank.running)

    def used_blocks(self, rank: Rank) -> int:
        """Reservations and needs of the running at the last boundary at or before now."""
        extra = self.unprocessed(rank.engine)
        needs = 0
        for r in rank.running:
            sent = (r.steps + extra) * r.growth // UNITS
            needs += ceil_divide(
                r.prompt + sent + 1 + self.cluster.nextn, self.cluster.block_tokens
            )
        return sum(rank.reservations.values()) + needs

    def fits(self, rank: Rank, blocks: int) -> bool:
        """Whether that many more blocks fit now."""
        limit = self.cluster.kv_blocks
        return limit is None or limit - self.used_blocks(rank) >= blocks

    def start_step(
        self,
        engine: Engine,
        kind: str,
        subs: int,
        chunks: list[list[tuple[Request, int]]],
        rows: list[list[Request]],
    ) -> None:
        """Section 1: from (now, 0) when idle, else from the boundary with its remainder."""
        if engine.idle:
            engine.clock.restart(self.now)
            engine.idle = False
        assert engine.clock.tick == self.now
        engine.step = Step(kind, self.now, chunks, rows)
        engine.clock.advance(subs)
        self.agenda.add(engine.clock.tick, 0, (engine.index,), engine)
        for request in (r for batch in chunks for r, _ in batch):
            if not request.chunked:
                request.chunked = True
                request.at["prefill_start"] = self.now

    def end(self, request: Request, status: Status) -> None:
        """Section 9: once per request; section 12: children arrive."""
        assert request.status is None
        request.status = status
        if status == Status.STUCK:
            return
        for child in self.requests:
            if child.parent == request.index:
                child.arrival = self.now + child.delay
                at = child.arrival + self.cluster.match_ticks
                self.agenda.add(at, MATCH_END, (child.index,), child)


COUNTERS = ("lost", "forwards", "unreadable", "cut", "expired", "reclaimed")
TRACE_FIELDS = (
    "arrival",
    "input_tokens",
    "output_tokens",
    "match_node",
    "publish_node",
    "output_node",
)
