"""Figures of the frontier sweep: goodput over rate and split, latencies over the split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from deepinfer_jax.report import style
from deepinfer_jax.report.table import quantity

Point = Mapping[str, Any]
"""One record of `frontier.points_of`."""


def sparse(labels: Sequence[str], y: np.ndarray, front: np.ndarray, gap: float = 0.1) -> list[str]:
    """Labels of the front from the top down, at least `gap` of the y range apart; others blank."""
    shown: dict[int, str] = {}
    last = np.inf
    for i in sorted(np.flatnonzero(front).tolist(), key=lambda i: -y[i]):
        if last - y[i] >= gap * np.ptp(y):
            shown[i], last = labels[i], y[i]
    return [shown.get(i, "") for i in range(len(labels))]


def heat_map(
    points: Sequence[Point], *, dots: Sequence[Point], crosses: Sequence[Point], total: int
) -> Figure:
    """Goodput by colour over (prefill engines, arrival rate), the rates on a log axis."""
    rates = sorted({p["rate"] for p in points})
    splits = sorted({p["prompt_engines"] for p in points})
    values = np.full((len(rates), len(splits)), np.nan)
    for p in points:
        values[rates.index(p["rate"]), splits.index(p["prompt_engines"])] = p["goodput"]
    made, (ax,) = style.figure(width=7.6, height=4.4)
    ax.grid(False)
    shades = LinearSegmentedColormap.from_list("goodput", ["#f3f6f9", style.SERIES[0], "#12314a"])
    image = ax.pcolormesh(range(len(splits)), range(len(rates)), values, cmap=shades, vmin=0)
    for marked, marker, size in ((dots, "o", 3.2), (crosses, "x", 5.5)):
        ax.plot(
            [splits.index(p["prompt_engines"]) for p in marked],
            [rates.index(p["rate"]) for p in marked],
            marker, color=style.SERIES[1], markersize=size, linestyle="none",
            markeredgewidth=0 if marker == "o" else 1.6,
        )  # fmt: skip
    ax.set_xticks(range(len(splits)), [str(s) for s in splits])
    ax.set_yticks(range(len(rates)), [quantity(r) for r in rates])
    ax.set_xlabel(f"prefill engines of {total}")
    ax.set_ylabel("arriving requests/s")
    bar = made.colorbar(image, ax=ax, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=style.MUTED, labelcolor=style.INK, length=0, labelsize=9)
    bar.set_label("requests/s within the objective", color=style.INK, fontsize=9)
    return made


def latency(
    points: Sequence[Point], slo: Mapping[str, float], total: int, lines: int = 5
) -> Figure:
    """Median TTFT (left) and TPOT (right) over the split for a few of the rates."""
    rates = sorted({p["rate"] for p in points})
    chosen = [rates[i] for i in np.unique(np.linspace(0, len(rates) - 1, lines).astype(int))]
    made, axes = style.figure(2, width=9.4, height=3.4)
    for ax, name in zip(axes, ("ttft", "tpot"), strict=True):
        for index, rate in enumerate(chosen):
            of_rate = [p for p in points if p["rate"] == rate]
            ax.plot(
                [p["prompt_engines"] for p in of_rate], [p[f"{name}_p50"] for p in of_rate],
                color=style.colour(index), linewidth=1.8, label=f"{quantity(rate)} requests/s",
            )  # fmt: skip
        ax.axhline(slo[name], color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
        style.title(ax, f"median {name.upper()}; dashed: the objective", pad=10)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v, "s")))
        decades = np.log10(ax.get_ylim()[1] / ax.get_ylim()[0])
        digits = (2, 3, 5, 7) if decades < 1 else (2, 5) if decades < 2 else ()
        ax.yaxis.set_minor_locator(LogLocator(subs=digits or (1,)))
        ax.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: quantity(v, "s")))
        ax.tick_params(axis="y", which="minor", labelcolor=style.INK, labelsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel(f"prefill engines of {total}")
    handles, names = axes[0].get_legend_handles_labels()
    made.legend(
        handles, names, loc="outside lower center", ncols=len(chosen), frameon=False, fontsize=8,
        labelcolor=style.INK,
    )  # fmt: skip
    return made
