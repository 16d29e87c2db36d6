"""Sweeps arrival rate x prefill share of one P/D cluster in one call, and draws its SLO frontier.

  python -m experiments.frontier --config=configs/frontier.py:smoke
  python -m experiments.frontier --config=configs/frontier.py --workdir=runs/frontier

Engine modes and arrival times are numbers of one compiled program, so every point of the grid runs
in a single `sweep`. Goodput is the arrival rate times the share of requests that meet both
objectives; waiting for a decode slot counts in TPOT, because the first token is sent before it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.report.table import quantity, table
from deepinfer_jax.rules import require
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.simulate import Prepared, prepare, sweep
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.workload import Workload, workload
from experiments import frontier_report, harness


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every point: its arrival rate, prompt engines, cluster and workload."""

    rate: np.ndarray  # [K] requests per second
    prompt: np.ndarray  # [K] engines
    clusters: list[ClusterConfig]
    workloads: list[Workload]
    gpus: int


def clusters_by_split(
    parameters: dict[str, Any], seed: int
) -> tuple[dict[int, ClusterConfig], int]:
    """{prompt engines: cluster} and the GPUs of each; they differ in their modes alone."""
    engines = dict(parameters["engines"])
    total = engines.pop("total")
    found, gpus = {}, 0
    for prompt in parameters["sweep"]["prompt_engines"]:
        if not 0 < prompt < total:
            raise ValueError(
                f"sweep.prompt_engines has {prompt} of engines.total={total}: leave at least one "
                "engine on each side"
            )
        sections = ("model", "hardware", "cost", "decode", "tiers", "prefill", "links")
        values = {name: parameters[name] for name in sections}
        values["engines"] = {**engines, "prompt": prompt, "completion": total - prompt}
        made = translate(service(values), seed)
        found[prompt], gpus = made.cluster, made.gpus
    return found, gpus


def grid(parameters: dict[str, Any], seed: int) -> Grid:
    """Every rate with every split, in that order; one draw of Poisson gaps for all rates."""
    by_split, gpus = clusters_by_split(parameters, seed)
    described = source(parameters["workload"])
    require(
        not described.closed_loop,
        "workload.closed_loop is on, but a sweep of rates sets every arrival; use recorded or "
        "synthetic arrivals",
    )
    base = workload(described.trace(seed))
    gaps = np.cumsum(np.random.default_rng(seed).exponential(1.0, base.requests))
    s = parameters["sweep"]
    rates = np.geomspace(s["lowest_rate"], s["highest_rate"], s["rates"])
    loads = [
        dataclasses.replace(base, arrival=np.rint(gaps / rate * 1e9).astype(np.int64))
        for rate in rates
    ]
    points = [(r, p) for r in range(len(rates)) for p in by_split]
    return Grid(
        rates[[r for r, _ in points]],
        np.asarray([p for _, p in points]),
        [by_split[p] for _, p in points],
        [loads[r] for r, _ in points],
        gpus,
    )


def reduce(run: Trajectory, *, slo: metrics.Slo, limits: Sequence[float], warmup: float) -> Any:
    """One run's numbers, inside the compiled program; times in seconds.

    Args:
      limits: TPOT objectives [L] besides that of `slo`, for `share_by_limit`.
      warmup: share of the arrivals that is left out.
    """
    t = run.requests
    kept = jnp.arange(len(t.arrival)) >= int(warmup * len(t.arrival))
    done = t.status == metrics.COMPLETED
    first, each = metrics.ttft(t), metrics.tpot(t)
    met = metrics.meets(t, slo)
    several = kept & done & (t.output_tokens > 1)
    by_limit = [metrics.meets(t, dataclasses.replace(slo, tpot=limit)) for limit in limits]
    total = jnp.sum(kept)
    found = {
        "completed": jnp.sum(done),
        "share_within": jnp.sum(met & kept) / total,
        "tokens_within": jnp.sum(jnp.where(met & kept, t.output_tokens, 0)) / total,
        "share_by_limit": jnp.stack([jnp.sum(one & kept) / total for one in by_limit]),
        "simulated_seconds": run.end / metrics.NANOSECONDS_PER_SECOND,
    }
    for percent in (50, 90, 99):
        found[f"ttft_p{percent}"] = metrics.masked_percentile(
            jnp.where(done, first, 0.0), kept & done, percent
        )
        found[f"tpot_p{percent}"] = metrics.masked_percentile(
            jnp.where(several, each, 0.0), several, percent
        )
    return found


class CompileClock:
    """When XLA last finished compiling; splits one call into compiling and running."""

    def __init__(self) -> None:
        self.finished = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration") and duration_secs > 0.5:
            self.finished = time.perf_counter()


def points_of(g: Grid, found: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """One record per point, with the rates that follow from its shares."""
    rows = []
    for i in range(len(g.rate)):
        one = {name: values[i] for name, values in found.items()}
        rows.append(
            {
                "rate": float(g.rate[i]),
                "prompt_engines": int(g.prompt[i]),
                "prompt_share": float(g.prompt[i]) / g.clusters[i].engines,
                "goodput": float(g.rate[i] * one["share_within"]),
                "good_tokens_per_second_per_gpu": float(g.rate[i] * one["tokens_within"] / g.gpus),
                "user_tokens_per_second": float(1 / one["tpot_p50"]),
                **{k: v.tolist() if k == "share_by_limit" else float(v) for k, v in one.items()},
            }
        )
    return rows


def single_runs(g: Grid, which: np.ndarray) -> tuple[float, float]:
    """(compile seconds, seconds of running the points `which` one by one)."""
    made = prepare(g.clusters[0], g.workloads[0])
    total = 0.0
    for i in harness.progress(which, "single runs"):
        with jax.enable_x64(True):
            numbers = split(g.clusters[i], g.workloads[i])[1]
            arguments = jax.device_put((numbers, g.workloads[i]))
        total += Prepared(made.executable, arguments, made.compile_seconds).run()[1]
    return made.compile_seconds, total


def main(run: harness.Run) -> None:
    p, s = run.parameters, run.parameters["sweep"]
    limits = [limit / 1e3 for limit in s["tpot_limits_ms"]]
    g = grid(p, run.seed)
    metric = lambda t: reduce(  # noqa: E731
        t, slo=metrics.Slo(**p["slo"]), limits=limits, warmup=p["warmup_share"]
    )
    print(
        f"{len(g.rate)} points: {p['workload']['requests']:,} requests each on {g.gpus} GPUs. "
        "Compiling once, then running all of them ..."
    )
    clock, start = CompileClock(), time.perf_counter()
    found = sweep(g.clusters, g.workloads, metric)
    end = time.perf_counter()
    timing: dict[str, Any] = {
        "points": len(g.rate),
        "compile_seconds": clock.finished - start,
        "sweep_seconds": end - clock.finished,
        "seconds_per_scenario": (end - clock.finished) / len(g.rate),
    }
    if s["single_runs"]:
        which = np.unique(np.linspace(0, len(g.rate) - 1, s["single_runs"]).astype(int))
        compiling, total = single_runs(g, which)
        timing |= {
            "single_runs": len(which),
            "single_compile_seconds": compiling,
            "single_seconds_per_scenario": total / len(which),
            "sweep_over_single": timing["seconds_per_scenario"] / (total / len(which)),
        }
    made = frontier_report.Findings(points_of(g, found), limits, p, g.gpus, timing)
    print(table(made.best_rows(), title=made.best_title()))
    print()
    print(table(made.limit_rows(), title=made.limit_title()))
    print(
        f"\ncompile {quantity(timing['compile_seconds'], 's')}, sweep "
        f"{quantity(timing['sweep_seconds'], 's')}: "
        f"{quantity(timing['seconds_per_scenario'], 's')} per scenario"
    )
    if s["single_runs"]:
        print(
            f"one by one: {quantity(timing['single_seconds_per_scenario'], 's')} per scenario; the "
            f"sweep takes {timing['sweep_over_single']:.2f} times as long"
        )
    if run.workdir:
        made.write(run.workdir, run.provenance)
        print(f"wrote {run.workdir}/report.html")


if __name__ == "__main__":
    harness.run(main, config="configs/frontier.py")
