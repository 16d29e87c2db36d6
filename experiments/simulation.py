"""What `experiments.simulate` does: cases from a config, their runs, tables and the report."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from ml_collections import config_dict

from deepinfer_jax import aiperf, metrics
from deepinfer_jax.cost.capacity import decode_gpus, prefill_gpus
from deepinfer_jax.report import beside, trace_events
from deepinfer_jax.report.page import Table
from deepinfer_jax.report.table import latency_rows, quantity, summary_rows, table
from deepinfer_jax.report.write import Case, comparison_rows, slug, write_cases
from deepinfer_jax.simulator import simulate
from deepinfer_jax.simulator.plain_config import choose, merged
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.tokens import token_times
from deepinfer_jax.simulator.traces import Trace
from deepinfer_jax.simulator.translate import Translation, translate
from deepinfer_jax.simulator.usage import (
    busy_over_time,
    engine_rows,
    scaling_rounds,
    up_over_time,
    usage,
)
from deepinfer_jax.simulator.workload import Workload, workload
from experiments import encoding, harness

OF_THE_EXPERIMENT = (
    "name",
    "title",
    "subtitle",
    "provenance",
    "workload",
    "cases",
    "slo",
    "warmup_seconds",
    "capacity",
    "compile",
    "resilience",
    "encoders",
)
NOT_MODELLED = ("network jitter",)
ONE_TRANSFER = "erasure-coded reads (a fetch is one transfer here)"
UNSEEN = "image encoding (this config has no encoders)"
FIXED = "failures and scaling (this config has none)"

COMPILE = ("quick", "optimised")
"""quick: three times faster to compile, several times slower to run; the results are equal."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """One case ready to run."""

    translation: Translation
    trace: Trace
    load: Workload
    slo: metrics.Slo
    warmup_seconds: float
    quick: bool
    stage: encoding.Stage | None = None  # where images are encoded first


@dataclasses.dataclass(frozen=True)
class Result:
    """One case that ran, and the tables that only it has."""

    case: Case
    trace: str
    facts: list[dict[str, str]]
    engines: list[dict[str, Any]]
    rounds: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of scaling


def load_cases(
    config: config_dict.ConfigDict, *, trace: str = "", requests: int = 0, seed: int = 0
) -> dict[str, Prepared]:
    """Every case of a config by name ("" for the only one).

    Raises:
      ValueError: the config or the trace needs mending.
    """
    plain = config.copy_and_resolve_references().to_dict()
    changes = plain.get("cases") or {"": {}}
    base = {key: value for key, value in plain.items() if key not in ("cases", "provenance")}
    traces: dict[str, tuple[Trace, bool]] = {}
    prepared = {}
    for name, change in changes.items():
        whole = merged(base, change)
        of_service = {k: v for k, v in whole.items() if k not in OF_THE_EXPERIMENT}
        wanted = workload_values(whole, trace, requests)
        if repr(wanted) not in traces:
            described = source(wanted)
            traces[repr(wanted)] = described.trace(seed), described.closed_loop
        prepared[name.replace("_", " ")] = _prepared(
            translate(service(of_service), seed), *traces[repr(wanted)], whole, seed
        )
    return prepared


def workload_values(whole: Mapping[str, Any], trace: str, requests: int) -> dict[str, Any]:
    """The section `workload`, or a file of one's own with the factors the section has for a trace."""
    wanted = dict(whole.get("workload", {}))
    if trace:  # a file of one's own comes as it is, except for the factors of a trace workload
        keep = ("rate_factor", "input_factor", "output_factor", "on_invalid", "closed_loop")
        from_file = wanted.get("kind", "trace") == "trace"
        wanted = {k: wanted[k] for k in keep if from_file and k in wanted}
        wanted |= {"kind": "trace", "path": trace}
    if requests:
        wanted["requests"] = requests
    return wanted


def _prepared(
    made: Translation, trace: Trace, closed: bool, whole: Mapping[str, Any], seed: int
) -> Prepared:
    cluster = made.cluster
    stage = encoding.stage(trace, whole.get("encoders"), closed, seed)
    trace = stage.trace if stage else trace
    caching = cluster.cache_scope != "none"
    load = workload(trace, cluster.block_tokens, cluster.reserve, caching, closed_loop=closed)
    names = ("ttft", "tpot", "e2e")
    wanted = whole.get("slo") or {}
    for name in wanted:
        choose("slo", name, names)
    slo = metrics.Slo(**{name: value for name, value in wanted.items() if value})
    quick = choose("compile", whole.get("compile", "optimised"), COMPILE) == "quick"
    return Prepared(made, trace, load, slo, float(whole.get("warmup_seconds", 0.0)), quick, stage)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A line on a terminal's stderr that counts the seconds of work without steps to count."""
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(0.5):
            sys.stderr.write(f"\r\x1b[K{text}, {time.monotonic() - began:.0f} s")
            sys.stderr.flush()

    thread = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def run_cases(cases: Mapping[str, Prepared]) -> list[Result]:
    """Compiles what cases need, each program once, then simulates the cases one after the other."""
    most = max(len(one.trace) for one in cases.values())
    parts = {
        name: simulate.numbers(one.translation.cluster, one.load) for name, one in cases.items()
    }
    first: dict[tuple[Any, bool], Prepared] = {}
    for name, one in cases.items():
        first.setdefault((parts[name][0], one.quick), one)
    with (
        waiting(f"compiling {len(first)} program(s) for up to {most:,} requests"),
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        programs = dict(zip(first, pool.map(_compiled, first.values()), strict=True))
    results = []
    for name, one in cases.items():
        shape, arguments = parts[name]
        ready = dataclasses.replace(programs[shape, one.quick], arguments=arguments)
        with waiting(f"simulating {name or len(one.trace)}"):
            results.append(_result(name, one, ready))
    return results


def _compiled(one: Prepared) -> simulate.Prepared:
    options: dict[str, bool | str | int] = {}
    if one.quick:
        options["xla_backend_optimization_level"] = 0
    return simulate.prepare(one.translation.cluster, one.load, options=options)


def _result(name: str, one: Prepared, ready: simulate.Prepared) -> Result:
    run, seconds = ready.run()
    run = one.stage.as_sent(run) if one.stage else run
    cluster = one.translation.cluster
    t = run.requests
    summary = metrics.summarise(
        t,
        slo=one.slo,
        warmup_seconds=one.warmup_seconds,
        block_tokens=cluster.block_tokens,
    )
    speed = {
        "simulate_seconds": seconds,
        "compile_seconds": ready.compile_seconds,
        "simulated_requests_per_second": summary["requests"] / seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    used = usage(run, cluster, one.translation.gpus)
    kept = metrics.window(t, warmup_seconds=one.warmup_seconds)
    tokens = token_times(run, cluster) if cluster.token_times else None
    if tokens is not None:
        used |= {"itl_seconds": metrics.summary(metrics.itl(*tokens))}
    used |= one.stage.summary() if one.stage else {}
    used |= {"aiperf": aiperf.summarise(t, one.slo, kept, tokens)}
    modes = np.asarray(cluster.modes)
    busy, edges = busy_over_time(run, cluster)
    case = Case(
        name,
        t,
        {**summary, **used, **speed, "left_out_rows": len(one.trace.rejected)},
        kept,
        busy,
        edges,
        up_over_time(run, cluster),
        prefill_engines=int(np.sum(modes != 1)),
        decode_engines=int(np.sum(modes != 0)),
    )
    return Result(
        case,
        pathlib.Path(one.trace.source).name,
        _facts(one, case),
        engine_rows(run, cluster),
        scaling_rounds(run),
    )


def _facts(one: Prepared, case: Case) -> list[dict[str, str]]:
    trace, made, s = one.trace, one.translation, case.summary
    hours = quantity(float(np.ptp(np.asarray(case.timeline.arrival))) / 1e9, "s")
    error = made.cost_error
    rows = [
        ("requests", f"{len(trace):,} over {hours}"),
        ("rows left out", quantity(len(trace.rejected))),
        ("mean input, output tokens", f"{trace.input_tokens.mean():,.0f}, "
         f"{trace.output_tokens.mean():,.0f}"),
        ("engines x ranks", f"{made.cluster.engines} x {made.cluster.ranks}"),
        ("GPUs, GPU-hours", f"{s['gpus']:,}, {s['gpu_hours']:,.1f}"),
        ("prefill, decode busy", f"{quantity(s['prefill_busy_fraction'], '%')}, "
         f"{quantity(s['decode_busy_fraction'], '%')}"),
        ("slots in use", quantity(s["slot_fraction"], "%")),
        ("fetched, of it state", f"{quantity(s['fetched_bytes'] + s['state_fetched_bytes'], 'B')}, "
         f"{quantity(s['state_fetched_bytes'], 'B')}"),
        ("handed off", quantity(s["handed_off_bytes"], "B")),
        ("compiled, simulated in", f"{quantity(s['compile_seconds'], 's')}, "
         f"{quantity(s['simulate_seconds'], 's')}"),
        ("simulated requests per second", quantity(s["simulated_requests_per_second"], "/s")),
    ]  # fmt: skip
    rows += _rows_of_records(s) + encoding.rows(s)
    if made.kv_from_hbm:
        rows.insert(5, ("KV blocks per rank, from HBM", f"{made.kv_from_hbm:,}"))
    if error:
        medians = f"{quantity(error.prefill.median, '%')}, {quantity(error.decode.median, '%')}"
        rows.insert(5, ("error of prefill, decode steps", medians))
    return [{"what": what, "value": value} for what, value in rows]


def _rows_of_records(s: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What only some runs have to tell: gaps between tokens, lives of engines."""
    rows = []
    if "itl_seconds" in s:
        gaps = s["itl_seconds"]
        text = ", ".join(quantity(gaps[p], "s") for p in ("mean", "p50", "p99"))
        rows.append(("ITL mean, p50, p99", text))
    if "storage_reads" in s:
        text = f"{quantity(s['storage_read_seconds'], 's')}, {quantity(s['storage_busy_fraction'], '%')}"
        rows.append(("read from storage in, nodes busy", text))
    if "sweeps" in s:
        text = f"{s['blocks_expired']:,}, {s['blocks_reclaimed']:,}"
        rows.append(("blocks expired, reclaimed", text))
    if "crashes" in s:
        rows += [
            ("GPU-hours starting, leaving", f"{s['gpu_hours_starting']:,.1f}, "
             f"{s['gpu_hours_leaving']:,.1f}"),
            ("requests hit by a crash, forwarded", f"{s['crashes']:,}, {s['forwarded']:,}"),
            ("hits cut by storage nodes", quantity(s["unreadable_matches"])),
        ]  # fmt: skip
    return rows


def capacity_rows(
    wanted: Mapping[str, Any] | None, results: Sequence[Result]
) -> list[dict[str, str]]:
    """GPUs that the offered load needs at the speeds in `wanted`, by each case's token hits.

    `wanted`: prefill_tokens_per_second_per_gpu, decode_tokens_per_second_per_gpu, utilisation.
    """
    if not wanted:
        return []
    rows = []
    for result in results:
        s, t = result.case.summary, result.case.timeline
        arrival = np.asarray(t.arrival)
        rate = (len(arrival) - 1) / max((arrival.max() - arrival.min()) / 1e9, 1e-9)
        share, target = s["token_hit_fraction"] or 0.0, wanted["utilisation"]
        prefill = prefill_gpus(
            rate,
            float(np.mean(t.input_tokens)),
            share,
            wanted["prefill_tokens_per_second_per_gpu"],
            target,
        )
        decode = decode_gpus(
            rate,
            float(np.mean(np.asarray(t.output_tokens))),
            wanted["decode_tokens_per_second_per_gpu"],
            target,
        )
        rows.append(
            {
                "case": result.case.name or "run",
                "requests/s offered": quantity(rate),
                "tokens hit": quantity(share, "%"),
                "prefill GPUs": quantity(prefill),
                "decode GPUs": quantity(decode),
            }
        )
    return rows


def side_by_side(results: Sequence[Result]) -> list[dict[str, str]]:
    """The facts of every case, one column each."""
    if len(results) == 1:
        return results[0].facts
    each = [{row["what"]: row["value"] for row in result.facts} for result in results]
    order = dict.fromkeys(what for facts in each for what in facts)
    return [
        {"what": what}
        | {r.case.name: facts.get(what, "-") for r, facts in zip(results, each, strict=True)}
        for what in order
    ]


def show(results: Sequence[Result], capacity: Sequence[Mapping[str, str]]) -> None:
    """The tables, on the terminal."""
    print(table(side_by_side(results), title=f"Run of {results[0].trace}"), end="\n\n")
    for result in results:
        name = f", {result.case.name}" if result.case.name else ""
        print(table(latency_rows(result.case.summary), title=f"Latency{name}"), end="\n\n")
    cases = [result.case for result in results]
    rows = summary_rows(cases[0].summary) if len(cases) == 1 else comparison_rows(cases)
    print(table(rows, title="Counts and rates"))
    for result in results:
        name = f", {result.case.name}" if result.case.name else ""
        print("\n" + table(result.engines[:16], title=f"Engines{name}"))
        if len(result.engines) > 16:
            print(f"... and {len(result.engines) - 16} more")
    if capacity:
        print("\n" + table(capacity, title="GPUs that the offered load needs"))


def _absent(results: Sequence[Result]) -> tuple[str, ...]:
    """What the simulator knows and no case of this report has."""
    known = {"crashes": FIXED, "images": UNSEEN, "storage_reads": ONE_TRANSFER}
    return tuple(
        text for key, text in known.items() if not any(key in r.case.summary for r in results)
    )


def write_report(
    run: harness.Run,
    results: Sequence[Result],
    capacity: Sequence[Mapping[str, str]],
    first: Sequence[Table] = (),
    **more: Any,
) -> pathlib.Path:
    """All files of the run, `more` of `report.write.write_cases` added; returns the page's path."""
    assert run.workdir is not None
    tables = [Table(f"Run of {results[0].trace}", side_by_side(results))]
    tables += [
        Table(f"Engines{': ' if r.case.name else ''}{r.case.name}", r.engines) for r in results
    ]
    told = {r.case.name: r.case.summary for r in results}
    tables.append(Table("As AIPerf defines it", beside.rows(told), beside.NOTE))
    if capacity:
        note = (
            "ceil(rate x tokens x (1 - hit) / (utilisation x speed)), the chapter, section 11.2.1, "
            "with the offered rate, the measured token hits and the speeds of `capacity`."
        )
        tables.insert(0, Table("GPUs that the offered load needs", capacity, note))
    paths = write_cases(
        run.workdir,
        run.config.title,
        [result.case for result in results],
        subtitle=run.config.get("subtitle", ""),
        tables_more=[*first, *tables],
        not_modelled=NOT_MODELLED + _absent(results),
        provenance=run.provenance,
        **more,
    )
    return paths[-1]


def write_traces(
    workdir: pathlib.Path, results: Sequence[Result], requests: int
) -> list[pathlib.Path]:
    """The first `requests` arrivals of every case as a trace-event file; the files' paths.

    They are large beside the rest of a report, so 0 requests write none.
    """
    paths = []
    for result in results if requests else ():
        name = f"trace_{slug(result.case.name)}" if result.case.name else "trace"
        paths.append(workdir / f"{name}.json.gz")
        engines = [f"engine {row['engine']}, {row['mode']}" for row in result.engines]
        trace_events.write(paths[-1], result.case.timeline, engines, requests=requests)
    return paths
