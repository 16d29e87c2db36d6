"""The simulator's whole state: one flat frozen pytree, updated element by element inside the event loop.

Letters: `Q` requests, `M` engines, `J` ranks per engine, `R = M * J` ranks in all, `S` slots per rank,
`T` tiers, `C` caches, `N` prefix segments, `H` heap entries. Times are ticks, -1 where nothing happened yet.
Index Q (one past the last request) is "nobody" and segment 0 is the empty prefix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.containers import put
from deepinfer_jax.simulator.scenario import SERIES_BINS, Scenario, Shape
from deepinfer_jax.simulator.sessions import Dependencies
from deepinfer_jax.timeline import EVENTS

IDLE, PREFILL, DECODE, MIXED_STEP = 0, 1, 2, 3
"""What an engine's current step is. A MIXED step holds decode rows and chunks."""

OFF, STARTING, SERVING, LEAVING = 0, 1, 2, 3
"""The life of an engine (`SEMANTICS.md` 11)."""

AWAY, FETCHING, PLACED, WAITING, MOVING, LANDED, ORPHAN, GOING, GROUPED = range(9)
"""Where a request is: at no engine, its prefix on the way, its prompt placed, waiting for blocks of its
target, in transfer there, landed or running there, without a target,
without one while its engine departs, about to move with others."""

SCALE_ROUNDS = 4096
"""Scaling rounds that are recorded; further ones happen without a record."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Carry of the event loop."""

    now: Any
    arrivals: Any  # the next request that arrives by the clock; those before it were matched
    ended: Any  # requests completed or rejected
    placements: Any
    handoffs: Any
    place_pending: Any  # bool: phase 5 has work
    next_round: Any  # tick of the next tier round
    idle_rounds: Any  # tier rounds in a row that found nothing else pending
    block_tokens: Any
    bin_ticks: Any  # width of a bin of `series`

    # Requests [Q + 1]
    following: Any  # link of the FIFO lanes
    emitted: Any  # tokens sent
    prompt: Any  # P: tokens the current prefill pass must cover
    context: Any  # c: tokens of P that need no computing any more
    hit_blocks: Any  # L1 / B
    hit_compute: Any  # H
    hit_node: Any  # deepest matched segment (pinned in the shared scope until the fetch ends)
    anchored: Any  # bool: H rests on a live anchor
    engine: Any  # engine of the prefill
    rank: Any  # its global rank
    target: Any  # global rank of the decode
    admitted: Any  # bool: in prefill with a reserved slot (NORMAL, MIXED)
    steps_done: Any  # decode steps of earlier stays in a slot
    preemptions: Any
    status: Any
    matched: Any
    pulled: Any
    fetched: Any
    prefill_start: Any
    first_token: Any
    handed_off: Any
    decode_start: Any
    finish: Any

    # Engines [M]
    step_kind: Any
    step_start: Any
    step_end: Any  # tick, NEVER when idle
    clock_tick: Any  # start of the step, exact; -1 when idle
    clock_remainder: Any
    end_remainder: Any
    run_first: Any  # subs of the first decode step of the run
    run_slope: Any  # subs each further step lasts longer
    run_steps: Any
    steps: Any  # decode steps so far (a MIXED step counts)
    since_prompt: Any  # NORMAL: decode steps since the last prompt step
    dirty: Any  # bool: wants a batch formation
    tier: Any
    quota_used: Any
    prompts: Any  # placed, prefill not ended
    prompt_tokens: Any
    reading_tokens: Any
    fetch_free: Any  # FIFO links: tick at which they are free
    handoff_free: Any
    busy: Any  # [M, 4] ticks by step kind
    step_count: Any  # [M, 4]
    series: Any  # [SERIES_BINS, M] busy ticks by the bin of the step's end

    # Ranks [R]
    rank_quota: Any
    fifo_head: Any  # prefill FIFO
    fifo_tail: Any
    batch_requests: Any  # of the step under way
    batch_cut: Any  # tokens of the last chunk if it does not finish its prompt, else 0
    in_prefill: Any  # admitted requests (NORMAL, MIXED)
    wait_head: Any  # waiting for blocks
    wait_tail: Any
    join_head: Any  # landed, waiting for a slot
    join_tail: Any
    assigned: Any
    pending_tokens: Any  # P of assigned requests that do not run yet
    reserved: Any  # blocks of assigned requests that do not run yet
    rows: Any
    kv: Any  # 1/256 tokens of the running
    growth: Any  # 1/256 tokens per step
    next_finish: Any  # engine step at which the first running request finishes

    # Slots [R, S]
    slot_request: Any
    slot_finish: Any  # engine step
    slot_join: Any
    slot_growth: Any
    slot_prompt: Any  # P

    # Tiers [T]
    tier_head: Any
    tier_tail: Any
    demand: Any  # predicted ticks matched in this round
    queued: Any  # predicted ticks of those in the FIFO
    target_engines: Any

    # Caches
    present: Any  # [C, N] leading blocks
    newer: Any  # [C, N] LRU ring towards the most recent; 0 is the ring's seam
    older: Any  # [C, N]
    pins: Any  # [N]
    used: Any  # [C]
    published: Any
    evicted: Any
    anchor_expiry: Any  # [C, N]
    anchor_host: Any  # [C, N]
    fetched_bytes: Any
    swa_fetched_bytes: Any
    handoff_bytes: Any

    # Timed events of requests [H]
    heap_time: Any
    heap_code: Any
    heap_size: Any

    arrival: Any = None  # [Q + 1] of requests that follow another; None without them

    # Records of token times; None without them
    run_log: Any = None  # [8 Q + 1024, 7] see `steps.log_run`
    runs: Any = None  # written so far, also those that no longer fitted
    stay_log: Any = None  # [4 Q + 1024, 6] see `decode.log_stay`
    stays: Any = None

    # Storage nodes (`SEMANTICS.md` 11, 15); None without them
    node_up_at: Any = None  # [storage nodes]
    unreadable_blocks: Any = None
    unreadable_matches: Any = None
    node_free: Any = None  # [storage nodes]
    node_busy: Any = None  # [storage nodes] ticks
    storage_bytes: Any = None
    storage_reads: Any = None
    storage_ticks: Any = None  # from placement to the end of the reads, summed

    # Retention (`SEMANTICS.md` 13); None without it
    last_use: Any = None  # [C, N]
    expiry: Any = None  # [C, N]
    traffic: Any = None  # [C, N] lowest class that used the segment
    next_sweep: Any = None
    sweeps: Any = None
    expired: Any = None  # blocks
    reclaimed: Any = None  # blocks
    held_at_sweeps: Any = None  # blocks of all caches after a sweep, summed over sweeps

    # Dynamics (`SEMANTICS.md` 11); None without them
    stage: Any = None  # [Q + 1]
    source: Any = None  # [Q + 1] engine that holds the KV between prefill and landing
    crashes: Any = None  # [Q + 1]
    life: Any = None  # [M]
    turn: Any = None  # [M] 1 + the life that begins before anything else happens, or 0
    life_since: Any = None  # [M]
    life_ticks: Any = None  # [M, 4]
    served: Any = None  # [SERIES_BINS, M] ticks SERVING or LEAVING
    start_at: Any = None  # [M] NEVER unless STARTING
    grace_at: Any = None  # [M] NEVER unless LEAVING with its grace to come
    grace_over: Any = None  # [M] bool
    held: Any = None  # [M] requests whose source it is
    healthy_at: Any = None  # [R]
    alive: Any = None  # [R] bool
    orphan_head: Any = None  # [1]
    orphan_tail: Any = None
    orphans: Any = None  # in that lane
    adopt_left: Any = None  # of them, how many choose before anything else happens
    next_incident: Any = None
    blocks_lost: Any = None
    forwards: Any = None  # requests that a departing engine forwarded
    next_scale: Any = None
    scale_demand: Any = None  # prompt tokens
    waiting_tokens: Any = None  # prompt tokens q in the tiers' FIFOs
    scale_log: Any = None  # [SCALE_ROUNDS, 7] now, then current, demand and wanted of each pool
    scale_rounds: Any = None

    def replace(self, **changes: Any) -> State:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def initial_state(shape: Shape, scenario: Scenario, after: Dependencies | None = None) -> State:
    """Everything empty and idle at time zero."""
    requests, engines, ranks = shape.requests + 1, shape.engines, shape.all_ranks
    time = jnp.int64 if shape.exact else jnp.float64
    caches, nodes = max(shape.caches, 1), shape.nodes
    # A preempted request may be under way again while its write-backs are pending.
    heap = requests * (8 if shape.write_back else 1) + 1

    def ints(*dims: int, fill: int = 0, dtype: Any = jnp.int32) -> Any:
        return jnp.full(dims, fill, dtype)

    def ticks(*dims: int, fill: int = 0) -> Any:
        return jnp.full(dims, fill, time)

    nobody, unset = shape.requests, -1
    lanes = {
        f"{lane}_{end}": ints(size, fill=nobody)
        for lane, size in (("fifo", ranks), ("wait", ranks), ("join", ranks), ("tier", shape.tiers))
        for end in ("head", "tail")
    }
    tiers = jnp.asarray(scenario.tier_engines)
    takers = jnp.asarray(scenario.modes) != 1
    if scenario.dynamics is not None:
        takers = takers & (jnp.asarray(scenario.dynamics.serving_at_first) != 0)
    # [M, T] membership instead of a scatter, which XLA:CPU cannot emit unfused.
    member = takers[:, None] & (tiers[:, None] == jnp.arange(shape.tiers))
    counts = jnp.sum(member, axis=0)
    return State(
        now=ticks(),
        arrivals=ints() if after is None else jnp.asarray(after.next_open)[0],
        arrival=None if after is None else ticks(requests, fill=unset),
        ended=ints(),
        placements=ints(dtype=jnp.int64),
        handoffs=ints(dtype=jnp.int64),
        place_pending=jnp.asarray(False),
        next_round=jnp.asarray(scenario.tier_round_ticks, time),
        block_tokens=jnp.asarray(scenario.block_tokens),
        bin_ticks=jnp.asarray(scenario.bin_ticks, time),
        following=ints(requests, fill=nobody),
        emitted=ints(requests),
        prompt=ints(requests),
        context=ints(requests),
        hit_blocks=ints(requests),
        hit_compute=ints(requests),
        hit_node=ints(requests),
        anchored=jnp.zeros(requests, bool),
        engine=ints(requests, fill=unset),
        rank=ints(requests, fill=unset),
        target=ints(requests, fill=unset),
        admitted=jnp.zeros(requests, bool),
        steps_done=ints(requests),
        preemptions=ints(requests),
        status=ints(requests, fill=unset),
        **{name: ticks(requests, fill=unset) for name in EVENTS[1:]},
        step_kind=ints(engines),
        step_start=ticks(engines),
        step_end=ticks(engines, fill=NEVER),
        clock_tick=ticks(engines, fill=unset),
        clock_remainder=ticks(engines),
        end_remainder=ticks(engines),
        run_first=ticks(engines, fill=1),
        run_slope=ticks(engines),
        run_steps=ints(engines, dtype=jnp.int64),
        steps=ints(engines, dtype=jnp.int64),
        since_prompt=ints(engines, dtype=jnp.int64),
        dirty=jnp.zeros(engines, bool),
        tier=tiers.astype(jnp.int32),
        quota_used=ticks(engines),
        prompts=ints(engines),
        prompt_tokens=ints(engines, dtype=jnp.int64),
        reading_tokens=ints(engines, dtype=jnp.int64),
        fetch_free=ticks(engines),
        handoff_free=ticks(engines),
        busy=ticks(engines, 4),
        step_count=ints(engines, 4, dtype=jnp.int64),
        series=ticks(SERIES_BINS, engines),
        rank_quota=ticks(ranks),
        **lanes,
        batch_requests=ints(ranks),
        batch_cut=ints(ranks),
        in_prefill=ints(ranks),
        assigned=ints(ranks),
        pending_tokens=ints(ranks, dtype=jnp.int64),
        reserved=ints(ranks, dtype=jnp.int64),
        rows=ints(ranks),
        kv=ints(ranks, dtype=jnp.int64),
        growth=ints(ranks, dtype=jnp.int64),
        next_finish=ints(ranks, fill=NEVER, dtype=jnp.int64),
        slot_request=ints(ranks, shape.slots, fill=nobody),
        slot_finish=ints(ranks, shape.slots, fill=NEVER, dtype=jnp.int64),
        slot_join=ints(ranks, shape.slots, dtype=jnp.int64),
        slot_growth=ints(ranks, shape.slots, dtype=jnp.int64),
        slot_prompt=ints(ranks, shape.slots, dtype=jnp.int64),
        demand=ticks(shape.tiers),
        queued=ticks(shape.tiers),
        idle_rounds=ints(),
        target_engines=counts,
        present=ints(caches, nodes),
        newer=ints(caches, nodes),
        older=ints(caches, nodes),
        pins=ints(nodes),
        used=ints(caches, dtype=jnp.int64),
        published=ints(dtype=jnp.int64),
        evicted=ints(dtype=jnp.int64),
        anchor_expiry=ticks(caches, nodes),
        anchor_host=ints(caches, nodes, fill=unset),
        fetched_bytes=ints(dtype=jnp.int64),
        swa_fetched_bytes=ints(dtype=jnp.int64),
        handoff_bytes=ints(dtype=jnp.int64),
        heap_time=ticks(heap),
        heap_code=ints(heap, dtype=jnp.int64),
        heap_size=ints(),
        **_token_records(shape),
        **_storage(shape),
        **_retention(shape, scenario),
        **_dynamics(shape, scenario),
    )


def _token_records(shape: Shape) -> dict[str, Any]:
    """Empty logs, a little longer than runs without a tight KV limit fill."""
    if not shape.token_log:
        return {}
    return {
        "run_log": jnp.zeros((8 * shape.requests + 1024, 7), jnp.int64),
        "runs": jnp.int32(0),
        "stay_log": jnp.zeros((4 * shape.requests + 1024, 6), jnp.int64),
        "stays": jnp.int32(0),
    }


def _storage(shape: Shape) -> dict[str, Any]:
    """All nodes are up and free."""
    if not (shape.storage_nodes or shape.dynamics):
        return {}
    time = jnp.int64 if shape.exact else jnp.float64
    fields = {
        "node_up_at": jnp.zeros(shape.storage_nodes, time),
        "unreadable_blocks": jnp.int64(0),
        "unreadable_matches": jnp.int64(0),
    }
    if shape.storage_reads:
        fields |= {
            "node_free": jnp.zeros(shape.storage_nodes, time),
            "node_busy": jnp.zeros(shape.storage_nodes, time),
            "storage_bytes": jnp.int64(0),
            "storage_reads": jnp.int64(0),
            "storage_ticks": jnp.zeros((), time),
        }
    return fields


def _retention(shape: Shape, scenario: Scenario) -> dict[str, Any]:
    """Nothing was used or swept yet."""
    if scenario.retention is None:
        return {}
    time = jnp.int64 if shape.exact else jnp.float64
    each = (max(shape.caches, 1), shape.nodes)
    counts = ("sweeps", "expired", "reclaimed", "held_at_sweeps")
    return {
        "last_use": jnp.zeros(each, time),
        "expiry": jnp.zeros(each, time),
        "traffic": jnp.zeros(each, jnp.int32),
        "next_sweep": jnp.asarray(scenario.retention.sweep_ticks, time),
        **{name: jnp.int64(0) for name in counts},
    }


def _dynamics(shape: Shape, scenario: Scenario) -> dict[str, Any]:
    """Engines serve or are off; all ranks are healthy; nothing has failed."""
    numbers = scenario.dynamics
    if numbers is None:
        return {}
    requests, engines, ranks = shape.requests + 1, shape.engines, shape.all_ranks
    time = jnp.int64 if shape.exact else jnp.float64
    serving = jnp.asarray(numbers.serving_at_first) != 0
    fields = {
        "stage": jnp.zeros(requests, jnp.int32),
        "source": jnp.full(requests, -1, jnp.int32),
        "crashes": jnp.zeros(requests, jnp.int32),
        "life": jnp.where(serving, SERVING, OFF).astype(jnp.int32),
        "life_since": jnp.zeros(engines, time),
        "life_ticks": jnp.zeros((engines, 4), time),
        "served": jnp.zeros((SERIES_BINS, engines), time),
        "start_at": jnp.full(engines, NEVER, time),
        "grace_at": jnp.full(engines, NEVER, time),
        "grace_over": jnp.zeros(engines, bool),
        "held": jnp.zeros(engines, jnp.int32),
        "healthy_at": jnp.zeros(ranks, time),
        "alive": jnp.ones(ranks, bool),
        "orphan_head": jnp.full(1, shape.requests, jnp.int32),
        "orphan_tail": jnp.full(1, shape.requests, jnp.int32),
        "orphans": jnp.int32(0),
        "adopt_left": jnp.int32(0),
        "turn": jnp.zeros(engines, jnp.int32),
        "next_incident": jnp.int32(0),
        "blocks_lost": jnp.int64(0),
        "forwards": jnp.int64(0),
    }
    if shape.scaling:
        fields |= {
            "next_scale": jnp.asarray(numbers.scale_round_ticks, time),
            "scale_demand": jnp.int64(0),
            "waiting_tokens": jnp.int64(0),
            "scale_log": jnp.zeros((SCALE_ROUNDS, 7), jnp.int64),
            "scale_rounds": jnp.int32(0),
        }
    return fields


def append(log: Any, count: Any, *row: Any) -> tuple[Any, Any]:
    """(log, count) with one more row; rows that do not fit overwrite the last one and count."""
    values = jnp.stack([jnp.asarray(x, jnp.int64) for x in row])
    at = jnp.minimum(count, log.shape[0] - 1)
    return put(log, values, at), count + 1


def move(state: State, request: Any, stage: Any) -> State:
    """Notes where a request is from now on, where engines have lives."""
    if state.stage is None:
        return state
    return state.replace(stage=put(state.stage, stage, request))
