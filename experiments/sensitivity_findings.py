"""What derivatives and differences said: paired biases, sentences, two figures, the page."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deepinfer_jax.cost.frontier import mean_interval
from deepinfer_jax.report import page, records, style, write
from deepinfer_jax.report.table import quantity

METRICS = ("TTFT", "E2E", "within")
PERCENT = 0.01
"""Results are changes of a metric when a cost grows by one percent."""
EXACT = 1e-6
"""Relative distance up to which a tiny difference and a derivative count as the same number."""

LARGE = 1e-3
"""The figure is scaled to the differences at this step and above: a jump within a smaller one is
divided by almost nothing."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One metric's change per percent of one cost: means over draws with 95 % half-widths."""

    scenario: str
    cost: str
    metric: str
    derivative: tuple[float, float]
    difference: tuple[float, float]
    bias: tuple[float, float]  # derivative - difference, paired by draw
    changed: float  # share of draws with another decision between the two sides

    @property
    def agrees(self) -> bool:
        """The interval of the bias holds zero, or the bias is below a hundredth of the change."""
        mean, half = self.bias
        return abs(mean) <= max(half, 0.01 * abs(self.difference[0]))


def central(numbers: Mapping[str, np.ndarray], metric: str, steps: Sequence[float]) -> np.ndarray:
    """Central differences per unit of log cost, [K, H]."""
    return (numbers[f"above {metric}"] - numbers[f"below {metric}"]) / (2 * np.asarray(steps))


@dataclasses.dataclass(frozen=True)
class Findings:
    """{scenario: {cost: numbers of `sensitivity.measure`}}, the steps, and the one compared."""

    found: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    steps: Sequence[float]
    compared_step: float
    name: str

    def comparisons(self) -> list[Comparison]:
        """Every scenario, cost and metric at the compared step."""
        which = list(self.steps).index(self.compared_step)
        made = []
        for scenario, costs in self.found.items():
            for cost, numbers in costs.items():
                for metric in METRICS:
                    slope = PERCENT * numbers[f"slope {metric}"]
                    apart = PERCENT * central(numbers, metric, self.steps)[:, which]
                    share = float(numbers["changed"][:, which].mean())
                    made.append(
                        Comparison(
                            scenario,
                            cost,
                            metric,
                            derivative=mean_interval(list(slope)),
                            difference=mean_interval(list(apart)),
                            bias=mean_interval(list(slope - apart)),
                            changed=share,
                        )
                    )
        return made

    def exact_share(self) -> tuple[int, int]:
        """(runs without a changed decision at the smallest step, of them with equal slopes)."""
        which = int(np.argmin(self.steps))
        total = equal = 0
        for costs in self.found.values():
            for numbers in costs.values():
                kept = ~numbers["changed"][:, which]
                for metric in METRICS[:2]:
                    small = central(numbers, metric, self.steps)[kept, which]
                    slope = numbers[f"slope {metric}"][kept]
                    scale = np.abs(numbers[f"value {metric}"][kept])
                    # A difference of two doubles loses what the step is too small to show.
                    limit = EXACT * np.abs(slope) + 1e-12 * scale / self.steps[which]
                    limit = limit + scale * self.steps[which] ** 2
                    total += int(kept.sum())
                    equal += int(np.sum(np.abs(small - slope) <= limit))
        return total, equal

    def heading(self) -> str:
        return (
            f"Change per percent of a cost, differences at a step of {self.compared_step:.0%}; bias "
            "with its 95 % interval; decisions: runs with another one between the two sides"
        )

    def rows(self) -> list[dict[str, str]]:
        """One comparison each."""
        return [
            {
                "scenario": c.scenario,
                "cost": c.cost,
                "metric": c.metric,
                "verdict": "agree" if c.agrees else "part",
                "derivative": _text(c.metric, c.derivative[0]),
                "difference": _text(c.metric, c.difference[0]),
                "bias": f"{_text(c.metric, c.bias[0])} ± {_text(c.metric, c.bias[1])}",
                "decisions": quantity(c.changed, "%"),
            }
            for c in self.comparisons()
        ]

    def sentences(self) -> list[str]:
        total, equal = self.exact_share()
        made = [
            f"At the smallest step {equal:,} of {total:,} derivatives of latencies in runs without "
            "a changed decision equal their differences."
        ]
        for scenario in self.found:
            of = [c for c in self.comparisons() if c.scenario == scenario]
            apart = [f"{c.metric} by {c.cost} ({_ratio(c)})" for c in of if not c.agrees]
            made.append(
                f"{scenario}: {len(of) - len(apart)} of {len(of)} agree"
                + (f"; part: {', '.join(apart)}." if apart else ".")
            )
        made.append(
            "In brackets: size of the derivative over that of the difference; 0: all of it is jumps."
        )
        return made

    def tangents(self) -> Figure:
        """Mean TTFT over the first cost of each scenario, and the line its derivative draws."""
        made, axes = style.figure(len(self.found), width=9.4, height=3.1)
        for ax, (scenario, costs) in zip(axes, self.found.items(), strict=True):
            cost, numbers = next(iter(costs.items()))
            x = np.asarray(self.steps)
            order = np.argsort(np.concatenate([-x, [0.0], x]))
            level = numbers["value TTFT"].mean()
            ends = [numbers[f"{side} TTFT"].mean(axis=0) for side in ("below", "above")]
            y = np.concatenate([ends[0], [level], ends[1]])[order]
            factor = np.exp(np.concatenate([-x, [0.0], x])[order])
            slope = numbers["slope TTFT"].mean()
            style.title(ax, scenario)
            ax.plot(factor, y, "o-", color=style.colour(0), markersize=4, label="simulated mean")
            line = level + slope * np.log(factor)
            ax.plot(factor, line, color=style.colour(1), linestyle=(0, (4, 3)), label="derivative")
            ax.set_xlabel(f"{cost}, factor")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v, "s")))
        axes[0].set_ylabel("mean TTFT")
        _legend(made, axes[0])
        return made

    def by_step(self) -> Figure:
        """Differences over their step, with intervals, beside the derivative's."""
        made, axes = style.figure(len(self.found), width=9.4, height=3.1)
        for ax, (scenario, costs) in zip(axes, self.found.items(), strict=True):
            cost, numbers = next(iter(costs.items()))
            every = PERCENT * central(numbers, "TTFT", self.steps)
            pairs = np.asarray([mean_interval(list(column)) for column in every.T])
            mean, half = mean_interval(list(PERCENT * numbers["slope TTFT"]))
            style.title(ax, scenario)
            ax.axhspan(mean - half, mean + half, color=style.colour(1), alpha=0.18, linewidth=0)
            ax.axhline(mean, color=style.colour(1), linestyle=(0, (4, 3)), label="derivative")
            ax.errorbar(self.steps, pairs[:, 0], pairs[:, 1], fmt="o", color=style.colour(0),
                        markersize=4, elinewidth=1.2, label="difference")  # fmt: skip
            ax.set_xscale("log")
            steady = pairs[np.asarray(self.steps) >= LARGE]
            low = min(mean - half, *(steady[:, 0] - steady[:, 1]))
            high = max(mean + half, *(steady[:, 0] + steady[:, 1]))
            ax.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
            ax.set_xlabel(f"step of {cost}")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v, "s")))
        axes[0].set_ylabel("TTFT per percent")
        _legend(made, axes[0])
        return made

    def write(self, workdir: pathlib.Path, provenance: Sequence[Any]) -> None:
        """results.jsonl (every comparison), summary.json, plots, report.html."""
        environment, sentences = records.environment(), self.sentences()
        every = [{**dataclasses.asdict(c), "agrees": c.agrees} for c in self.comparisons()]
        records.write_jsonl(workdir / "results.jsonl", every, len(every))
        told = {"agreeing": sum(c.agrees for c in self.comparisons()), "of": len(every)}
        records.write_json(workdir / "summary.json", {**environment, **told, "claims": sentences})
        drawn = [
            page.Plot(
                "tangents",
                "The curve and the line",
                "Means over draws of mean TTFT while one cost changes, on common random numbers, "
                "and the derivative at factor 1. Jumps at changed decisions bend the curve away.",
                self.tangents(),
            ),
            page.Plot(
                "by_step",
                "Differences by their step",
                "Change of mean TTFT per percent, with 95 % intervals over draws. A step "
                "that changes no decision gives the derivative, larger ones include the jumps. A "
                "jump within a tiny step scatters widely: such bars leave the panel.",
                self.by_step(),
            ),
        ]
        write.write_plots(workdir, drawn)
        page.write(
            workdir / "report.html",
            page.Page(
                self.name,
                sentences=sentences,
                plots=drawn,
                tables=[page.Table(self.heading(), self.rows())],
                provenance=provenance,
                environment=environment,
            ),
        )


def _text(metric: str, value: float) -> str:
    """Milliseconds, or percentage points of a share."""
    return f"{100 * value:.3f} pt" if metric == "within" else f"{1e3 * value:.3g} ms"


def _ratio(c: Comparison) -> str:
    return f"{abs(c.derivative[0] / c.difference[0]):.2f}" if c.difference[0] else "no change"


def _legend(made: Figure, ax: Any) -> None:
    handles, names = ax.get_legend_handles_labels()
    made.legend(
        handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8,
        labelcolor=style.INK,
    )  # fmt: skip
