"""`Trajectory`: what a simulation returns, and the books that every run must balance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.simulator import life
from deepinfer_jax.simulator.clock import NEVER
from deepinfer_jax.simulator.cluster import Status
from deepinfer_jax.simulator.scenario import Shape
from deepinfer_jax.simulator.state import State
from deepinfer_jax.simulator.workload import Workload
from deepinfer_jax.timeline import EVENTS, RequestTimeline

STATUSES = (
    "completed",
    "rejected: prompt longer than max_input_tokens",
    "rejected: longer than the KV blocks of a rank",
    "lost: the configuration cannot make progress",
    "lost: its engines crashed more often than it may be retried",
)
"""Names of `cluster.Status`, in its order."""

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRecords:
    """What `tokens.token_times` reads: rows of `steps.log_run` and `decode.log_stay`, how many."""

    run_log: Array
    runs: Array
    stay_log: Array
    stays: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One simulated run. Arrays may have a leading scenario axis (a sweep). Times in ticks.

    Letters: `Q` requests, `M` engines; step kinds are idle, prefill, decode, mixed.
    """

    requests: RequestTimeline  # [Q]
    emitted: Array  # [Q] tokens sent
    end: Array  # tick of the last event
    busy: Array  # [M, 4] ticks by step kind
    steps: Array  # [M, 4] steps by step kind
    busy_series: Array  # [SERIES_BINS, M] busy ticks, by the bin in which a step or run ended
    bin_ticks: Array
    fetched_bytes: Array
    swa_bytes: Array
    handoff_bytes: Array
    blocks_published: Array
    blocks_evicted: Array
    blocks_present: Array
    lives: Lives | None = None  # of a cluster with dynamics
    swept: Swept | None = None  # of a cluster with retention
    stored: Stored | None = None  # of a cluster whose fetches wait for storage nodes
    records: TokenRecords | None = None  # where `token_times` is on
    left: Array  # [6] what should be zero: quota, slots, reserved, in prefill, pins, heap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lives:
    """What became of engines and of what they held (`SEMANTICS.md` 11)."""

    crashes: Array  # [Q] how often an engine crashed under the request
    life_ticks: Array  # [M, 4] OFF, STARTING, SERVING, LEAVING; a row sums to the run's end
    served: Array  # [SERIES_BINS, M] ticks SERVING or LEAVING
    life: Array  # [M] at the end
    healthy: Array  # [R] bool, at the end
    blocks_lost: Array
    forwards: Array
    unreadable_blocks: Array
    unreadable_matches: Array
    scale_log: Array | None  # [SCALE_ROUNDS, 7] tick; current, demand, wanted of both pools, or -1
    scale_rounds: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Swept:
    """What sweeps of the caches did (`SEMANTICS.md` 13)."""

    sweeps: Array
    expired: Array  # blocks
    reclaimed: Array  # blocks deleted for the watermark
    held_at_sweeps: Array  # blocks of all caches after a sweep, summed over sweeps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """What reads from storage nodes took (`SEMANTICS.md` 15)."""

    reads: Array
    bytes: Array  # of all fragments asked
    read_ticks: Array  # from placement to the end of the reads, summed
    node_busy: Array  # [storage nodes] ticks


def _stored(shape: Shape, state: State) -> Stored | None:
    if not shape.storage_reads:
        return None
    return Stored(state.storage_reads, state.storage_bytes, state.storage_ticks, state.node_busy)


def _swept(shape: Shape, state: State) -> Swept | None:
    if not shape.retention:
        return None
    return Swept(state.sweeps, state.expired, state.reclaimed, state.held_at_sweeps)


def _lives(shape: Shape, state: State) -> Lives | None:
    if not shape.dynamics:
        return None
    everyone = jnp.ones(shape.engines, bool)
    state = state.replace(**life.counted(state, state.now, everyone))
    return Lives(
        crashes=state.crashes[:-1],
        life_ticks=state.life_ticks,
        served=state.served,
        life=state.life,
        healthy=state.healthy_at <= state.now,
        blocks_lost=state.blocks_lost,
        forwards=state.forwards,
        unreadable_blocks=state.unreadable_blocks,
        unreadable_matches=state.unreadable_matches,
        scale_log=state.scale_log,
        scale_rounds=state.scale_rounds,
    )


def _arrival(workload: Workload, state: State) -> Array:
    """[Q] ticks, -1 for a request whose parent never ended."""
    if workload.after is None:
        return workload.arrival
    return jnp.where(workload.after.parent >= 0, state.arrival[:-1], workload.arrival)


def trajectory(shape: Shape, workload: Workload, state: State) -> Trajectory:
    """Reads a final state; pure, so that sweeps can reduce it inside the compiled program."""
    per_request = {
        name: getattr(state, name)[:-1] for name in (*EVENTS[1:], "preemptions", "emitted")
    }
    emitted = per_request.pop("emitted")
    status = state.status[:-1]
    decoded = state.decode_start[:-1] >= 0
    rank = jnp.where(decoded, state.target[:-1], -1)
    timeline = RequestTimeline(
        arrival=_arrival(workload, state),
        input_tokens=workload.input_tokens,
        output_tokens=emitted,
        block_hit_tokens=state.hit_blocks[:-1] * state.block_tokens.astype(jnp.int32),
        compute_hit_tokens=state.hit_compute[:-1],
        status=jnp.where(status < 0, int(Status.STUCK), status),
        prefill_engine=state.engine[:-1],
        decode_engine=jnp.where(decoded, rank // shape.ranks, -1),
        decode_rank=jnp.where(decoded, rank % shape.ranks, -1),
        statuses=STATUSES,
        **per_request,
    )
    left = [
        jnp.sum(jnp.abs(state.quota_used)) + jnp.sum(jnp.abs(state.rank_quota)),
        jnp.sum(state.rows) + jnp.sum(state.assigned),
        jnp.sum(jnp.abs(state.reserved)) + jnp.sum(jnp.abs(state.kv)),
        jnp.sum(state.in_prefill) + jnp.sum(state.prompts),
        jnp.sum(state.pins),
        state.heap_size,
    ]
    records = None
    if shape.token_log:
        records = TokenRecords(state.run_log, state.runs, state.stay_log, state.stays)
    return Trajectory(
        requests=timeline,
        emitted=emitted,
        end=state.now,
        busy=state.busy,
        steps=state.step_count,
        busy_series=state.series,
        bin_ticks=state.bin_ticks,
        fetched_bytes=state.fetched_bytes,
        swa_bytes=state.swa_fetched_bytes,
        handoff_bytes=state.handoff_bytes,
        blocks_published=state.published,
        blocks_evicted=state.evicted,
        blocks_present=jnp.sum(state.used),
        lives=_lives(shape, state),
        swept=_swept(shape, state),
        stored=_stored(shape, state),
        records=records,
        left=jnp.stack([jnp.asarray(x, jnp.float64) for x in left]),
    )


def balance(run: Trajectory) -> None:
    """Checks the conservation rules of `SEMANTICS.md` section 9 on one run (numpy arrays).

    Raises:
      AssertionError: the simulator lost or invented something.
    """
    status = np.asarray(run.requests.status)
    arrived = np.asarray(run.requests.arrival)
    assert len(status) == len(arrived) and status.min() >= 0, "a request has no end"
    stuck = np.any(status == int(Status.STUCK))
    assert stuck or np.allclose(run.left, 0, atol=1e-3), f"left over at the end: {run.left}"
    done = status == int(Status.COMPLETED)
    finish = np.asarray(run.requests.finish)
    assert np.all((finish[done] >= arrived[done]) & (finish[done] < NEVER)), "bad finish times"
    stored = run.blocks_published - run.blocks_evicted
    if run.lives is not None:
        stored = stored - run.lives.blocks_lost
        _balance_lives(run, run.lives)
    if run.swept is not None:
        stored = stored - run.swept.expired - run.swept.reclaimed
    assert stored == run.blocks_present, (
        f"{stored} blocks should be present, not {run.blocks_present}"
    )


def _balance_lives(run: Trajectory, lives: Lives) -> None:
    """Every tick of every engine is in one life, and steps happen only where an engine serves."""
    held = lives.life_ticks.sum(axis=1)
    assert np.allclose(held, run.end, rtol=1e-12, atol=1e-3), f"lives last {held}, not {run.end}"
    serving = lives.life_ticks[:, 2:].sum(axis=1)
    assert np.all(run.busy.sum(axis=1) <= serving + 1e-3), "an engine stepped without serving"
    assert np.allclose(lives.served.sum(axis=0), serving, rtol=1e-12, atol=1e-3), "series of lives"
    crashed = np.asarray(run.requests.status) == int(Status.CRASHED)
    assert np.all(lives.crashes[crashed] > 0), "a request ended CRASHED without a crash"
