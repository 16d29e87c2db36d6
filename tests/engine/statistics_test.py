"""Worked numbers of each definition."""

import pytest

from deepinfer_jax.engine.statistics import RequestRecord, StepRecord, summarise, verified_counts

ACCEPTED = [(2, 1, 1, 0, 0), (1, 1, 0, 0, 0), (2, 2, 1, 1, 0)]


def test_three_steps_of_two_requests() -> None:
    steps = [
        StepRecord(False, float(i), i + 1.5, 2, 12, 2 + sum(a), (2,) * 5, a, 1.5, blocks_used=i,
                   blocks=4)
        for i, a in enumerate(ACCEPTED)
    ]  # fmt: skip
    found = summarise(steps)
    assert (found.accept_rate, found.tau) == (12 / 30, 3.0)
    assert found.tau == pytest.approx(1 + 5 * found.accept_rate)
    assert found.survival == (5 / 6, 4 / 6, 2 / 6, 1 / 6, 0)
    assert (found.useful_tokens, found.useful_tau, found.verified_length) == (18, 3, 5)
    assert found.useful_per_second == 18 / 3.5
    assert found.confidence_error == pytest.approx(4.5 / 30)
    assert (found.decode_seconds, found.prompt_seconds, found.block_usage) == (4.5, 0, 0.5)


def test_tokens_behind_a_stop_are_not_useful_and_prompts_verify_nothing() -> None:
    prompt = StepRecord(True, 0.0, 2.0, 1, 300, 1)
    decode = StepRecord(False, 2.0, 3.0, 1, 6, 2, (1,) * 5, (1, 1, 1, 0, 0))
    found = summarise([prompt, decode])
    assert (found.tau, found.useful_tau, found.useful_tokens) == (4, 2, 3)
    assert (found.prompt_seconds, found.decode_seconds, found.steps_per_second) == (2, 1, 2 / 3)


def test_nothing_has_no_rates() -> None:
    found = summarise([])
    assert (found.tau, found.accept_rate, found.useful_per_second, found.survival) == (
        None, None, None, ()
    )  # fmt: skip


def test_counts_by_position() -> None:
    assert verified_counts((6, 6), (1, 3), 5) == ((2,) * 5, (2, 1, 1, 0, 0))
    assert verified_counts((5, 3, 1), (4, 0, 0), 5) == ((2, 2, 1, 1, 0), (1, 1, 1, 1, 0))


def test_a_request() -> None:
    record = RequestRecord(arrival=10.0, prompt_tokens=3)
    assert (record.ttft, record.tpot, record.tau, record.itl) == (None, None, None, [])
    for time, tokens in ((12.0, 1), (13.0, 3), (15.0, 2)):
        record.commit(time, tokens)
    assert record.ttft == 2
    assert record.itl == [1, 0, 0, 2, 0]
    assert record.tpot == 3 / 5
    assert record.tau == 2.5
