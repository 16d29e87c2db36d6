"""What a comparison of policies found: paired differences, tables, figures, the page."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deepinfer_jax.cost.frontier import mean_interval
from deepinfer_jax.report import page, records, style, write
from deepinfer_jax.report.table import quantity

GROUPS = {"prefill": "Prefill policies", "decode": "Decode policies", "service": "Services"}
PERCENT = ("goodput_share", "token_hits")
SHOWN = {
    "ttft_mean": "mean TTFT",
    "tpot_mean": "mean TPOT",
    "goodput_share": "within the objectives",
}


def difference(values: np.ndarray, baseline: np.ndarray) -> tuple[float, float, float]:
    """(mean of values - baseline, its 95 % half-width from pairs, the half-width without pairs) [K].

    Without pairs, the two samples' variances add (Welch); the degrees of freedom are the smaller
    sample's, which is on the safe side.
    """
    mean, half = mean_interval(list(values - baseline))
    one, other = (mean_interval(list(x))[1] for x in (values, baseline))
    return mean, half, math.hypot(one, other)


def _text(name: str, value: float) -> str:
    return quantity(value, "%" if name in PERCENT else "s")


def _signed(name: str, mean: float, half: float) -> str:
    """ "+1.2 ms ± 0.3 ms", shares in percentage points, or "0" where nothing differs."""
    if mean == half == 0:
        return "0"
    if name in PERCENT:
        return f"{100 * mean:+.1f} ± {100 * half:.1f} points"
    return f"{'+' if mean > 0 else ''}{_text(name, mean)} ± {_text(name, half)}"


@dataclasses.dataclass(frozen=True)
class Findings:
    """Numbers [A, K] of `arms` (group, name) over replicates, and each group's baseline."""

    arms: Sequence[tuple[str, str]]
    values: Mapping[str, np.ndarray]
    baselines: Mapping[str, str]

    def groups(self) -> list[str]:
        return list(dict.fromkeys(group for group, _ in self.arms))

    def of(self, group: str) -> list[int]:
        """Rows of a group."""
        return [i for i, (g, _) in enumerate(self.arms) if g == group]

    def baseline(self, group: str) -> int:
        return self.arms.index((group, self.baselines[group]))

    def title(self, group: str) -> str:
        count = self.values["ttft_mean"].shape[1]
        return (
            f"{GROUPS[group]}: means over {count} replicates, differences to "
            f"{self.baselines[group]} with 95 % intervals from pairs"
        )

    def compare(self, arm: int, name: str) -> tuple[float, float, float]:
        """`difference` of an arm to its group's baseline."""
        x = self.values[name]
        return difference(x[arm], x[self.baseline(self.arms[arm][0])])

    def rows(self, group: str) -> list[dict[str, str]]:
        """One arm each, best goodput first; ties by mean TTFT."""
        mean = {name: x.mean(axis=1) for name, x in self.values.items()}
        order = sorted(
            self.of(group), key=lambda i: (-mean["goodput_share"][i], mean["ttft_mean"][i])
        )
        found = []
        for i in order:
            row = {"policy": self.arms[i][1]}
            for name, label in (("goodput_share", "within"), ("ttft_mean", "TTFT")):
                row[label] = _text(name, mean[name][i])
                row[f"{label}, difference"] = _signed(name, *self.compare(i, name)[:2])
            for name, label in (("ttft_p99", "TTFT p99"), ("tpot_mean", "TPOT")):
                row[label] = _text(name, mean[name][i])
            row["tokens hit"] = _text("token_hits", mean["token_hits"][i])
            found.append(row)
        return found

    def verdict(self, group: str) -> dict[str, list[str]]:
        """Arms whose goodput differs from the baseline's beyond the interval, and the others."""
        found: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
        for i in self.of(group):
            if i != self.baseline(group):
                mean, half, _ = self.compare(i, "goodput_share")
                key = "better" if mean > half else "worse" if mean < -half else "undecided"
                found[key].append(self.arms[i][1])
        return found

    def narrowing(self) -> float:
        """Median of the half-widths from pairs over those without, of the goodput shares."""
        ratios = []
        for i, (group, _) in enumerate(self.arms):
            _, half, apart = self.compare(i, "goodput_share")
            if i != self.baseline(group) and apart > 0:
                ratios.append(half / apart)
        return float(np.median(ratios)) if ratios else float("nan")

    def sentences(self) -> list[str]:
        found = []
        for group in self.groups():
            parts = [
                f"{key}: {', '.join(names)}" for key, names in self.verdict(group).items() if names
            ]
            found.append(
                f"{GROUPS[group]}, share of requests within the objectives against "
                f"{self.baselines[group]}: {'; '.join(parts)}."
            )
        found.append(
            "Intervals from pairs of runs on the same requests are "
            f"{self.narrowing():.2f} times as wide as those of unpaired runs (median)."
        )
        return found

    def figure(self, group: str) -> Figure:
        """Differences to the baseline with both intervals, one panel per number."""
        rows = [i for i in self.of(group) if i != self.baseline(group)]
        rows.sort(key=lambda i: -self.compare(i, "goodput_share")[0])
        made, axes = style.figure(len(SHOWN), width=9.4, height=1.1 + 0.27 * len(rows))
        for ax, (name, label) in zip(axes, SHOWN.items(), strict=True):
            style.dress(ax, "x")
            style.title(ax, label)
            for place, i in enumerate(rows):
                mean, half, apart = self.compare(i, name)
                wide = {"color": style.GRID, "linewidth": 7, "solid_capstyle": "butt"}
                ax.plot([mean - apart, mean + apart], [place] * 2, **wide)
                line = {"color": style.colour(0), "linewidth": 1.8}
                ax.plot([mean - half, mean + half], [place] * 2, **line)
                ax.plot(mean, place, "o", color=style.colour(0), markersize=4)
            ax.axvline(0, color=style.MUTED, linewidth=1)
            names = [self.arms[i][1] for i in rows] if ax is axes[0] else [""] * len(rows)
            ax.set_yticks(range(len(rows)), names)
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.locator_params(axis="x", nbins=4)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _, n=name: _text(n, v)))
        return made

    def write(
        self, workdir: pathlib.Path, parameters: Mapping[str, Any], provenance: Sequence[Any]
    ) -> None:
        """results.jsonl (every arm and replicate), summary.json, plots, report.html."""
        environment, sentences = records.environment(), self.sentences()
        every = [
            {"group": group, "policy": name, "replicate": k}
            | {key: float(x[i, k]) for key, x in self.values.items()}
            for i, (group, name) in enumerate(self.arms)
            for k in range(self.values["ttft_mean"].shape[1])
        ]
        records.write_jsonl(workdir / "results.jsonl", every, len(every))
        told: dict[str, Any] = {
            group: {"baseline": self.baselines[group], **self.verdict(group)}
            for group in self.groups()
        }
        told |= {"interval_ratio": self.narrowing(), "claims": sentences}
        records.write_json(workdir / "summary.json", {**environment, **told})
        drawn = [
            page.Plot(
                f"policies_{group}",
                f"{GROUPS[group]} against {self.baselines[group]}",
                "Mean difference over replicates; blue: 95 % interval from pairs of runs on the "
                "same requests; grey: what unpaired runs would give.",
                self.figure(group),
            )
            for group in self.groups()
            if len(self.of(group)) > 1
        ]
        write.write_plots(workdir, drawn)
        tables = [page.Table(self.title(group), self.rows(group)) for group in self.groups()]
        subtitle = f"{parameters['replicates']} replicates of {parameters['requests']:,} requests"
        page.write(
            workdir / "report.html",
            page.Page(
                parameters["title"],
                subtitle,
                sentences=sentences,
                plots=drawn,
                tables=tables,
                provenance=provenance,
                environment=environment,
            ),
        )
