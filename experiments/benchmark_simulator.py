r"""Our simulator against the field's fastest, alternating in one run, one core each.

    python -m experiments.benchmark_simulator --peer_python=dynamo-venv/bin/python
    python -m experiments.benchmark_simulator --scaling

Workloads: `w2` is the Azure LLM 2023 conversation hour on 8 co-located workers, round robin;
`w3` is the Mooncake conversation trace on 4 prefill and 4 decode workers with a prefix cache and
cache-aware routing. The peer is Dynamo's offline replay 1.4.2 (Rust, Apache-2.0), installed apart:

    python3.11 -m venv dynamo-venv
    dynamo-venv/bin/pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2

Loop seconds are each program's own: the run of the simulation, without reading the trace and, for
ours, without compilation; `process s` is everything from start to exit. Both simulate the same
requests under their own cost models, so TTFT and TPOT are shown to be read, not to be equal.
The script records and never judges: benchmark.json holds every repeat and every failure. About
two minutes for three repeats of both workloads.
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
SCALES = (10_000, 100_000, 1_000_000)

_TRACES = flags.DEFINE_string("traces", "configs/traces", "Folder of the trace files.")
_PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "Interpreter with the peer.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each simulator, alternating.", 1)
_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Which of w2, w3 to run.")
_WORKDIR = flags.DEFINE_string("workdir", "/tmp/benchmark_simulator", "Where records go.")
_SCALING = flags.DEFINE_bool("scaling", False, "Time ours on 1e4, 1e5 and 1e6 requests instead.")


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


def run_ours(config: str, overrides: Sequence[str]) -> dict:
    """One run of experiments.simulate on one core, from its summary.json."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.simulate"]
        command += [f"--config={config}", f"--workdir={folder}", *overrides]
        run = run_pinned(command, {"JAX_PLATFORMS": "cpu"})
        summary = pathlib.Path(folder, "summary.json")
        measured = json.loads(summary.read_text()) if summary.exists() else {}
    return record(run, {**measured, "loop_seconds": measured.get("simulate_seconds")})


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


def compare() -> list[dict]:
    """Both simulators on each workload, alternating, so that a busy machine slows both."""
    has_peer = not run_pinned([_PEER_PYTHON.value, "-c", "import dynamo.replay"]).returncode
    if not has_peer:
        print(NOT_INSTALLED.format(_PEER_PYTHON.value))
    rows = []
    for name in _WORKLOADS.value:
        config, file, arguments = WORKLOADS[name]
        trace = pathlib.Path(_TRACES.value, file)
        ours, peer = [], []
        for _ in range(_REPEATS.value):
            if has_peer:
                peer.append(run_peer(trace, arguments))
            ours.append(run_ours(config, ()))
        rows += [row(name, "dynamo", peer)] if has_peer else []
        rows.append(row(name, "ours", ours))
    return rows


def scale() -> list[dict]:
    """Ours on growing synthetic workloads: seconds per request ought to stay flat."""
    return [
        row(f"{count:.0e}", "ours", [run_ours("configs/scaling.py", [f"--requests={count}"])])
        for count in SCALES
    ]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; see --help")
    if unknown := set(_WORKLOADS.value) - set(WORKLOADS):
        raise app.UsageError(f"--workloads={unknown}: choose from {', '.join(WORKLOADS)}")
    load = os.getloadavg()[0]
    rows = scale() if _SCALING.value else compare()
    print_rows(rows)
    print(
        f"\nLoad average at the start: {load:.2f} on {os.cpu_count()} cores. Ratios come from one "
        "alternating run;\nonly they, not the seconds, carry over to another machine."
    )
    target = pathlib.Path(_WORKDIR.value, "benchmark.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"schema": 1, "load_average": load, "rows": rows}, indent=1))
    print(f"wrote {target}")


if __name__ == "__main__":
    app.run(main)
