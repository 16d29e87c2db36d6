"""When each token of a run was sent: bursts of speculative steps, from what the run recorded.

The event loop knows runs of decode steps and expected growth, not tokens; `SEMANTICS.md` section 10
says how tokens follow from its records. `metrics.itl` takes the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.simulator.clock import SUBS_PER_TICK
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.queries import GOLDEN, mix, request_stream
from deepinfer_jax.simulator.scenario import survival_thresholds
from deepinfer_jax.simulator.trajectory import Trajectory

Int64 = np.ndarray


def token_times(run: Trajectory, cluster: ClusterConfig) -> tuple[Int64, Int64]:
    """Times of all tokens that were sent.

    Returns:
      (ticks [T], request after request and rising inside one; row splits [Q + 1]: request i owns
      ticks[splits[i]:splits[i + 1]], as many as `run.emitted[i]`).

    Raises:
      ValueError: the run recorded nothing, or more than its records hold.
    """
    records = run.records
    if records is None:
        raise ValueError("the run recorded no tokens: set token_times=True in its ClusterConfig")
    for name, log, count in (
        ("decode runs", records.run_log, int(records.runs)),
        ("stays in slots", records.stay_log, int(records.stays)),
    ):
        if count > len(log):
            raise ValueError(
                f"{count} {name} were recorded where {len(log)} fit: requests are preempted or "
                "blocks run out too often; give more kv_blocks, or simulate fewer requests"
            )
    boundaries, first = _boundaries(np.asarray(records.run_log)[: int(records.runs)], cluster)
    stays = np.asarray(records.stay_log)[: int(records.stays)]
    stays = stays[(stays[:, 1] < 0) | (stays[:, 3] > 0)]
    counts, steps = _tokens_per_step(stays, cluster)
    prefill = stays[:, 1] < 0
    step = np.where(prefill, 0, first[np.where(prefill, 0, stays[:, 1])] + stays[:, 2])
    boundaries = np.append(boundaries, 0)  # a run of prefill tokens alone has none
    ends = boundaries[np.repeat(step, steps) + _within(steps)]
    ends = np.where(np.repeat(prefill, steps), np.repeat(stays[:, 2], steps), ends)
    owner, ticks = np.repeat(np.repeat(stays[:, 0], steps), counts), np.repeat(ends, counts)
    order = np.lexsort((ticks, owner))
    splits = np.searchsorted(owner[order], np.arange(len(run.emitted) + 1))
    return ticks[order], splits


def _within(lengths: Int64) -> Int64:
    """0, 1, .. inside each of consecutive pieces."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _boundaries(runs: Int64, cluster: ClusterConfig) -> tuple[Int64, Int64]:
    """(tick at which each decode step of each engine ended, where an engine's steps begin [M])."""
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    engine, _, tick, remainder, longest, slope, _ = (
        np.repeat(column, runs[:, 6]) for column in runs.T
    )
    k = _within(runs[:, 6]) + 1
    subs = remainder + k * longest + slope * (k * (k - 1) // 2)
    return tick + subs // SUBS_PER_TICK, np.searchsorted(engine, np.arange(cluster.engines))


def _tokens_per_step(stays: Int64, cluster: ClusterConfig) -> tuple[Int64, Int64]:
    """(tokens of each step of each stay, steps of each stay); a prefill token counts as one step."""
    steps = np.where(stays[:, 1] < 0, 1, stays[:, 3])
    last = np.cumsum(steps) - 1
    drawn = 1 + _accepted(
        np.repeat(stays[:, 0], steps), np.repeat(stays[:, 4], steps) + _within(steps), cluster
    )
    total = np.cumsum(drawn)
    before = np.repeat(total[last] - np.add.reduceat(drawn, last - steps + 1), steps)
    sent = np.repeat(stays[:, 5], steps)
    reached = np.minimum(total - before, sent)
    reached[last] = stays[:, 5]
    start = last - steps + 1
    counts = np.diff(reached, prepend=0)
    counts[start] = reached[start]
    return counts, steps


def _accepted(request: Int64, step: Int64, cluster: ClusterConfig) -> Int64:
    """Drafts that a request accepts in a step of its life: the draws of `queries.steps_needed`."""
    if cluster.nextn == 0:
        return np.zeros(len(request), np.int64)
    with jax.enable_x64(True):
        stream = request_stream(jnp.asarray(cluster.seed, jnp.int64), jnp.asarray(request))
        index = jnp.asarray(step).astype(jnp.uint64) + 1
        draw = np.asarray((mix(stream + jnp.uint64(GOLDEN) * index) >> 11).astype(jnp.int64))
    survival = survival_thresholds(cluster.acceptance[: cluster.nextn])
    return np.sum(draw[:, None] < survival, axis=1)
