"""What the frontier sweep found: best splits, sentences, tables, and the page."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.cost.frontier import non_dominated
from deepinfer_jax.report import page, plots, records, write
from deepinfer_jax.report.table import quantity
from experiments.frontier_plots import Point, heat_map, latency, sparse


@dataclasses.dataclass(frozen=True)
class Findings:
    """The sweep's points (`frontier.points_of`), its TPOT limits in seconds, config and timing."""

    points: Sequence[Point]
    limits: Sequence[float]
    parameters: Mapping[str, Any]
    gpus: int
    timing: Mapping[str, Any]

    def objective(self) -> str:
        slo = self.parameters["slo"]
        return f"TTFT <= {quantity(slo['ttft'], 's')} and TPOT <= {quantity(slo['tpot'], 's')}"

    def served(self, share: str | int = "share_within") -> list[Point]:
        """Points at which enough requests are within the objective (or within limit number i)."""
        least = self.parameters["attainment"]
        if isinstance(share, int):
            return [p for p in self.points if p["share_by_limit"][share] >= least]
        return [p for p in self.points if p[share] >= least]

    def best_of_rate(self) -> list[Point]:
        """The split with most goodput at each rate; on ties the one with the lowest p90 TTFT."""
        rates = sorted({p["rate"] for p in self.points})
        return [
            max(
                (p for p in self.points if p["rate"] == rate),
                key=lambda p: (round(p["goodput"], 6), -p["ttft_p90"]),
            )
            for rate in rates
        ]

    def best_of_limit(self) -> list[Point | None]:
        """For each TPOT limit the served point of highest rate, then of lowest p90 TTFT."""
        best = []
        for i in range(len(self.limits)):
            served = self.served(i)
            key = lambda p: (p["rate"], -p["ttft_p90"])  # noqa: E731
            best.append(max(served, key=key) if served else None)
        return best

    def front(self) -> np.ndarray:
        """bool [K]: not dominated in (tokens/s of a user, tokens/s within objectives per GPU)."""
        x, y = self.axes()
        usable = ~np.isnan(x) & (y > 0)
        keep = np.zeros(len(x), bool)
        keep[usable] = non_dominated(x[usable], y[usable])
        return keep

    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        x = np.asarray([p["user_tokens_per_second"] for p in self.points], np.float64)
        y = np.asarray([p["good_tokens_per_second_per_gpu"] for p in self.points], np.float64)
        return x, y

    def best_title(self) -> str:
        return f"Best split at each rate ({self.objective()})"

    def best_rows(self) -> list[dict[str, str]]:
        total = self.parameters["engines"]["total"]
        return [
            {
                "requests/s": quantity(p["rate"]),
                "prefill engines": f"{p['prompt_engines']} of {total}",
                "within": quantity(p["share_within"], "%"),
                "goodput/s": quantity(p["goodput"]),
                "TTFT p50": quantity(p["ttft_p50"], "s"),
                "TTFT p99": quantity(p["ttft_p99"], "s"),
                "TPOT p50": quantity(p["tpot_p50"], "s"),
                "TPOT p99": quantity(p["tpot_p99"], "s"),
            }
            for p in self.best_of_rate()
        ]

    def limit_title(self) -> str:
        least = quantity(self.parameters["attainment"], "%")
        first = quantity(self.parameters["slo"]["ttft"], "s")
        return f"Most traffic with {least} of requests within TTFT <= {first} and a TPOT limit"

    def limit_rows(self) -> list[dict[str, str]]:
        total = self.parameters["engines"]["total"]
        rows = []
        for limit, p in zip(self.limits, self.best_of_limit(), strict=True):
            name = {"TPOT limit": quantity(limit, "s")}
            if p is None:
                rows.append({**name, "requests/s": "none", "prefill engines": "-"})
                continue
            rows.append(
                {
                    **name,
                    "requests/s": quantity(p["rate"]),
                    "prefill engines": f"{p['prompt_engines']} of {total}",
                    "requests/s/GPU": quantity(p["rate"] / self.gpus),
                    "TTFT p90": quantity(p["ttft_p90"], "s"),
                    "TPOT p90": quantity(p["tpot_p90"], "s"),
                }
            )
        return rows

    def sentences(self) -> list[str]:
        total = self.parameters["engines"]["total"]
        best = max(self.points, key=lambda p: p["goodput"])
        found = [
            f"Most goodput: {quantity(best['goodput'])} requests/s within {self.objective()}, with "
            f"{best['prompt_engines']} of {total} engines on prefill and {quantity(best['rate'])} "
            f"requests/s arriving ({quantity(best['share_within'], '%')} of them within)."
        ]
        served = self.served()
        if served:
            top = max(served, key=lambda p: p["rate"])
            splits = [p["prompt_engines"] for p in served if p["rate"] == top["rate"]]
            found.append(
                f"{quantity(self.parameters['attainment'], '%')} or more are within up to "
                f"{quantity(top['rate'])} requests/s, and there only with {min(splits)} to "
                f"{max(splits)} prefill engines: with fewer, prompts queue; with more, "
                "answers wait for decode slots."
            )
        limits = [
            (limit, p)
            for limit, p in zip(self.limits, self.best_of_limit(), strict=True)
            if p is not None
        ]
        if len(limits) > 1:
            (tight, first), (loose, last) = limits[0], limits[-1]
            found.append(
                f"Relaxing the TPOT limit from {quantity(tight, 's')} to {quantity(loose, 's')} "
                f"takes the traffic from {quantity(first['rate'])} to {quantity(last['rate'])} "
                f"requests/s and the best split from {first['prompt_engines']} to "
                f"{last['prompt_engines']} prefill engines."
            )
        t = self.timing
        found.append(
            f"All {t['points']} points ran in one call: {quantity(t['sweep_seconds'], 's')} after "
            f"{quantity(t['compile_seconds'], 's')} of compiling."
        )
        if "sweep_over_single" in t:
            found[-1] += (
                f" Per scenario that is {t['sweep_over_single']:.2f} times a single run of the "
                "same points."
            )
        return found

    def warnings(self) -> list[str]:
        n = self.parameters["workload"]["requests"]
        rates = [p["rate"] for p in self.points]
        return [
            f"Each point is {n:,} requests, {quantity(n / max(rates), 's')} of arrivals at the "
            "highest rate: beyond saturation the share within the objective depends on the length "
            "of the run.",
            "Step times are a roofline at one efficiency for every part, calibrated on one "
            "published decode point; compare splits and rates, do not quote absolute speeds.",
        ]

    def write(self, workdir: pathlib.Path, provenance: Sequence[Mapping[str, Any]]) -> None:
        """points.jsonl, summary.json, plots and report.html."""
        environment = records.environment()
        front = self.front()
        records.write_jsonl(
            workdir / "points.jsonl",
            [{**p, "non_dominated": bool(k)} for p, k in zip(self.points, front, strict=True)],
            len(self.points),
        )
        drawn = self.plots()
        sentences, warnings = self.sentences(), self.warnings()
        best = max(self.points, key=lambda p: p["goodput"])
        records.write_json(
            workdir / "summary.json",
            {
                **environment,
                **self.timing,
                "gpus": self.gpus,
                "best": best,
                "non_dominated": int(front.sum()),
                "claims": sentences,
                "warnings": warnings,
            },
        )
        write.write_plots(workdir, drawn)
        page.write(
            workdir / "report.html",
            page.Page(
                self.parameters["title"],
                f"{len(self.points)} clusters of {self.gpus} {self.parameters['hardware']} GPUs, "
                f"{self.parameters['model']}",
                {
                    "best goodput": quantity(best["goodput"], "/s"),
                    "with prefill engines": f"{best['prompt_engines']} of "
                    f"{self.parameters['engines']['total']}",
                    "points": f"{len(self.points)}",
                    "compile": quantity(self.timing["compile_seconds"], "s"),
                    "per scenario": quantity(self.timing["seconds_per_scenario"], "s"),
                },
                sentences,
                warnings,
                drawn,
                [
                    page.Table(self.best_title(), self.best_rows()),
                    page.Table(self.limit_title(), self.limit_rows()),
                ],
                provenance,
                environment,
            ),
        )

    def plots(self) -> list[page.Plot]:
        x, y = self.axes()
        front = self.front()
        total = self.parameters["engines"]["total"]
        usable = ~np.isnan(x) & (y > 0)
        labels = [f"{quantity(p['rate'])}/s, {p['prompt_engines']}P" for p in self.points]
        least = 0.1 * max(p["goodput"] for p in self.points)
        chosen = [i for i in range(len(x)) if usable[i]]
        return [
            page.Plot(
                "goodput",
                "Goodput over arrival rate and split",
                f"Requests per second within {self.objective()}. Dots: at least "
                f"{quantity(self.parameters['attainment'], '%')} of the requests are within. "
                "Crosses: the best split at each rate that yields a tenth of the most or more.",
                heat_map(
                    self.points,
                    dots=self.served(),
                    crosses=[p for p in self.best_of_rate() if p["goodput"] >= least],
                    total=total,
                ),
            ),
            page.Plot(
                "frontier",
                "What a faster answer costs",
                "One point per cluster and rate: tokens per second that the median user sees "
                "(1 / median TPOT) against tokens of requests within the objective per second and "
                "GPU. Joined: not dominated; labels give the arrival rate and prefill engines.",
                plots.frontier(
                    x[chosen],
                    y[chosen],
                    front[chosen],
                    xlabel="tokens/s of the median user",
                    ylabel="tokens/s within the objective, per GPU",
                    labels=sparse([labels[i] for i in chosen], y[chosen], front[chosen]),
                ),
            ),
            page.Plot(
                "latency",
                "Where each side gives way",
                "Median TTFT and TPOT against the split, one line per arrival rate. Few prefill "
                "engines let prompts queue; few decode engines fill batches and then queues.",
                latency(self.points, self.parameters["slo"], total),
            ),
        ]
