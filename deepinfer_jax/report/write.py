"""A run's directory: summary, per-request records, figures and the page, in one call."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.report import over_time, plots, records, style
from deepinfer_jax.report.claims import claims, comparison, warnings
from deepinfer_jax.report.page import Page, Plot, Table, write
from deepinfer_jax.report.series import progress, series
from deepinfer_jax.report.table import latency_rows, quantity, summary_rows

LATENCIES = {"TTFT": metrics.ttft, "TPOT": metrics.tpot, "E2E": metrics.e2e}


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the runs that a report shows.

    `summary` is `metrics.summarise` of `timeline`, with any further keys the run has to tell;
    `kept` is `metrics.window` of the same warm-up (None: every request). `busy` is the share of
    engines at work as measured by the run itself, `{label: [B]}` over the bin edges `busy_edges`
    [B + 1] in seconds; without it, engines with a request on them are drawn instead. `up` counts
    engines that serve over the same bins, where they come and go.
    `prefill_engines` and `decode_engines` count engines that may never have worked.
    """

    name: str
    timeline: metrics.RequestTimeline
    summary: Mapping[str, Any]
    kept: np.ndarray | None = None
    busy: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    busy_edges: np.ndarray | None = None
    up: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    prefill_engines: int = 0
    decode_engines: int = 0

    @property
    def mask(self) -> np.ndarray:
        """bool [Q]: the requests that count."""
        everything = np.ones(len(np.asarray(self.timeline.arrival)), bool)
        return everything if self.kept is None else self.kept


def _latency_plot(cases: Sequence[Case], slo: Mapping[str, float]) -> Plot:
    alone = len(cases) == 1
    panels: dict[str, dict[str, np.ndarray]] = {}
    for name, values_of in LATENCIES.items():
        for case in cases:
            values = np.where(case.mask, values_of(case.timeline), np.nan)
            if not np.all(np.isnan(values)):
                panels.setdefault(name, {})["" if alone else case.name] = values
    return Plot(
        "latency",
        "Latency",
        "Share of completed requests at or below a latency, log axis. TTFT: arrival to first "
        "token. TPOT: time after the first token divided by the tokens after it. E2E: arrival "
        "to last token." + (" Dots are nearest-rank percentiles." if alone else ""),
        plots.distribution(panels, {k.upper(): v for k, v in slo.items()}),
    )


def _course(case: Case) -> over_time.Course:
    counts = {"prefill_engines": case.prefill_engines, "decode_engines": case.decode_engines}
    goals = case.summary["slo_seconds"]
    edges = case.busy_edges
    if edges is not None:
        edges = edges - np.asarray(case.timeline.arrival).min() / metrics.NANOSECONDS_PER_SECOND
    return over_time.Course(
        series(case.timeline, **counts),
        progress(case.timeline, metrics.Slo(**goals)),
        bool(goals),
        case.busy,
        case.up,
        edges,
    )


def _over_time_plot(case: Case, course: over_time.Course, alone: bool) -> Plot:
    text = "Requests by state, averaged over 200 bins; waiting is from arrival to the start of prefill. "
    if case.busy:
        text += (
            "Engines at work: share of the time that engines spend in steps, booked where a step "
            "or an uninterrupted run of decode steps ends; what exceeds a full bin is moved to the "
            "bins before it. At work does not mean efficient. "
        )
    else:
        text += (
            "Engines at work: share of engines with at least one request in prefill or decode; "
            "occupied does not mean efficient. "
        )
    text += "Rates in 60 bins: arrivals when they arrive, completions when they finish. "
    if np.any(np.asarray(case.timeline.preemptions) > 0):
        text += "Of a request that is computed again its last pass counts. "
    return Plot(
        "over_time" if alone else f"over_time_{slug(case.name)}",
        "Over time" if alone else f"Over time: {case.name}",
        text + "Warm-up included.",
        over_time.run(course),
    )


def _compared_plot(courses: Mapping[str, over_time.Course]) -> Plot:
    return Plot(
        "compared_over_time",
        "Over time, side by side",
        "Waiting: from arrival to the start of prefill. Goodput: requests within the objectives, "
        "counted when they finish. Tokens not recomputed: of the prompts that arrive then.",
        over_time.compared(courses),
    )


def run_plots(cases: Sequence[Case]) -> list[Plot]:
    """The standard figures of one run, or of several side by side; empty ones are left out."""
    cases = [case for case in cases if case.summary["e2e_seconds"]["count"]]
    if not cases:
        return []
    alone = len(cases) == 1
    made = [_latency_plot(cases, cases[0].summary["slo_seconds"])]
    if any(any(case.summary["stage_seconds"].values()) for case in cases):
        bars = {
            "mean request" if alone else case.name: case.summary["stage_seconds"] for case in cases
        }
        made.append(
            Plot(
                "stages",
                "Where the time goes",
                "Mean seconds of a completed request in each stage; the stages sum to the mean E2E "
                "latency. Work that overlaps a later stage is charged to the stage that ends last.",
                plots.stages(bars),
            )
        )
    courses = {case.name: _course(case) for case in cases}
    if not alone:
        made.append(_compared_plot(courses))
    made += [_over_time_plot(case, courses[case.name], alone) for case in cases]
    if any(case.summary["request_hit_fraction"] for case in cases):
        made.append(
            Plot(
                "hit_rates",
                "Prefix cache, three ways",
                "Requests with any matched block, matched blocks of all full prompt blocks, and "
                "prompt tokens whose prefill was skipped. Only the last one enters capacity.",
                plots.hit_rates({case.name or "run": case.summary for case in cases}),
            )
        )
    return made


def slug(name: str) -> str:
    """`name` as part of a file name: "shared cache" becomes "shared_cache"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def headline(cases: Sequence[Case]) -> dict[str, str]:
    """The few numbers set large at the top of the page."""
    if len(cases) > 1:
        goals = cases[0].summary["slo_seconds"]
        hits = any(case.summary["token_hit_fraction"] for case in cases)
        tiles = {}
        for case in cases:
            s = case.summary
            if goals:
                tiles[f"within objectives, {case.name}"] = quantity(s["goodput_fraction"], "%")
            else:
                tiles[f"TTFT p50, {case.name}"] = quantity(s["ttft_seconds"]["p50"], "s")
        for case in cases if hits else ():
            rate = case.summary["token_hit_fraction"]
            tiles[f"tokens hit, {case.name}"] = quantity(rate, "%")
        return tiles
    s = cases[0].summary
    tiles = {
        "completed": f"{s['completed']:,} of {s['requests']:,}",
        "TTFT p50": quantity(s["ttft_seconds"]["p50"], "s"),
        "TTFT p99": quantity(s["ttft_seconds"]["p99"], "s"),
        "TPOT p50": quantity(s["tpot_seconds"]["p50"], "s"),
        "output tokens/s": quantity(s["output_tokens_per_second"]),
    }
    if s["goodput_per_second"] is not None:
        tiles["goodput"] = quantity(s["goodput_per_second"], "/s")
    return tiles


def comparison_rows(cases: Sequence[Case]) -> list[dict[str, str]]:
    """Counts, rates and hits of every case, one column each: {what, case, case, ...}."""
    each = [{row["what"]: row["value"] for row in summary_rows(case.summary)} for case in cases]
    order = list(dict.fromkeys(what for rows in each for what in rows))
    return [
        {"what": what} | {c.name: rows.get(what, "-") for c, rows in zip(cases, each, strict=True)}
        for what in order
    ]


def case_tables(cases: Sequence[Case]) -> list[Table]:
    """Latencies, then counts and rates, of one run or of several side by side."""
    note = "Nearest-rank percentiles, completed only."
    if len(cases) == 1:
        return [
            Table("Latency", latency_rows(cases[0].summary), note),
            Table("Counts and rates", summary_rows(cases[0].summary)),
        ]
    rows = [{"case": c.name, **row} for c in cases for row in latency_rows(c.summary)]
    return [
        Table("Latency", sorted(rows, key=lambda row: list(LATENCIES).index(row["latency"])), note),
        Table("Counts and rates", comparison_rows(cases)),
    ]


def _rows(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    for case in cases:
        for row in records.request_rows(case.timeline):
            yield row if len(cases) == 1 else {"case": case.name, **row}


def _warnings(cases: Sequence[Case]) -> list[str]:
    """What holds for every case once, and the rest with the names of the cases it holds for."""
    names: dict[str, list[str]] = {}
    for case in cases:
        for text in warnings(case.summary, case.timeline, case.mask):
            names.setdefault(text, []).append(case.name)
    return [
        text if len(of) == len(cases) else f"{', '.join(of)}: {text}" for text, of in names.items()
    ]


def write_cases(
    workdir: pathlib.Path,
    title: str,
    cases: Sequence[Case],
    *,
    subtitle: str = "",
    plots_first: Sequence[Plot] = (),
    tables_more: Sequence[Table] = (),
    claims_more: Sequence[str] = (),
    warnings_more: Sequence[str] = (),
    not_modelled: Sequence[str] = (),
    provenance: Sequence[Mapping[str, Any]] = (),
) -> list[pathlib.Path]:
    """Writes summary.json, results.jsonl(.gz), plots/*.png and report.html; returns their paths.

    summary.json holds the first case's numbers at the top, and with several cases all of them
    under `cases` by name. config.json is not written here: it must exist before the run starts
    (experiments' harness).

    Raises:
      records.WriteError: a file could not be written; the earlier ones are complete.
    """
    alone = len(cases) == 1
    environment = records.environment()
    told = {case.name: case.summary for case in cases}
    sentences = [*claims_more, *(claims(cases[0].summary) if alone else comparison(told))]
    found = [*warnings_more, *_warnings(cases)]
    if not_modelled:
        sentences.append(f"Not modelled here: {'; '.join(not_modelled)}.")
    content = {**cases[0].summary, "claims": sentences, "warnings": found}
    if not alone:
        content |= {"case": cases[0].name, "cases": told}
    paths = [workdir / "summary.json"]
    records.write_json(paths[0], {**environment, "title": title, **content})
    count = sum(len(np.asarray(case.timeline.arrival)) for case in cases)
    paths.append(records.write_jsonl(workdir / "results.jsonl", _rows(cases), count))
    drawn = [*plots_first, *run_plots(cases)]
    paths += write_plots(workdir, drawn)
    tables = [*case_tables(cases), *tables_more]
    page = Page(
        title, subtitle, headline(cases), sentences, found, drawn, tables, provenance, environment
    )
    write(workdir / "report.html", page)
    return [*paths, workdir / "report.html"]


def write_run(
    workdir: pathlib.Path,
    title: str,
    t: metrics.RequestTimeline,
    summary: Mapping[str, Any],
    *,
    kept: np.ndarray | None = None,
    prefill_engines: int = 0,
    decode_engines: int = 0,
    **more: Any,
) -> list[pathlib.Path]:
    """`write_cases` of a single run; `more` are its keywords."""
    case = Case(
        "", t, summary, kept, prefill_engines=prefill_engines, decode_engines=decode_engines
    )
    return write_cases(workdir, title, [case], **more)


def write_plots(workdir: pathlib.Path, drawn: Sequence[Plot]) -> list[pathlib.Path]:
    """Each figure as plots/<name>.png; returns the paths."""
    paths = []
    for plot in drawn:
        paths.append(workdir / "plots" / f"{plot.name}.png")
        image = style.png(plot.figure)
        with records.atomic(paths[-1]) as file:
            file.write(image)
    return paths
