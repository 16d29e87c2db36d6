"""Figures over a run's time: one run's queues, rates, hits and engines, and several runs compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deepinfer_jax.report import style
from deepinfer_jax.report.series import Progress, Series

Lines = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""{label: (bin edges [B + 1] in seconds, values [B])}"""

TITLES = {
    "waiting": "Waiting requests",
    "decoding": "Decoding requests",
    "good": "Goodput, requests per second",
    "completed": "Completed requests per second",
    "hit": "Prompt tokens not recomputed",
    "up": "Engines that serve",
}


@dataclasses.dataclass(frozen=True)
class Course:
    """One run over time. `busy` and `up` are over `edges`, None without them."""

    series: Series
    progress: Progress
    goals: bool  # whether there are objectives, so that goodput means something
    busy: Mapping[str, np.ndarray]  # share of engines at work
    up: Mapping[str, np.ndarray]  # engines that serve
    edges: np.ndarray | None  # [B + 1] seconds since the first arrival


def run(course: Course) -> Figure:
    """Requests by state, engines at work, rates, and where there are any, hits and engines that serve."""
    s, p = course.series, course.progress
    states = {n: (s.edges, getattr(s, n)) for n in ("waiting", "prefilling", "moving", "decoding")}
    shares = {
        "prefill engines": (s.edges, s.prefill_busy),
        "decode engines": (s.edges, s.decode_busy),
    }
    if course.busy and course.edges is not None:
        shares = {name: (course.edges, values) for name, values in course.busy.items()}
    rates = {"arrivals": (p.edges, p.offered), "completed": (p.edges, p.completed)}
    if course.goals:
        rates["within the objectives"] = (p.edges, p.good)
    panels: dict[str, tuple[Lines, tuple[int, ...]]] = {
        "Requests": (states, (0, 1, 2, 3)),
        "Share of engines at work": (shares, (1, 3, 0, 2)),
        "Requests per second": (rates, (7, 0, 2)),
    }
    if np.any(p.hit > 0):
        panels[TITLES["hit"]] = ({"": (p.edges, p.hit)}, (4,))
    if course.up and course.edges is not None:
        up: Lines = {name: (course.edges, values) for name, values in course.up.items()}
        panels[TITLES["up"]] = (up, (1, 3, 0, 2))
    made, axes = style.grid(len(panels))
    end = float(s.edges[-1])
    for ax, (title, (lines, colours)) in zip(axes, panels.items(), strict=True):
        drawn = {k: c for k, c in zip(lines, colours, strict=False) if np.any(lines[k][1] > 0)}
        _draw(ax, title, {k: lines[k] for k in drawn}, tuple(drawn.values()), end)
    return made


def compared(courses: Mapping[str, Course]) -> Figure:
    """The same quantity of every run in one panel: queues, decodes, goodput, hits, engines."""
    named = list(courses.items())
    goals = all(course.goals for _, course in named)
    panels: dict[str, Lines] = {
        name: {k: (c.series.edges, getattr(c.series, name)) for k, c in named}
        for name in ("waiting", "decoding")
    }
    for name in ("good" if goals else "completed", "hit"):
        panels[name] = {k: (c.progress.edges, getattr(c.progress, name)) for k, c in named}
    panels["up"] = {
        k: (c.edges, np.sum(list(c.up.values()), axis=0))
        for k, c in named
        if c.edges is not None and c.up
    }
    panels = {
        n: lines for n, lines in panels.items() if any(np.any(y > 0) for _, y in lines.values())
    }
    made, axes = style.grid(len(panels))
    end = max(float(course.series.edges[-1]) for _, course in named)
    for ax, (name, lines) in zip(axes, panels.items(), strict=True):
        order = tuple(list(courses).index(k) for k in lines)
        _draw(ax, TITLES[name], lines, order, end, legend=False)
    handles = [Line2D([], [], color=style.colour(i), linewidth=1.8) for i in range(len(courses))]
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": min(len(courses), 4)}
    made.legend(handles, list(courses), frameon=False, labelcolor=style.INK, **where)
    return made


def _draw(
    ax: Any, title: str, lines: Lines, colours: tuple[int, ...], end: float, legend: bool = True
) -> None:
    """Lines over the middles of their bins; shares in percent, counts from zero."""
    scale, unit = _unit(end)
    legend = legend and any(lines)
    style.title(ax, title, pad=18 if legend else 6)
    for (label, (edges, values)), colour in zip(lines.items(), colours, strict=True):
        # What is within the objectives is often all that completes: it lies on a broad line.
        broad = {"linewidth": 4, "alpha": 0.35} if label == "completed" else {"linewidth": 1.4}
        line = {"color": style.colour(colour), "label": label or None} | broad
        ax.plot((edges[1:] + edges[:-1]) / 2 / scale, values, **line)
    ax.set_xlabel(f"time since the first arrival ({unit})")
    ax.set_xlim(0, end / scale)
    if title in ("Share of engines at work", TITLES["hit"]):
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
    else:
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=title == TITLES["up"]))
    if legend:
        style.legend(ax, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, borderaxespad=0)


def _unit(end: float) -> tuple[float, str]:
    """A unit of time of which a run of `end` seconds has three or more."""
    units = ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((s, u) for s, u in units if end >= 3 * s or u == "µs")
