"""A run's directory: summary, per-request records, figures and the page, in one call."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.report import plots, records, style
from deepinfer_jax.report.claims import claims, warnings
from deepinfer_jax.report.page import Page, Plot, Table, write
from deepinfer_jax.report.series import series
from deepinfer_jax.report.table import latency_rows, quantity, summary_rows


def run_plots(
    t: metrics.RequestTimeline,
    summary: Mapping[str, Any],
    kept: np.ndarray,
    *,
    prefill_engines: int = 0,
    decode_engines: int = 0,
) -> list[Plot]:
    """The standard figures of one run; those without data are left out.

    Args:
      summary: `metrics.summarise` of the same timeline.
      kept: bool [Q], `metrics.window` of the same warm-up.
    """
    if not summary["e2e_s"]["count"]:
        return []
    latency = {
        name: {"": np.where(kept, values, np.nan)}
        for name, values in (
            ("TTFT", metrics.ttft(t)),
            ("TPOT", metrics.tpot(t)),
            ("E2E", metrics.e2e(t)),
        )
        if np.any(kept & ~np.isnan(values))
    }
    slo = {k.upper(): v for k, v in (summary["goodput"] or {"slo": {}})["slo"].items()}
    made = [
        Plot(
            "latency",
            "Latency",
            "Share of completed requests at or below a latency, log axis. TTFT: arrival to first "
            "token. TPOT: time after the first token divided by the tokens after it. E2E: arrival "
            "to last token. Dots are nearest-rank percentiles.",
            plots.distribution(latency, slo),
        )
    ]
    if any(summary["stages_s"].values()):
        made.append(
            Plot(
                "stages",
                "Where the time goes",
                "Mean seconds of a completed request in each stage; the stages sum to the mean E2E "
                "latency. Work that overlaps a later stage is charged to the stage that ends last.",
                plots.stages({"mean request": summary["stages_s"]}),
            )
        )
    over = series(t, prefill_engines=prefill_engines, decode_engines=decode_engines)
    made.append(
        Plot(
            "over_time",
            "Over time",
            "Time averages over 200 bins, warm-up included. Left: requests by state; waiting is "
            "from arrival to the start of prefill. Right: share of engines with at least one "
            "request in prefill or decode; occupied does not mean efficient.",
            plots.over_time(over),
        )
    )
    if summary["hit_rates"]["requests"]:
        made.append(
            Plot(
                "hit_rates",
                "Prefix cache, three ways",
                "Requests with any matched block, matched blocks of all full prompt blocks, and "
                "prompt tokens whose prefill was skipped. Only the last one enters capacity.",
                plots.hit_rates({"run": summary["hit_rates"]}),
            )
        )
    return made


def headline(summary: Mapping[str, Any]) -> dict[str, str]:
    """The few numbers set large at the top of the page."""
    first, each, rates = summary["ttft_s"], summary["tpot_s"], summary["per_second"]
    tiles = {
        "completed": f"{summary['requests']['completed']:,} of {summary['requests']['total']:,}",
        "TTFT p50": quantity(first["p50"], "s"),
        "TTFT p99": quantity(first["p99"], "s"),
        "TPOT p50": quantity(each["p50"], "s"),
        "output tokens/s": quantity(rates["output_tokens"]),
    }
    if summary["goodput"]:
        tiles["goodput"] = quantity(summary["goodput"]["per_second"], "/s")
    return tiles


def write_run(
    workdir: pathlib.Path,
    title: str,
    t: metrics.RequestTimeline,
    summary: Mapping[str, Any],
    *,
    kept: np.ndarray | None = None,
    subtitle: str = "",
    extra_summary: Mapping[str, Any] | None = None,
    plots_more: Sequence[Plot] = (),
    tables_more: Sequence[Table] = (),
    warnings_more: Sequence[str] = (),
    not_modelled: Sequence[str] = (),
    provenance: Sequence[Mapping[str, Any]] = (),
    prefill_engines: int = 0,
    decode_engines: int = 0,
) -> list[pathlib.Path]:
    """Writes summary.json, results.jsonl(.gz), plots/*.png and report.html; returns their paths.

    config.json is not written here: it must exist before the run starts (experiments' harness).
    `extra_summary` adds keys to summary.json (for example NIC utilisation and GPU hours).

    Raises:
      records.WriteError: a file could not be written; the earlier ones are complete.
    """
    kept = np.ones(len(np.asarray(t.arrival)), bool) if kept is None else kept
    environment = records.environment()
    found = [*warnings_more, *warnings(summary, t, kept)]
    sentences = claims(summary, not_modelled=not_modelled)
    content = {**summary, **(extra_summary or {}), "claims": sentences, "warnings": found}
    paths = [workdir / "summary.json"]
    records.write_json(paths[0], {**environment, "title": title, **content})
    count = len(np.asarray(t.arrival))
    paths.append(records.write_jsonl(workdir / "results.jsonl", records.request_rows(t), count))
    engines = {"prefill_engines": prefill_engines, "decode_engines": decode_engines}
    drawn = [*run_plots(t, summary, kept, **engines), *plots_more]
    paths += write_plots(workdir, drawn)
    page = Page(
        title,
        subtitle,
        headline(summary),
        sentences,
        found,
        drawn,
        [
            Table("Latency", latency_rows(summary), "Nearest-rank percentiles, completed only."),
            Table("Counts and rates", summary_rows(summary)),
            *tables_more,
        ],
        provenance,
        environment,
    )
    write(workdir / "report.html", page)
    return [*paths, workdir / "report.html"]


def write_plots(workdir: pathlib.Path, drawn: Sequence[Plot]) -> list[pathlib.Path]:
    """Each figure as plots/<name>.png; returns the paths."""
    paths = []
    for plot in drawn:
        paths.append(workdir / "plots" / f"{plot.name}.png")
        image = style.png(plot.figure)
        with records.atomic(paths[-1]) as file:
            file.write(image)
    return paths
