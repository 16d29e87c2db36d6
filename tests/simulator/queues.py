"""Queues as clusters, and their answers from the literature: what `queueing_test` compares.

An engine that takes one prompt at a time is a server, the pull queue with a quota of one tick is
the waiting line, and a prompt's length is its service time. Times of formulas are in mean services.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from scipy import stats

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.simulate import Prepared
from deepinfer_jax.simulator.traces import plain
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.workload import Workload, workload

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

SERVICE = 10**9  # ticks: a mean service lasts one second
TOKEN = 1000  # ticks: a service time is a whole number of microseconds
WARM_UP = 0.1  # share of the jobs, the first to arrive, that no statistic counts


class Row(NamedTuple):
    """One queue: `servers` servers, load `rho` each, and its law of service."""

    servers: int
    rho: float
    service: str = "exponential"

    @property
    def name(self) -> str:
        return f"M/{'M' if self.service == 'exponential' else 'D'}/{self.servers} rho={self.rho}"


# (P(wait), mean wait): Erlang C, evaluated outside this project.
PUBLISHED = {
    Row(1, 0.8): (0.8, 4),
    Row(2, 0.5): (0.3333333, 0.3333333),
    Row(2, 0.8): (0.7111111111, 1.7777777778),
    Row(2, 0.9): (0.8526315789, 4.2631578947),
    Row(4, 0.5): (0.1739130435, 0.0869565217),
    Row(4, 0.8): (0.5964324718, 0.7455405897),
    Row(4, 0.9): (0.7877532643, 1.9693831607),
    Row(8, 0.8): (0.4576449254, 0.2860280784),
    Row(8, 0.9): (0.7015329901, 0.8769162377),
    Row(8, 0.95): (0.8441686306, 2.1104215765),
    Row(16, 0.9): (0.5913433939, 0.3695896212),
    Row(16, 0.95): (0.7801924622, 0.9752405778),
    Row(64, 0.9): (0.3106633165, 0.0485411432),
    Row(64, 0.95): (0.5880109319, 0.1837534162),
}
CONSTANT = tuple(Row(c, rho, "constant") for c, rho in ((1, 0.8), (2, 0.8), (4, 0.8), (8, 0.9)))


def erlang_c(servers: int, rho: float) -> float:
    """P(wait) of M/M/c by the recursion of Erlang B."""
    offered, blocked = servers * rho, 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - rho * (1 - blocked))


def occupancy(servers: int, rho: float, largest: int) -> Float64:
    """P(n in the system) of M/M/c for n = 0..largest."""
    n = np.arange(4000)
    steps = np.log(servers * rho) - np.log(np.minimum(np.maximum(n, 1), servers))
    weights = np.exp(np.cumsum(np.where(n == 0, 0, steps)))
    return (weights / weights.sum())[: largest + 1]


def crommelin(servers: int, rho: float) -> tuple[float, float]:
    """(P(wait), mean wait) of M/D/c, exact (Crommelin 1932).

    Whoever is served at t has left at t + D and nobody else has, so the number in the system obeys
    N(t + D) = max(N(t) - c, 0) + Poisson(c rho): a chain with the stationary law of N.
    """
    size = 120 * servers if servers > 1 else 400
    now, later = np.arange(size)[:, None], np.arange(size)[None, :]
    chain = stats.poisson.pmf(later - np.maximum(now - servers, 0), servers * rho)
    chain[:, -1] += 1 - chain.sum(axis=1)
    equations = np.vstack([(chain.T - np.eye(size))[:-1], np.ones(size)])
    law = np.linalg.solve(equations, np.eye(size)[-1])
    mean = float(law @ np.arange(size))
    return float(law[servers:].sum()), mean / (servers * rho) - 1


def spitzer(servers: int, rho: float) -> float:
    """Mean wait of M/D/c once more, without its chain.

    A server of constant service sees each c-th arrival and so waits as E_c/D/1 does; Spitzer's
    identity sums the positive parts of that queue's random walk.
    """
    i = np.arange(1, 20_000)
    late, later = (stats.poisson.sf(i * servers - k, i * servers * rho) for k in (1, 0))
    return float(np.sum(late - later / rho))


def answer(row: Row) -> tuple[float, float]:
    """(P(wait), mean wait in services) of a row."""
    if row.service == "constant":
        return crommelin(row.servers, row.rho)
    waits = erlang_c(row.servers, row.rho)
    return waits, waits / (row.servers * (1 - row.rho))


def servers(count: int) -> ClusterConfig:
    """`count` engines, each empty or with one prompt; the earliest waiting prompt goes first."""
    return ClusterConfig(
        modes=(Mode.NORMAL,) * count,
        slots=1,
        cost=StepCost(0, TOKEN * 10**6, 0, 0, 0, 0, ((1, 0, 0),), 0, 0),
        tier_quota=(1,),
        batch_requests=1,
        chunk_multiple=FOREVER,
    )


def jobs(row: Row, count: int, seed: int) -> Workload:
    """`count` Poisson arrivals; prompts are the service times, outputs are one token."""
    dice = np.random.default_rng([seed, row.servers, round(1000 * row.rho), len(row.service)])
    gaps = dice.exponential(SERVICE / (row.servers * row.rho), count)
    lengths = np.full(count, SERVICE / TOKEN)
    if row.service == "exponential":
        lengths = np.maximum(np.rint(dice.exponential(SERVICE / TOKEN, count)), 1)
    return workload(plain(row.name, np.cumsum(gaps).astype(np.int64), lengths, np.ones(count)))


def first_come_first_served(arrival: Int64, service: Int64, count: int) -> Int64:
    """Start of every service: each job takes the server that is free first (Kiefer-Wolfowitz)."""
    free = [0] * count
    starts = []
    for came, lasts in zip(arrival.tolist(), service.tolist(), strict=True):
        start = max(came, free[0])
        heapq.heapreplace(free, start + lasts)
        starts.append(start)
    return np.array(starts)


def again(prepared: Prepared, load: Workload) -> Trajectory:
    """Another run of a compiled cluster, with as many other requests."""
    with jax.enable_x64(True):
        arguments = jax.device_put((prepared.arguments[0], load))
    return dataclasses.replace(prepared, arguments=arguments).run()[0]


class Interval(NamedTuple):
    """Student-t interval of the mean over independent seeds."""

    mean: float
    half: float

    def holds(self, value: float) -> bool:
        return abs(self.mean - value) <= self.half


def interval(values: Sequence[float] | Float64, level: float = 0.99) -> Interval:
    """Interval of the mean of per-seed statistics at confidence `level`."""
    values = np.asarray(values, np.float64)
    quantile = stats.t.ppf((1 + level) / 2, len(values) - 1)
    return Interval(
        float(values.mean()), float(quantile * values.std(ddof=1) / np.sqrt(len(values)))
    )


def steady(per_job: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The jobs after the warm-up; jobs on the last axis."""
    return per_job[..., round(WARM_UP * per_job.shape[-1]) :]
