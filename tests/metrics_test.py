"""Metrics against hand-computed runs."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from deepinfer_jax import metrics

S = 10**9


def small() -> metrics.RequestTimeline:
    """Four requests: two complete, one with a single token, one rejected."""
    return metrics.timeline(
        arrival=np.array([1, 2, 3, 4]) * S,
        first_token=np.array([2, 5, 4, -1]) * np.array([S, S, S, 1]),
        finish=np.array([6, 7, 4, -1]) * np.array([S, S, S, 1]),
        input_tokens=[300, 200, 100, 50],
        output_tokens=[5, 3, 1, 0],
        block_hit_tokens=[256, 0, 0, 0],
        compute_hit_tokens=[128, 0, 0, 0],
        status=[0, 0, 0, 2],
    )


def test_latencies_by_hand():
    t = small()
    np.testing.assert_array_equal(metrics.ttft(t), [1, 3, 1, np.nan])
    np.testing.assert_array_equal(metrics.tpot(t), [1, 1, np.nan, np.nan])
    np.testing.assert_array_equal(metrics.e2e(t), [5, 5, 1, np.nan])


def test_itl_is_the_gaps_inside_each_request():
    ticks = np.array([1, 3, 3, 10, 20, 26]) * S
    gaps = metrics.itl(ticks, np.array([0, 3, 3, 4, 6, 6]))
    np.testing.assert_array_equal(gaps, [2, 0, 6])
    assert metrics.itl(np.zeros(0, np.int64), np.array([0, 0])).shape == (0,)


def test_goodput_by_hand_counts_rejected_requests_as_misses():
    t, everyone = small(), np.ones(4, bool)
    got = metrics.goodput(t, metrics.Slo(ttft=1.0, tpot=1.0), everyone)
    assert (got["goodput_requests"], got["goodput_fraction"]) == (2, 0.5)
    assert got["goodput_per_second"] == 2 / 6  # arrival at 1 s to the last finish at 7 s
    assert metrics.goodput(t, metrics.Slo(e2e=0.5), everyone)["goodput_requests"] == 0


def test_goodput_under_jit_equals_numpy():
    t = small()
    with jax.enable_x64(True):
        device = jax.tree.map(jax.numpy.asarray, t)
        met = jax.jit(metrics.meets, static_argnums=1)(device, metrics.Slo(ttft=1.0, tpot=1.0))
    np.testing.assert_array_equal(met, metrics.meets(t, metrics.Slo(ttft=1.0, tpot=1.0)))


def test_hit_rates_are_three_different_numbers():
    got = metrics.hit_rates(small(), np.ones(4, bool))
    assert got == {
        "request_hit_fraction": 1 / 3,
        "block_hit_fraction": 2 / 3,
        "token_hit_fraction": 128 / 600,
    }


def test_warm_up_is_explicit_by_time_or_by_count():
    t = small()
    assert metrics.window(t).all()
    np.testing.assert_array_equal(metrics.window(t, warmup_seconds=1.5), [0, 0, 1, 1])
    np.testing.assert_array_equal(metrics.window(t, warmup_requests=1), [0, 1, 1, 1])
    with pytest.raises(ValueError, match="keep one"):
        metrics.window(t, warmup_seconds=1, warmup_requests=1)


times = st.lists(st.integers(-1, 50), min_size=7, max_size=7)


@hypothesis.given(times)
def test_stages_always_sum_to_the_end_to_end_latency(middle):
    names = metrics.EVENTS[1:-1]
    known = {name: np.array([value]) for name, value in zip(names, middle, strict=True)}
    t = metrics.timeline(arrival=np.array([0]), finish=np.array([60]), **known)
    stages = metrics.stage_seconds(t)
    assert tuple(stages) == metrics.STAGES
    assert min(values[0] for values in stages.values()) >= 0
    np.testing.assert_allclose(sum(values[0] for values in stages.values()), 60e-9)


def test_stages_by_hand_with_a_fetch_under_prefill():
    t = metrics.timeline(
        arrival=np.array([0]),
        matched=[1 * S],
        pulled=[3 * S],
        fetched=[9 * S],
        prefill_start=[4 * S],
        first_token=[10 * S],
        finish=[20 * S],
    )
    got = {name: float(values[0]) for name, values in metrics.stage_seconds(t).items()}
    assert got["match"] == 1 and got["queue"] == 2 and got["fetch"] == 6
    assert got["prefill wait"] == 0 and got["prefill"] == 1 and got["decode"] == 10


def test_books_that_do_not_add_up_are_refused():
    assert metrics.account(5, 3, {"full": 1}, {"crash": 1})["completed"] == 3
    with pytest.raises(ValueError, match=r"5 requests came in.*= 4"):
        metrics.account(5, 3, {"full": 1}, {})
    with pytest.raises(ValueError):
        metrics.account(2, 3, {"full": -1}, {})


def test_check_names_the_first_request_served_before_its_data():
    t = small()
    assert metrics.check(t)["rejected"] == {"rejected: queue full": 1}
    late = dataclasses.replace(t, prefill_start=np.array([-1, 6 * S, -1, -1]))
    with pytest.raises(ValueError, match="request 1 has first_token"):
        metrics.check(late)
    assert metrics.check(dataclasses.replace(late, preemptions=np.array([0, 1, 0, 0])))
    with pytest.raises(ValueError, match="request 0 is completed without"):
        metrics.check(dataclasses.replace(t, first_token=np.full(4, -1)))
    with pytest.raises(ValueError, match="4 requests came in"):
        metrics.check(dataclasses.replace(t, status=np.array([0, 0, 0, 9])))


def test_summarise_is_valid_json_even_when_nothing_finished():
    never = metrics.timeline(arrival=np.array([0, 1]), finish=np.array([-1, -1]))
    got = metrics.summarise(never, slo=metrics.Slo(ttft=1.0))
    json.loads(json.dumps(got, allow_nan=False))
    assert got["lost"] == {"lost: unfinished at the end": 2}
    assert got["ttft_seconds"]["count"] == 0 and got["goodput_per_second"] is None
    empty = metrics.timeline(arrival=np.zeros(0), finish=np.zeros(0))
    json.dumps(metrics.summarise(empty), allow_nan=False)


def test_summarise_looks_at_the_window_only():
    got = metrics.summarise(small(), warmup_requests=1)
    assert got["requests"] == 4 and got["window"]["requests"] == 3
    assert got["ttft_seconds"]["count"] == 2 and got["ttft_seconds"]["mean"] == 2.0
    assert got["output_tokens_per_second"] == 4 / 5
    assert got["goodput_requests"] is None and got["slo_seconds"] == {}


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match="first_tokens"):
        metrics.timeline(np.zeros(1), np.zeros(1), first_tokens=np.zeros(1))
