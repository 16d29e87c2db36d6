"""A mesh over two processes that meet on loopback: answers as on one device, experts that move."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from deepinfer_jax.engine.device import Device
from experiments import processes
from tests.engine.process_worker import PROMPTS, WISHES
from tests.engine.small_engine import engine, requests, serve

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_two_processes_answer_as_one_device(
    device: Device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decoding with drafts and two moves of experts, on two devices of each process."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS")
    files = [tmp_path / f"{number}.json" for number in range(2)]
    coordinator = f"127.0.0.1:{processes.free_port()}"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.process_worker", coordinator, "2", str(i), str(f)],
            env=dict(os.environ),
            cwd=ROOT,
        )
        for i, f in enumerate(files)
    ]
    want = list(serve(engine(device), requests(PROMPTS, WISHES)).values())
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second and first["devices"] == [4, 2]
    assert first["answers"] == want
    assert max(first["moved"]) > 0
    for held in first["held"]:  # slots of a layer: each expert somewhere, two copies besides
        assert set(held) == set(range(4)) and len(held) == 8
    assert [sum(layer) for layer in first["counts"]] == [sum(first["counts"][0])] * 4
    assert sum(first["counts"][0]) > 0


def test_a_process_has_a_number_below_their_count() -> None:
    with pytest.raises(ValueError, match=r"--process=2 of 2: number them from 0 to 1"):
        processes.meet("127.0.0.1:1", 2, 2)


def test_the_others_end_with_the_first_that_fails() -> None:
    code = processes.run_all(
        [
            [sys.executable, "-c", "import sys; sys.exit(3)"],
            [sys.executable, "-c", "import time; time.sleep(600)"],
        ]
    )
    assert code == 3
    assert processes.run_all([[sys.executable, "-c", ""]] * 2) == 0
