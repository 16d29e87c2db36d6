"""The engine's cadence by hand, what a step may be called, and that shares follow from times."""

import sys

import pytest
from absl import flags

from deepinfer_jax.engine.statistics import StepRecord
from experiments import benchmark_engine, benchmark_model


def step(start: float, end: float) -> StepRecord:
    return StepRecord(False, start, end, 2, 2, 2)


def test_cadence_is_from_results_to_results() -> None:
    in_turn = [step(0.0, 1.0), step(1.1, 2.1), step(2.3, 3.2), step(3.5, 4.6)]
    seconds, gap = benchmark_engine.cadence(in_turn)
    assert (seconds, gap) == (pytest.approx(1.1), pytest.approx(0.2))
    overlapped = [step(0.0, 1.0), step(0.9, 2.0), step(1.9, 3.1)]
    assert benchmark_engine.cadence(overlapped) == (pytest.approx(1.0), 0.0)


def test_names_of_steps() -> None:
    assert benchmark_engine.shape("8x128") == (8, 128, True)
    assert benchmark_engine.shape("8") == (8, 1, False)
    for wrong in ("", "x", "8x", "0", "8x0", "8x128x2", "b8"):
        with pytest.raises(ValueError, match="write requests, or requests x tokens"):
            benchmark_engine.shape(wrong)


def test_shares_are_the_bare_models_work_in_the_engines_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bare step of 10 ms at 0.6 of a rate; the engine's best takes 12 ms: 0.5."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    bare = {"milliseconds": 10.0, "share_of_matmul": 0.12, "share_of_read": 0.6}
    ends = {False: [0.0, 0.015, 0.029], True: [0.0, 0.012, 0.025]}
    monkeypatch.setattr(benchmark_model, "measure", lambda *_: bare)
    monkeypatch.setattr(benchmark_engine, "make_device", lambda *_: None)
    monkeypatch.setattr(
        benchmark_engine,
        "serve",
        lambda *arguments, overlap=False, **_: [
            step(end - 0.01, end) for end in ends[overlap or arguments[-1] is True]
        ],
    )
    line = benchmark_engine.measure("2")
    assert line["share_of_read"] == pytest.approx(0.5)
    assert line["share_of_matmul"] == pytest.approx(0.1)
    assert line["in_turn_ms"] == pytest.approx(14) and line["overlapped_ms"] == pytest.approx(12)
    assert line["host_share"] == pytest.approx(4.5 / 14)
