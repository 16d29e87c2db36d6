"""The simulator's command line: one real run from a config to a report, and what it refuses."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import pytest

from deepinfer_jax.report import records
from experiments import harness, settings, simulation

ROOT = pathlib.Path(__file__).parents[2]
W2 = "configs/w2_azure.py:smoke"
GOOD = [{"timestamp": 100 * i, "input_length": 300 + i, "output_length": 5} for i in range(20)]


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.simulate", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_writes_everything_and_counts_what_cannot_be_held(tmp_path):
    # 16,384 blocks of 64 tokens hold 1,048,576: the second request asks for more.
    giant = {"timestamp": 50, "input_length": 1_048_570, "output_length": 100}
    trace = lines(tmp_path / "own.jsonl", [GOOD[0], giant, *GOOD[1:]])
    workdir = tmp_path / "run"
    done = command(f"--config={W2}", f"--trace={trace}", f"--workdir={workdir}", "--perfetto=7")
    assert done.returncode == 0, done.stderr
    assert "rejected: longer than the KV blocks of a rank" in done.stdout
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["requests"], summary["completed"]) == (21, 20)
    assert summary["rejected"] == {"rejected: longer than the KV blocks of a rank": 1}
    assert summary["lost"] == {}
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        assert summary[name]["count"] == 20
        assert 0 < summary[name]["p50"] <= summary[name]["p90"] <= summary[name]["p99"]
    for name in ("simulate_seconds", "compile_seconds", "simulated_requests_per_second"):
        assert summary[name] > 0
    for name in ("request_hit_fraction", "block_hit_fraction", "token_hit_fraction"):
        assert summary[name] == 0
    # An idle worker's first prompt of 300 tokens: one step of the polynomial, nothing else.
    rows = records.read_jsonl(workdir / "results.jsonl")
    step = 16.50142e-3 + 300 * 15.18344e-6 + 841_998e-15 * 300 * 301 / 2
    assert rows[0]["first_token"] - rows[0]["arrival"] == pytest.approx(step * 1e9, abs=2)
    with gzip.open(workdir / "trace.json.gz", "rt") as file:
        spans = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["request"] for e in spans} == set(range(7)) - {1}
    lasts = sum(e["dur"] for e in spans if e["cat"] == "stage" and e["args"]["request"] == 0)
    assert lasts == pytest.approx((rows[0]["finish"] - rows[0]["arrival"]) / 1000, abs=1e-6)
    page = (workdir / "report.html").read_text()
    assert "1 rejected: longer than the KV blocks of a rank" in page
    assert "As AIPerf defines it" in page
    theirs, first = summary["aiperf"], summary["ttft_seconds"]
    assert theirs["time_to_first_token"]["avg"] == pytest.approx(first["mean"])
    assert theirs["good_request_count"] == summary["goodput_requests"]
    assert summary["gpus"] == 8 and summary["goodput_requests"] == 20
    assert 0 < summary["busy_fraction"] < 1


@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.policy.prefil=pull", "nearest is policy.prefill"),
        ("--config.policy.prefill=round_robbin", "did you mean 'round_robin'"),
    ],
)
def test_a_typo_on_the_command_line_is_one_line(override, message):
    done = command(f"--config={W2}", override)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "the file is empty"),
        ([{"timestamp": 0, "input_length": 5}], "no known format"),
        ([GOOD[0], {"timestamp": 0, "output_length": 5}], "row 2: input_length"),
        ([GOOD[0], {**GOOD[1], "timestamp": -1}], "row 2: timestamp = -1"),
        ([GOOD[0], {**GOOD[1], "input_length": 0}], "row 2: input_length = 0"),
        ([GOOD[0], {**GOOD[1], "output_length": "many"}], "row 2: output_length = many"),
    ],
)
def test_a_bad_trace_is_the_users_to_mend_in_one_line(tmp_path, monkeypatch, rows, message):
    monkeypatch.chdir(ROOT)
    trace = lines(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message) as caught:
        simulation.load_cases(settings.load(W2), trace=str(trace))
    assert harness.is_user_error(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_trace_names_the_file():
    with pytest.raises(FileNotFoundError) as caught:
        simulation.load_cases(settings.load(str(ROOT / W2)), trace="nowhere.jsonl")
    assert harness.is_user_error(caught.value)


def test_every_shipped_variant_translates(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("w2_azure", "w3_mooncake_pd", "quickstart", "scaling"):
        config = settings.load(f"configs/{name}.py:smoke")
        settings.provenance(config)
        cases = simulation.load_cases(config, requests=50)
        assert all(len(one.trace) == 50 and one.quick for one in cases.values())
        with pytest.raises(settings.UserError, match="unknown"):
            settings.load(f"configs/{name}.py:smok")


def test_agents_wait_for_their_answers_unless_told_otherwise(monkeypatch):
    monkeypatch.chdir(ROOT)
    cases = simulation.load_cases(settings.load("configs/agents.py:smoke"))
    closed, opened = cases["closed"].load, cases["open"].load
    assert opened.after is None
    parent = closed.after.parent
    assert (parent < 0).sum() == 12 and parent.max() < len(parent)  # one first round per session
    config = settings.load(W2)
    with config.unlocked():
        config.workload["closed_loop"] = True
    with pytest.raises(ValueError, match="needs sessions and think times"):
        simulation.load_cases(config)
