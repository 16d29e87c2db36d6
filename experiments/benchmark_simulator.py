r"""Our simulator against the field's fastest, alternating in one run, one core each.

    python -m experiments.benchmark_simulator --peer_python=dynamo-venv/bin/python
    python -m experiments.benchmark_simulator --scaling

Workloads: `w2` is the Azure LLM 2023 conversation hour on 8 co-located workers, round robin;
`w3` is the Mooncake conversation trace on 4 prefill and 4 decode workers with a prefix cache and
cache-aware routing. The peer is Dynamo's offline replay 1.4.2 (Rust, Apache-2.0), installed apart:

    python3.11 -m venv dynamo-venv
    dynamo-venv/bin/pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2

Loop seconds are each program's own: the run of the simulation, without reading the trace and, for
ours, without compilation (of which the first repeat's is kept on disk for the others);
`process s` is the whole process at its quickest, so with that disk cache. Both simulate the same
requests under their own cost models, so TTFT and TPOT are shown to be read, not to be equal.
The script records and never judges: benchmark.json holds every repeat and every failure. About
three minutes for three repeats of both workloads.
"""

import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence

from absl import app, flags

from experiments.pinned import Run, run_pinned

PEER = pathlib.Path(__file__).parent / "peers" / "dynamo_replay.py"
NOT_INSTALLED = (
    "peer not run: `dynamo` is not importable by --peer_python={!r}. Install it in a venv of its "
    "own: pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2"
)
SPLIT = ("--prefill_workers=4", "--decode_workers=4", "--router=kv_router")
WORKLOADS = {  # name: (our config, trace file, the peer's arguments)
    "w2": ("configs/w2_azure.py", "azure_llm_2023_conv.csv.gz", ("--workers=8",)),
    "w3": ("configs/w3_mooncake_pd.py", "mooncake_conversation_trace.jsonl.gz", SPLIT),
}

_TRACES = flags.DEFINE_string("traces", "configs/traces", "Folder of the trace files.")
_PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "Interpreter with the peer.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each simulator, alternating.", 1)
_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Which of w2, w3 to run.")
_WORKDIR = flags.DEFINE_string("workdir", "/tmp/benchmark_simulator", "Where records go.")
_SCALING = flags.DEFINE_bool("scaling", False, "Time ours on growing numbers of requests instead.")
_SCALES = flags.DEFINE_list("scales", ["1e4", "1e5", "1e6"], "Requests of the scaling runs.")


def record(run: Run, measured: dict) -> dict:
    """One repeat as written to benchmark.json: measured numbers, or the end of stderr."""
    outside = {
        "process_seconds": run.process_seconds,
        "process_cpu_seconds": run.process_cpu_seconds,
        "process_peak_mib": run.process_peak_mib,
    }
    if run.returncode:
        return {"error": run.stderr.strip()[-500:] or f"exit status {run.returncode}", **outside}
    return {**measured, **outside}


def ours(summary: dict) -> dict:
    """A summary.json of experiments.simulate under the names of this benchmark."""
    return {
        "simulator": "ours",
        "requests": summary["requests"],
        "completed": summary["completed"],
        "loop_seconds": summary["simulate_seconds"],
        "compile_seconds": summary["compile_seconds"],
        "requests_per_second": summary["simulated_requests_per_second"],
        "simulated_seconds": summary["window"]["seconds"],
        "mean_ttft_seconds": summary["ttft_seconds"]["mean"],
        "p99_ttft_seconds": summary["ttft_seconds"]["p99"],
        "mean_tpot_seconds": summary["tpot_seconds"]["mean"],
        "mean_e2e_seconds": summary["e2e_seconds"]["mean"],
        "token_hit_ratio": summary["token_hit_fraction"],
    }


def run_ours(config: str, overrides: Sequence[str], cache: str) -> dict:
    """One run of experiments.simulate on one core, from its summary.json.

    Repeats find the first one's compilation in the folder `cache`.
    """
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.simulate"]
        command += [f"--config={config}", f"--workdir={folder}", *overrides]
        run = run_pinned(command, environment)
        summary = pathlib.Path(folder, "summary.json")
        measured = ours(json.loads(summary.read_text())) if summary.exists() else {}
    return record(run, measured)


def run_peer(trace: pathlib.Path, arguments: Sequence[str]) -> dict:
    """One run of the peer's adapter on one core; the silent log level is in its favour."""
    command = [_PEER_PYTHON.value, str(PEER), f"--trace={trace}", *arguments]
    run = run_pinned(command, {"DYN_LOG": "error"})
    return record(run, {} if run.returncode else json.loads(run.stdout))


def row(workload: str, simulator: str, runs: Sequence[dict]) -> dict:
    """Minimum and median over the repeats that ended well; None where there were none."""
    good = [run for run in runs if run.get("loop_seconds")]
    loops = [run["loop_seconds"] for run in good]
    return {
        "workload": workload,
        "simulator": simulator,
        "completed": good[0].get("completed") if good else None,
        "loop_seconds_min": min(loops, default=None),
        "loop_seconds_median": statistics.median(loops) if good else None,
        "requests_per_second": good[0]["completed"] / min(loops) if good else None,
        "process_seconds": min((run["process_seconds"] for run in good), default=None),
        "process_peak_mib": max((run["process_peak_mib"] for run in good), default=None),
        "runs": list(runs),
    }


def cell(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
    """A right-aligned number, or a dash for what a simulator does not report."""
    return f"{'-':>{width}}" if value is None else f"{value * factor:>{width},.{digits}f}"


def speed_line(this: dict, peer: dict | None) -> str:
    """Speeds of one row; the ratio is the peer's least loop seconds over this row's."""
    head = f"{this['workload']:<9}{this['simulator']:<9}"
    if this["loop_seconds_min"] is None:
        errors = {str(run.get("error", "no loop_seconds reported")) for run in this["runs"]}
        return head + "failed: " + "; ".join(error.splitlines()[-1] for error in errors)
    ratio = peer["loop_seconds_min"] / this["loop_seconds_min"] if peer else None
    return (
        head
        + cell(this["completed"], 10, 0)
        + cell(this["loop_seconds_min"], 12, 3)
        + cell(this["loop_seconds_median"], 9, 3)
        + cell(this["requests_per_second"], 12, 0)
        + cell(this["process_seconds"], 11, 2)
        + cell(this["process_peak_mib"], 10, 0)
        + (cell(ratio, 7, 1) + "x" if ratio else f"{'-':>8}")
    )


def outcome_line(this: dict) -> str:
    """What the first good run says about the simulated service."""
    run = next(run for run in this["runs"] if run.get("loop_seconds"))
    return (
        f"{this['workload']:<9}{this['simulator']:<9}"
        + cell(run.get("simulated_seconds"), 13, 1)
        + cell(run.get("mean_ttft_seconds"), 14, 2, 1e3)
        + cell(run.get("mean_tpot_seconds"), 14, 3, 1e3)
        + cell(run.get("token_hit_ratio"), 11, 3)
    )


def print_rows(rows: Sequence[dict]) -> None:
    """Two tables: how fast each simulator ran, and what it says of the service."""
    good = [this for this in rows if this["loop_seconds_min"] is not None]
    peers = {this["workload"]: this for this in good if this["simulator"] == "dynamo"}
    print(
        f"{'workload':<9}{'by':<9}{'completed':>10}{'loop s min':>12}{'median':>9}"
        f"{'requests/s':>12}{'process s':>11}{'peak MiB':>10}{'ratio':>8}"
    )
    for this in rows:
        print(speed_line(this, peers.get(this["workload"])))
    if not good:
        return
    print(
        f"\n{'workload':<9}{'by':<9}{'simulated s':>13}{'mean TTFT ms':>14}"
        f"{'mean TPOT ms':>14}{'token hits':>11}"
    )
    for this in good:
        print(outcome_line(this))


def compare(cache: str) -> list[dict]:
    """Both simulators on each workload, alternating, so that a busy machine slows both."""
    has_peer = not run_pinned([_PEER_PYTHON.value, "-c", "import dynamo.replay"]).returncode
    if not has_peer:
        print(NOT_INSTALLED.format(_PEER_PYTHON.value))
    rows = []
    for name in _WORKLOADS.value:
        config, file, arguments = WORKLOADS[name]
        trace = pathlib.Path(_TRACES.value, file)
        mine, peer = [], []
        for _ in range(_REPEATS.value):
            if has_peer:
                peer.append(run_peer(trace, arguments))
            mine.append(run_ours(config, (), cache))
        rows += [row(name, "dynamo", peer)] if has_peer else []
        rows.append(row(name, "ours", mine))
    return rows


def scale(cache: str) -> list[dict]:
    """Ours on growing synthetic workloads: seconds per request ought to stay flat."""
    counts = [int(float(count)) for count in _SCALES.value]
    rows = []
    for count in counts:
        overrides = [f"--requests={count}"]
        repeats = range(_REPEATS.value)
        runs = [run_ours("configs/scaling.py", overrides, cache) for _ in repeats]
        rows.append(row(f"{count:,}", "ours", runs))
    return rows


def print_scaling(rows: Sequence[dict]) -> None:
    """Cost per request and memory by the number of requests."""
    print(
        f"{'requests':>10}{'loop s min':>12}{'median':>9}{'us/request':>12}{'compile s':>11}"
        f"{'peak MiB':>10}"
    )
    costs = []
    for this in rows:
        if this["loop_seconds_min"] is None:
            print(f"{this['workload']:>10}  " + speed_line(this, None))
            continue
        costs.append(this["loop_seconds_min"] / this["completed"])
        print(
            f"{this['workload']:>10}"
            + cell(this["loop_seconds_min"], 12, 3)
            + cell(this["loop_seconds_median"], 9, 3)
            + cell(costs[-1], 12, 2, 1e6)
            + cell(this["runs"][0].get("compile_seconds"), 11, 1)
            + cell(this["process_peak_mib"], 10, 0)
        )
    if len(costs) > 1:
        print(f"cost per request: the largest is {max(costs) / min(costs):.2f} times the smallest")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; see --help")
    if unknown := set(_WORKLOADS.value) - set(WORKLOADS):
        raise app.UsageError(f"--workloads={unknown}: choose from {', '.join(WORKLOADS)}")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        rows = scale(cache) if _SCALING.value else compare(cache)
    (print_scaling if _SCALING.value else print_rows)(rows)
    end = os.getloadavg()[0]
    print(
        f"\nLoad average {load:.2f} at the start and {end:.2f} at the end, on {os.cpu_count()} "
        "cores. Ratios come from one\nalternating run; only they, not the seconds, carry over to "
        "another machine."
    )
    target = pathlib.Path(_WORKDIR.value, "benchmark.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": 1, "load_average": load, "load_average_end": end, "rows": rows}
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    app.run(main)
