"""Draws what a faster answer costs: the points of a sweep, and which of them nothing else beats.

  python -m experiments.sweep --config=configs/sweep.py --workdir=runs/sweep
  python -m experiments.plot_pareto --sweep=runs/sweep --workdir=runs/pareto

A point is dominated if another gives each user no fewer tokens per second and the machine no fewer,
and more of one. Passes over the same settings are combined: means, and the 95 % interval of the
means. Points that failed are named and left out. Without a workdir the table is printed only.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deepinfer_jax.cost.frontier import mean_interval, non_dominated
from deepinfer_jax.report import page, records, style, write
from deepinfer_jax.report.table import quantity, table
from experiments import harness
from experiments.sweep import JOURNAL, name_of

SWEEP = flags.DEFINE_string("sweep", "", "The workdir of a run of experiments.sweep.")
NUMBERS = ("user_rate", "machine_rate")


@dataclasses.dataclass(frozen=True)
class Mean:
    """All passes over one point of the grid."""

    settings: dict[str, Any]
    passes: int
    user_rate: float  # tokens per second, means
    machine_rate: float
    half_width: float  # of either, relative; 0 for a single pass
    tau: float
    survival: tuple[float, ...]


def main(run: harness.Run) -> None:
    found = latest(pathlib.Path(SWEEP.value))
    means, failed = combine(found), [p for p in found if p["status"] != "done"]
    front = non_dominated(*(axis.tolist() for axis in axes(means)))
    rows = [row(mean, kept) for mean, kept in zip(means, front, strict=True)]
    print(table(rows, title="Tokens per second, of a user and of the machine"))
    for point in failed:
        print(f"left out, failed: {name_of(point)}: {point['error']}")
    if run.workdir:
        lines = [
            {**dataclasses.asdict(mean), "non_dominated": bool(kept)}
            for mean, kept in zip(means, front, strict=True)
        ]
        records.write_jsonl(run.workdir / "points.jsonl", lines, len(lines))
        about = {"points": len(means), "non_dominated": int(front.sum()), "failed": len(failed)}
        records.write_json(run.workdir / "summary.json", {**records.environment(), **about})
        plot = page.Plot("pareto", "What a faster answer costs", "", figure(means, front))
        write.write_plots(run.workdir, [plot])
        print(f"wrote {run.workdir}/plots/pareto.png")


def latest(sweep: pathlib.Path) -> list[dict[str, Any]]:
    """The newest record of each point and pass, in order of their first.

    Raises:
      ValueError: no such sweep.
    """
    found = {name_of(point): point for point in records.read_jsonl(sweep / JOURNAL)}
    if not found:
        raise ValueError(f"--sweep={sweep} holds no {JOURNAL}: give a workdir of experiments.sweep")
    return list(found.values())


def combine(points: Sequence[Mapping[str, Any]]) -> list[Mean]:
    """Means over the passes of each setting, of the points that have both rates."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        if point["status"] == "done" and all(_known(point[name]) for name in NUMBERS):
            groups.setdefault(name_of({**point, "repeat": ""}), []).append(point)
    return [_mean(group) for group in groups.values()]


def _known(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def _mean(group: Sequence[Mapping[str, Any]]) -> Mean:
    machine, half = mean_interval([p["machine_rate"] for p in group])
    survival = np.mean([p["decode"]["survival"] for p in group], axis=0)
    return Mean(
        settings=dict(group[0]["settings"]),
        passes=len(group),
        user_rate=float(np.mean([p["user_rate"] for p in group])),
        machine_rate=machine,
        half_width=half / machine if len(group) > 1 else 0.0,
        tau=float(np.mean([p["decode"]["useful_tau"] for p in group])),
        survival=tuple(survival.tolist()),
    )


def axes(means: Sequence[Mean]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per second [N] of a user and of the machine."""
    return (
        np.array([mean.user_rate for mean in means], float),
        np.array([mean.machine_rate for mean in means], float),
    )


def row(mean: Mean, kept: bool) -> dict[str, str]:
    """One line of the printed table."""
    spread = f"±{100 * mean.half_width:.0f} %" if mean.passes > 1 else ""
    return {
        **{key: str(value) for key, value in mean.settings.items()},
        "per user": quantity(mean.user_rate),
        "machine": quantity(mean.machine_rate),
        "interval": spread,
        "tau": f"{mean.tau:.2f}",
        "drafts accepted, by position": " ".join(f"{share:.2f}" for share in mean.survival),
        "non-dominated": "yes" if kept else "",
    }


def curves(means: Sequence[Mean]) -> dict[str, list[int]]:
    """Indices of the points of each curve: all settings equal but `concurrency`."""
    found: dict[str, list[int]] = {}
    for i, mean in enumerate(means):
        rest = {k: v for k, v in mean.settings.items() if k != "concurrency"}
        found.setdefault(", ".join(f"{k} {v}" for k, v in rest.items()) or "all", []).append(i)
    return found


def figure(means: Sequence[Mean], front: np.ndarray) -> Figure:
    """A line per curve over both rates, on log axes, labelled by concurrency.

    Args:
      front: bool [N], the points that are drawn filled.
    """
    x, y = axes(means)
    made, (ax,) = style.figure(width=7.2, height=4.4)
    for number, (name, members) in enumerate(curves(means).items()):
        colour, below = style.colour(number), number % 2 == 0
        order = sorted(members, key=lambda i: (_seats(means[i]), x[i]))
        ax.plot(x[order], y[order], "-", color=colour, linewidth=1.4, label=name)
        for i in order:
            half = means[i].half_width
            low = max(1 - half, 0.05)  # of three passes an interval may reach below zero
            for xs, ys in (((low, 1 + half), (1, 1)), ((1, 1), (low, 1 + half))):
                ax.plot(x[i] * np.array(xs), y[i] * np.array(ys), color=colour, alpha=0.25, lw=0.9)
            face = colour if front[i] else style.PAPER
            ax.plot(x[i], y[i], "o", color=colour, markersize=6.5, markerfacecolor=face)
            ax.annotate(
                str(means[i].settings.get("concurrency", "")), (x[i], y[i]), fontsize=8.5,
                xytext=(-6, -8) if below else (6, 8), textcoords="offset points", color=colour,
                ha="center", va="center",
            )  # fmt: skip
    ax.plot([], [], "o", color=style.MUTED, markersize=6.5, label="not dominated")
    ax.set_xlabel("tokens/s of a user")
    ax.set_ylabel("tokens/s of the machine")
    for axis, set_scale, values in ((ax.xaxis, ax.set_xscale, x), (ax.yaxis, ax.set_yscale, y)):
        set_scale("log")
        _ticks(axis, values)
    style.legend(ax, loc="best")
    return made


def _seats(mean: Mean) -> int:
    return int(mean.settings.get("concurrency", 0))


def _ticks(axis: Any, values: np.ndarray) -> None:
    """Numbers at 1, 2 and 5 of each decade, and more of them where less than one is shown."""
    narrow = len(values) > 0 and values.max() < 6 * values.min()
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if narrow else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))
    axis.set_minor_formatter(NullFormatter())


if __name__ == "__main__":
    harness.run(main, config=None)
