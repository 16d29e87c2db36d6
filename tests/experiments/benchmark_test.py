"""Windows of a benchmark by hand: what belongs to a stage, and what counts as a gap of the host."""

import pytest

from deepinfer_jax.engine.statistics import StepRecord
from experiments.benchmark import window


def step(start: float, end: float, useful: int, *, prompt: bool = False, requests: int = 2):
    verified = (0, 0) if prompt else (requests, requests)
    accepted = (0, 0) if prompt else (useful - requests, 0)
    rows = 10 if prompt else 3 * requests
    return StepRecord(
        prompt, start, end, requests, rows, useful, verified, accepted, running=requests
    )


STEPS = [
    step(0.0, 1.0, 2, prompt=True),
    step(1.5, 2.5, 3),
    step(2.6, 3.5, 4),  # starts 0.1 after the results before it
    step(3.4, 4.5, 2),  # overlaps
    step(4.5, 5.5, 1, requests=1),  # a seat is empty
    step(6.0, 7.0, 2, prompt=True),
    step(7.5, 8.5, 4),
]


def test_decode_window_is_the_full_batches_between_prompts() -> None:
    found = window(STEPS, "decode", 2)
    assert found["steps"] == 4 and found["useful_tokens"] == 13
    assert found["seconds"] == pytest.approx(3.0 + 1.0)
    assert found["host_gap"] == pytest.approx(0.1 / 4)
    assert found["useful_per_second"] == pytest.approx(13 / 4)
    assert found["rows_per_second"] == pytest.approx(24 / 4)
    assert found["tau"] == found["useful_tau"] == pytest.approx(13 / 8)
    assert found["survival"] == (5 / 8, 0)


def test_prompt_window_is_the_prompt_steps() -> None:
    found = window(STEPS, "prompt", 2)
    assert (found["steps"], found["seconds"], found["rows_per_second"]) == (2, 2.0, 10.0)
    assert found["tau"] is None and found["host_gap"] == 0


def test_a_window_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="the decode window has no step"):
        window(STEPS[:1], "decode", 2)
