r"""Goodput while a decode group is lost, and while one leaves as planned, with and without spare quota.

  python -m experiments.resilience --config=configs/resilience.py --workdir=runs/resilience

The scaling loop runs in every case; `spare` engines on top of what demand asks for are all that the
cases of a pair differ in. Shown is the share of the requests arriving in a time that meet the
objectives in the end. A share near zero right after a crash also holds requests that arrived before
it and were decoding then.
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
from deepinfer_jax.timeline import NANOSECONDS_PER_SECOND
from experiments import harness
from experiments.simulation import Result, load_cases, run_cases, show, write_report

WELL = 0.95
"""Share of requests within the objectives from which a service counts as well."""


def shares(
    t: metrics.RequestTimeline, slo: metrics.Slo, bin_seconds: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bin edges [B + 1] in seconds, arrivals [B], of them the share within `slo` [B], NaN for none)."""
    arrival = np.asarray(t.arrival) / NANOSECONDS_PER_SECOND
    edges = bin_seconds * np.arange(int(arrival.max() // bin_seconds) + 2)
    good = np.asarray(metrics.meets(t, slo))
    came = np.histogram(arrival, edges)[0]
    met = np.histogram(arrival[good], edges)[0]
    with np.errstate(invalid="ignore"):
        return edges, came, met / came


def dip(edges: np.ndarray, share: np.ndarray, begin: float) -> tuple[float, float, float]:
    """(least share after `begin`, seconds of bins below `WELL`, seconds until the last of them ends)."""
    after = edges[1:] > begin
    low = after & (share < WELL)
    width = edges[1] - edges[0]
    lasted = float(edges[1:][low].max() - begin) if low.any() else 0.0
    return float(np.nanmin(share[after])), float(low.sum() * width), lasted


Panels = Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]]
"""{event: {case: (bin edges [B + 1] in seconds, values [B])}}"""


def figure(panels: Panels, groups: Panels, begin: float) -> Figure:
    """A column per event: shares over arrival time above, decode groups that serve below."""
    made, axes = style.grid(2 * len(panels))
    rows = [(name, lines, True) for name, lines in panels.items()]
    rows += [(name, groups[name], False) for name in panels]
    most = max(values.max() for lines in groups.values() for _, values in lines.values())
    for ax, (name, lines, above) in zip(axes, rows, strict=True):
        if above:
            style.title(ax, name, pad=18)
        for index, (label, (edges, values)) in enumerate(lines.items()):
            line = {"color": style.colour(index), "linewidth": 1.6, "label": label}
            ax.plot((edges[1:] + edges[:-1]) / 2, values, **line)
        ax.axvline(begin, color=style.MUTED, linestyle=(0, (4, 3)), linewidth=1)
        ax.set_xlabel("arrival (s)" if above else "time (s)")
        ax.set_ylim(0, 1.03 if above else most + 0.4)
        if above:
            style.legend(
                ax, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, borderaxespad=0
            )
    axes[0].set_ylabel("share within the objectives")
    axes[len(panels)].set_ylabel("decode groups that serve")
    return made


def row(result: Result, found: tuple[float, float, float]) -> dict[str, str]:
    """One case in numbers."""
    s = result.case.summary
    event, _, what = result.case.name.partition(", ")
    return {
        "event": event,
        "with": what,
        "least share": quantity(found[0], "%"),
        f"below {WELL:.0%} for": quantity(found[1], "s"),
        "well after": quantity(found[2], "s"),
        "within": quantity(s["goodput_fraction"], "%"),
        "hit": quantity(s["crashes"]),
        "forwarded": quantity(s["forwarded"]),
        "lost": quantity(sum(s["lost"].values())),
        "GPU-hours": f"{s['gpu_hours']:.1f}",
    }


def study(
    results: Sequence[Result], slo: metrics.Slo, wanted: Mapping[str, Any]
) -> tuple[Plot, list[dict[str, str]]]:
    """The figure and the table of all cases; a case's name is "event, what differs"."""
    begin = float(wanted["event_seconds"])
    panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    groups: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    rows = []
    for result in results:
        edges, _, share = shares(result.case.timeline, slo, float(wanted["bin_seconds"]))
        event, _, label = result.case.name.partition(", ")
        panels.setdefault(event, {})[label] = (edges, share)
        assert result.case.busy_edges is not None
        up = result.case.up["completion engines"]
        groups.setdefault(event, {})[label] = (result.case.busy_edges, up)
        rows.append(row(result, dip(edges, share, begin)))
    note = (
        f"Above: share of the requests arriving in {wanted['bin_seconds']:g} s that meet the "
        f"objectives in the end; dashed: the event at {begin:g} s. Below: decode groups that serve, "
        "those leaving included."
    )
    return Plot("resilience", "Through an event", note, figure(panels, groups, begin)), rows


def main(run: harness.Run) -> None:
    cases = load_cases(run.config, seed=run.seed)
    results = run_cases(cases)
    slo = next(iter(cases.values())).slo
    plot, rows = study(results, slo, run.parameters["resilience"])
    show(results, [])
    print("\n" + table(rows, title="Through the event"))
    if run.workdir:
        more = {"plots_first": [plot]}
        path = write_report(run, results, [], first=[Table("Through the event", rows)], **more)
        print(f"\nwrote {path}")


if __name__ == "__main__":
    harness.run(main, config="configs/resilience.py")
