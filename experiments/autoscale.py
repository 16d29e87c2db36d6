r"""The scaling loop through a day: engines against demand, what it saves, and what it misses.

  python -m experiments.autoscale --config=configs/autoscale.py --workdir=runs/autoscale

Besides the figure it states what the loop promises (limits, steps per round, no engine given back
above a utilisation) and counts the rounds that broke it: there should be none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepinfer_jax import metrics
from deepinfer_jax.report import style
from deepinfer_jax.report.page import Plot, Table
from deepinfer_jax.report.table import quantity, table
from deepinfer_jax.simulator.cluster import ClusterConfig, Pool
from deepinfer_jax.timeline import NANOSECONDS_PER_SECOND
from experiments import harness
from experiments.resilience import shares
from experiments.simulation import Prepared, Result, load_cases, run_cases, show, write_report


def broken(rounds: np.ndarray, pool: Pool, hold_above: float) -> dict[str, int]:
    """Rounds [n, 4] (tick, engines, demand, engines wanted) that broke a promise of `pool`, by promise."""
    _, current, demand, wanted = rounds.T
    used = demand / (pool.capacity * np.maximum(current, 1))
    inside = (current >= pool.minimum) & (current <= pool.maximum)
    found = {
        "fewer than the minimum": wanted < pool.minimum,
        "more than the maximum": wanted > pool.maximum,
        "grew by more than a step": inside & (wanted - current > pool.step_up),
        "shrank by more than a step": inside & (current - wanted > pool.step_down),
        f"shrank above {hold_above:g}": inside & (wanted < current) & (used > hold_above),
    }
    return {name: int(np.sum(where)) for name, where in found.items()}


def pools(cluster: ClusterConfig) -> dict[str, Pool]:
    """The scaled pools of a cluster, by the mode of their engines."""
    both = {"prompt": cluster.scale_prompt, "completion": cluster.scale_decode}
    return {name: pool for name, pool in both.items() if pool is not None}


def promise_rows(results: Sequence[Result], cases: Mapping[str, Prepared]) -> list[dict[str, Any]]:
    """One row per case and pool: its rounds, engines held, and rounds that broke a promise."""
    rows = []
    for result in results:
        cluster = cases[result.case.name].translation.cluster
        for name, pool in pools(cluster).items():
            rounds = result.rounds[name]
            wanted = rounds[:, 3]
            row = {"case": result.case.name, "pool": name, "rounds": str(len(rounds))}
            row["engines"] = f"{wanted.min()} to {wanted.max()}, mean {wanted.mean():.2f}"
            rows.append(row | broken(rounds, pool, cluster.hold_above))
    return rows


def saving_rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """GPU-hours and objectives of every case; the first holds all engines."""
    whole = results[0].case.summary["gpu_hours"]
    return [
        {
            "case": r.case.name,
            "GPU-hours": f"{r.case.summary['gpu_hours']:.2f}",
            "of all held": quantity(r.case.summary["gpu_hours"] / whole, "%"),
            "within": quantity(r.case.summary["goodput_fraction"], "%"),
            "TTFT p99": quantity(r.case.summary["ttft_seconds"]["p99"], "s"),
            "TPOT p99": quantity(r.case.summary["tpot_seconds"]["p99"], "s"),
        }
        for r in results
    ]


def figure(
    results: Sequence[Result], cases: Mapping[str, Prepared], slo: metrics.Slo, bins: int = 60
) -> Figure:
    """Engines against demand for each pool, arrivals, and their share within the objectives."""
    scaled = [r for r in results if r.rounds]
    names = list(scaled[0].rounds)
    made, axes = style.grid(len(names) + 2)
    for ax, name in zip(axes, names, strict=False):
        pool = pools(cases[scaled[0].case.name].translation.cluster)[name]
        _pool_panel(ax, name, pool, scaled, [r.case.name for r in results])
    load, met = axes[-2:]
    style.title(load, "Arrivals per second", pad=18)
    style.title(met, "Share of arrivals within the objectives", pad=18)
    for index, result in enumerate(results):
        t = result.case.timeline
        width = float(np.asarray(t.arrival).max()) / NANOSECONDS_PER_SECOND / bins
        edges, came, share = (x[:bins] for x in shares(t, slo, width))
        line = {"color": style.colour(index), "linewidth": 1.4, "label": result.case.name}
        met.plot(edges + width / 2, share, **line)
        if not index:
            load.plot(edges + width / 2, came / width, color=style.SERIES[7], linewidth=1.4)
    load.set_ylim(bottom=0)
    met.set_ylim(0, 1.03)
    for ax in axes:
        ax.set_xlabel("time (s)")
        ax.set_xlim(left=0)
        style.legend(ax, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, borderaxespad=0)
    return made


def _pool_panel(
    ax: Any, name: str, pool: Pool, scaled: Sequence[Result], order: Sequence[str]
) -> None:
    """What demand asks for as a broad line, what each case held as steps, and the limits."""
    style.title(ax, f"{name.capitalize()} engines", pad=18)
    rounds = scaled[0].rounds[name]
    asked = {"color": style.SERIES[7], "linewidth": 4, "alpha": 0.35, "label": "demand"}
    ax.plot(rounds[:, 0] / NANOSECONDS_PER_SECOND, rounds[:, 2] / pool.capacity, **asked)
    for result in scaled:
        tick, _, _, wanted = result.rounds[name].T
        index = list(order).index(result.case.name)
        line = {"color": style.colour(index), "linewidth": 1.4, "label": result.case.name}
        ax.step(tick / NANOSECONDS_PER_SECOND, wanted, where="post", **line)
    for limit in (pool.minimum, pool.maximum):
        ax.axhline(limit, color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
    ax.set_ylim(0, 1.3 * pool.maximum)


def main(run: harness.Run) -> None:
    cases = load_cases(run.config, seed=run.seed)
    results = run_cases(cases)
    slo = next(iter(cases.values())).slo
    promises, savings = promise_rows(results, cases), saving_rows(results)
    show(results, [])
    print("\n" + table(savings, title="What it saves and misses"))
    print("\n" + table(promises, title="What the loop promises, and rounds that broke it"))
    if run.workdir:
        note = (
            "Demand: new prompt tokens of a round, or running requests, over what one engine "
            "carries; dashed: the least and the most engines (a queue of more "
            "demand is cut off). Objectives: met in the end, by the time of arrival."
        )
        plot = Plot("autoscale", "Through the day", note, figure(results, cases, slo))
        first = [
            Table("What it saves and misses", savings),
            Table("What the loop promises, and rounds that broke it", promises),
        ]
        path = write_report(run, results, [], first=first, plots_first=[plot])
        print(f"\nwrote {path}")


if __name__ == "__main__":
    harness.run(main, config="configs/autoscale.py")
