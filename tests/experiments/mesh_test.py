"""The mesh experiment: one process or two, the same answers."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(path: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.mesh", "--config=configs/mesh.py:smoke"]
    known = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [*command, f"--workdir={path}", *arguments],
        env={**known, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_sampled_answers_do_not_depend_on_the_number_of_processes(tmp_path: pathlib.Path) -> None:
    """Sampled with drafts, across a move of experts: all tokens equal."""
    found = []
    for count in (1, 2):
        path = tmp_path / str(count)
        done = run(path, f"--processes={count}")
        assert done.returncode == 0, done.stderr
        found.append(json.loads((path / "summary.json").read_text()))
        assert f"digest of 8 answers: {found[-1]['digest']}" in done.stdout
    assert [f["processes"] for f in found] == [1, 2]
    assert found[0]["answers"] == found[1]["answers"]
    assert all(len(answer) == 16 for answer in found[0]["answers"])
    assert found[0]["balance"] == found[1]["balance"]
    move = found[0]["balance"][0]
    assert move["moved"] > 0 and move["after"] > move["before"]


def test_processes_divide_the_virtual_devices(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "x", "--processes=3", "--coordinator=127.0.0.1:1")
    assert done.returncode == 2
    assert "4 virtual devices for 3 processes" in done.stderr
