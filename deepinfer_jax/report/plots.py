"""The figures of a run. Each takes numbers and returns a matplotlib Figure (Agg, no pyplot)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from deepinfer_jax.percentiles import nearest_rank
from deepinfer_jax.report import style
from deepinfer_jax.report.table import quantity

Samples = Mapping[str, np.ndarray]


def distribution(panels: Mapping[str, Samples], slo: Mapping[str, float] | None = None) -> Figure:
    """Cumulative distributions of latencies, one panel each, on a log axis.

    Args:
      panels: {"TTFT": {run name: seconds [N]}, ...}; NaN and zero are left out of a log axis
        (zeros are counted in the share below the first point).
      slo: {"TTFT": seconds}; drawn as a dashed line.
    """
    made, axes = style.figure(len(panels), width=3.1 * len(panels) + 0.4, height=2.9)
    for ax, (metric, samples) in zip(axes, panels.items(), strict=True):
        style.title(ax, metric)
        for index, (name, values) in enumerate(samples.items()):
            ordered = np.sort(np.asarray(values, np.float64))
            ordered = ordered[~np.isnan(ordered)]
            if not len(ordered) or ordered[-1] <= 0:
                continue
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            keep = _thin(len(ordered)) & (ordered > 0)
            line = {"color": style.colour(index), "linewidth": 1.8, "label": name}
            ax.plot(ordered[keep], share[keep], drawstyle="steps-post", **line)
            if len(samples) == 1:
                _mark_percentiles(ax, ordered, style.colour(index))
        if slo and metric in slo:
            ax.axvline(slo[metric], color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
            text = f"SLO {quantity(slo[metric], 's')}"
            ax.annotate(
                text, (slo[metric], 0.02), xytext=(3, 0), textcoords="offset points",
                color=style.MUTED, fontsize=7.5, rotation=90, va="bottom",
            )  # fmt: skip
        _log_seconds(ax, room=len(samples) == 1)
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
    axes[0].set_ylabel("share of requests")
    longest = max(panels.values(), key=len)
    if len(longest) > 1:
        handles = [
            Line2D([], [], color=style.colour(i), linewidth=1.8) for i in range(len(longest))
        ]
        options: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(longest), 5)}
        made.legend(handles, list(longest), frameon=False, labelcolor=style.INK, **options)
    return made


def _thin(count: int, points: int = 800) -> np.ndarray:
    """bool [count]: about `points` ranks, dense towards the tail, first and last kept."""
    keep = np.zeros(count, bool)
    keep[np.unique(np.linspace(0, count - 1, min(points, count)).astype(int))] = True
    keep[max(0, count - points // 4) :] = True
    return keep


def _mark_percentiles(ax: Any, ordered: np.ndarray, colour: str) -> None:
    for percent in (50, 90, 99):
        x = ordered[int(nearest_rank(percent, len(ordered))) - 1]
        ax.plot([x], [percent / 100], "o", color=colour, markersize=4)
        ax.annotate(
            f"p{percent}  {quantity(x, 's')}", (x, percent / 100), xytext=(-6, 1),
            textcoords="offset points", ha="right", va="center", fontsize=7.5, color=style.INK,
            bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip


def _log_seconds(ax: Any, room: bool) -> None:
    """A log axis in readable units, on demand with room on the left for percentile labels."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    span = max(np.log10(high / low), 0.3) * (1.45 if room else 1.0)
    ax.set_xlim(high / 10**span, high)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: quantity(x, "s")))
    shown = (2, 3, 4, 6, 8) if span < 0.6 else (2, 5) if span < 1.2 else ()
    ax.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: _if_leading(x, shown)))
    ax.tick_params(axis="x", which="minor", labelcolor=style.INK)


def _if_leading(x: float, shown: Sequence[int]) -> str:
    """The tick's text if its leading digit is one of `shown`."""
    return quantity(x, "s") if round(x / 10 ** np.floor(np.log10(x) + 1e-9)) in shown else ""


def frontier(
    x: np.ndarray,
    y: np.ndarray,
    front: np.ndarray,
    *,
    xlabel: str,
    ylabel: str,
    labels: Sequence[str] | None = None,
    half_width: np.ndarray | None = None,
) -> Figure:
    """All points, and the non-dominated ones in colour, joined in order of x.

    Args:
      x, y: [N], both better when larger.
      front: bool [N], the non-dominated set (`cost.frontier.non_dominated` gives it).
      labels: [N] texts for the non-dominated points.
      half_width: [N] relative 95 % half-widths of both coordinates, 0 for single runs.
    """
    x, y, front = np.asarray(x, float), np.asarray(y, float), np.asarray(front, bool)
    made, (ax,) = style.figure(width=6.4, height=3.8)
    ax.plot(
        x[~front], y[~front], "o", color=style.SERIES[7], markersize=4, alpha=0.55,
        markeredgewidth=0, label="dominated",
    )  # fmt: skip
    if half_width is not None and np.any(half_width):
        error = {"xerr": x * half_width, "yerr": y * half_width, "ecolor": style.MUTED}
        ax.errorbar(x, y, fmt="none", elinewidth=0.8, **error)
    order = np.flatnonzero(front)[np.argsort(x[front], kind="stable")]
    ax.plot(
        x[order], y[order], "o-", color=style.colour(0), markersize=5.5, linewidth=1.4,
        label="non-dominated",
    )  # fmt: skip
    for i in order if labels else ():
        ax.annotate(
            (labels or ())[i], (x[i], y[i]), xytext=(6, 5), textcoords="offset points",
            fontsize=7.5, color=style.INK,
        )  # fmt: skip
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))
    style.legend(ax, loc="best")
    return made


def hit_rates(runs: Mapping[str, Mapping[str, float | None]]) -> Figure:
    """The three hit rates of each run as bars: {run: metrics.hit_rates(...) or a summary}."""
    kinds = {
        "request_hit_fraction": "requests with a hit",
        "block_hit_fraction": "blocks matched",
        "token_hit_fraction": "tokens not recomputed",
    }
    rows = [(run, kind, rates[kind]) for run, rates in runs.items() for kind in kinds]
    made, (ax,) = style.figure(width=7.2, height=0.55 + 0.3 * len(rows) + 0.15 * len(runs))
    style.dress(ax, "x")
    places = [i + 0.6 * (i // len(kinds)) for i in range(len(rows))]
    for place, (_, kind, rate) in zip(places, rows, strict=True):
        colour = style.colour(list(kinds).index(kind))
        ax.barh(place, rate or 0.0, color=colour, height=0.72)
        ax.text((rate or 0.0) + 0.012, place, quantity(rate, "%"), va="center", color=style.INK)
    names = [f"{run}: {kinds[kind]}" if len(runs) > 1 else kinds[kind] for run, kind, _ in rows]
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    return made


def stages(runs: Mapping[str, Mapping[str, float | None]]) -> Figure:
    """Where the mean request's time goes: one stacked bar per run, {run: {stage: seconds}}.

    Stages that take no time in any run are not drawn.
    """
    names = [s for s in next(iter(runs.values())) if any(r.get(s) for r in runs.values())]
    made, (ax,) = style.figure(width=8.0, height=1.25 + 0.42 * len(runs))
    style.dress(ax, "x")
    longest = max((sum(v or 0.0 for v in run.values()) for run in runs.values()), default=0.0)
    for row, values in enumerate(runs.values()):
        left = 0.0
        for index, name in enumerate(names):
            length = values.get(name) or 0.0
            label = f"{name}  {quantity(length, 's')}" if len(runs) == 1 else name
            ax.barh(
                row, length, left=left, color=style.colour(index), height=0.62,
                label=label if row == 0 else None,
            )  # fmt: skip
            left += length
        ax.text(left + 0.01 * longest, row, quantity(left, "s"), va="center", color=style.INK)
    ax.set_yticks(range(len(runs)), list(runs))
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.1 or 1.0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v, "s")))
    style.legend(ax, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.2)
    return made
