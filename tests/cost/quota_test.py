"""Fits recover known coefficients and agree with scipy; the largest chunk equals a linear scan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from deepinfer_jax.cost import quota
from deepinfer_jax.cost.steps import StepCost

TRUE = quota.PrefillQuota(base=3e-3, token=25e-6, pair=9e-10, context=2e-8)


def samples(count=200, seed=3):
    generator = np.random.default_rng(seed)
    return generator.integers(1, 8192, count), generator.integers(0, 131_072, count)


def step_cost(base=0, token=0, pair=0, context=0):
    return StepCost(base, token, pair, context, 0, 0, np.zeros((1, 3), np.int64), 0, 0)


def by_hand(q, c, k):
    pairs = sum(c + i for i in range(1, q + 1))  # query i sees the c cached and i new tokens
    return k.base + k.token * q + k.pair * pairs + k.context * c


def test_seconds_counts_causal_pairs():
    for q, c in [(1, 0), (5, 0), (7, 100), (128, 4096)]:
        assert TRUE.seconds(q, c) == pytest.approx(by_hand(q, c, TRUE))


@pytest.mark.parametrize("weighting", ["relative", "absolute"])
def test_known_coefficients_are_recovered(weighting):
    q, c = samples()
    fit = quota.fit_quota(q, c, TRUE.seconds(q, c), weighting=weighting)
    assert dataclasses.astuple(fit.quota) == pytest.approx(dataclasses.astuple(TRUE), rel=1e-6)
    assert fit.held_out.largest < 1e-6 and fit.training_error < 1e-6
    assert (fit.held_out.samples, fit.held_out.folds) == (200, 5)


def test_noise_shows_in_the_held_out_error():
    q, c = samples(400)
    noise = np.random.default_rng(5).normal(1, 0.05, 400)
    fit = quota.fit_quota(q, c, TRUE.seconds(q, c) * noise)
    assert fit.quota.pair == pytest.approx(TRUE.pair, rel=0.05)
    assert 0.02 < fit.held_out.median < 0.05  # median |N(0, .05)| is .0337
    assert fit.held_out.median < fit.held_out.p90 < fit.held_out.largest


def test_held_out_differs_from_training_when_a_fold_is_alone():
    # Only fold 0 sees long contexts; predicting it without its own samples must look bad.
    q = np.tile(np.arange(100, 1100, 100), 5)
    c = np.where(np.arange(50) % 5 == 0, 50_000, 0)
    fit = quota.fit_quota(q, c, TRUE.seconds(q, c) + 0.5 * (c > 0), folds=5)
    assert fit.held_out.largest > 0.5 > fit.training_error


@pytest.mark.parametrize("seed", range(8))
def test_least_squares_equals_scipy(seed):
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(30, 4)) * [1, 1e3, 1e-3, 10]
    target = generator.normal(size=30)
    got = quota.non_negative_least_squares(matrix, target)
    expected, _ = optimize.nnls(matrix, target)
    assert (got >= 0).all()
    assert np.allclose(matrix @ got, matrix @ expected, atol=1e-9)


def test_a_negative_unconstrained_fit_is_held_at_zero():
    q = np.array([1, 2, 3, 4, 5, 6, 7, 8.0])
    fit = quota.fit_quota(q, q * 0, 10 - q, context=False, folds=2)
    assert fit.quota.token == fit.quota.pair == 0 and fit.quota.base > 0


def test_round_trip_with_step_cost():
    fields = TRUE.femtoseconds()
    assert fields == {
        "prefill_base": 3 * 10**12,
        "prefill_token": 25 * 10**9,
        "prefill_pair": 900_000,
        "prefill_context": 20_000_000,
    }
    cost = TRUE.apply_to(dataclasses.replace(step_cost(), decode_exchange_row=7))
    assert cost.decode_exchange_row == 7
    assert dataclasses.astuple(quota.PrefillQuota.of(cost)) == pytest.approx(
        dataclasses.astuple(TRUE)
    )
    assert cost.prefill_base + cost.prefill_work(7, 100) == pytest.approx(
        TRUE.seconds(7, 100) * 1e15, rel=1e-12
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1, 2], [0], [1.0, 2.0]), "one positive time per"),
        (([1] * 9, [0] * 9, [0.0] * 9), "one positive time per"),
        (([1, 2, 3], [0, 0, 0], [1.0, 2.0, 3.0]), "3 samples in 5 folds"),
    ],
)
def test_fit_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        quota.fit_quota(*arguments)
    with pytest.raises(ValueError, match="weighting='log'"):
        quota.fit_quota([1] * 9, [0] * 9, [1.0] * 9, weighting="log")


def scan(cost, remaining, cached, budget):
    fitting = [
        q
        for q in range(1, remaining + 1)
        if by_hand(
            q,
            cached,
            quota.PrefillQuota(0, cost.prefill_token, cost.prefill_pair, cost.prefill_context),
        )
        <= budget
    ]
    return max(fitting, default=0)


coefficient = st.integers(0, 50)


@settings(max_examples=150, deadline=None)
@given(
    coefficient,
    coefficient,
    coefficient,
    st.integers(0, 60),
    st.integers(0, 300),
    st.integers(0, 10**5),
)
def test_largest_chunk_equals_a_linear_scan(token, pair, context, remaining, cached, budget):
    cost = step_cost(10**9, token, pair, context)
    expected = scan(cost, remaining, cached, budget)
    assert quota.largest_chunk(cost, remaining, cached, budget) == expected
    arrays = [np.int64([v, v]) for v in (remaining, cached, budget)]
    assert quota.largest_chunk(cost, *arrays).tolist() == [expected] * 2


def test_largest_chunk_under_jit_and_at_full_size():
    cost = step_cost(token=25 * 10**9, pair=900_000, context=20_000_000)
    remaining = np.int64([0, 1, 4096, 1_048_576, 1_048_576, 2**21 - 1])
    cached = np.int64([5, 0, 131_072, 0, 1_048_575, 0])
    budget = np.int64([10**15, 10**9, 3 * 10**14, 3 * 10**14, 10**15, 2**62])
    expected = quota.largest_chunk(cost, remaining, cached, budget)
    for r, c, b, q in zip(
        remaining.tolist(), cached.tolist(), budget.tolist(), expected, strict=True
    ):
        assert quota.largest_chunk(cost, r, c, b) == q  # Python integers cannot overflow
        assert q in (0, r) or cost.prefill_work(int(q), c) <= b < cost.prefill_work(int(q) + 1, c)
    with jax.enable_x64(True):
        traced = jax.jit(quota.largest_chunk)(
            jax.tree.map(jnp.int64, cost), *map(jnp.asarray, (remaining, cached, budget))
        )
        assert traced.dtype == jnp.int64 and traced.tolist() == expected.tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**15), st.integers(0, 10**15), st.integers(0, 10**6), st.integers(1, 10**6))
def test_monotone_in_budget_and_context(first, second, cached, remaining):
    cost = step_cost(token=25 * 10**9, pair=900_000, context=20_000_000)
    low, high = sorted((first, second))
    chunk = quota.largest_chunk(cost, remaining, cached, low)
    assert chunk <= quota.largest_chunk(cost, remaining, cached, high)
    assert quota.largest_chunk(cost, remaining, cached + 1000, low) <= chunk
