"""Percentiles against numpy's inverted CDF and exact binomial probabilities."""

import fractions
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from deepinfer_jax import percentiles

finite = st.floats(-1e6, 1e6, width=32)


@hypothesis.given(st.lists(finite, min_size=1, max_size=60), st.sampled_from([12.5, 25, 50, 75]))
def test_percentile_is_numpys_inverted_cdf(values, percent):
    # Dyadic percents, so that numpy's own n * q is exact.
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert percentiles.percentile(np.array(values), percent) == expected


@pytest.mark.parametrize(
    "percent, count, rank", [(99, 100, 99), (99, 101, 100), (7, 100, 7), (99.9, 1000, 999)]
)
def test_nearest_rank_is_exact_where_floats_are_not(percent, count, rank):
    assert percentiles.nearest_rank(percent, count) == rank


@hypothesis.given(st.integers(0, 2**31 - 1), st.sampled_from([1, 50, 99, 99.9, 99.99]))
def test_nearest_rank_matches_rationals_and_fits_int32(count, percent):
    expected = max(1, math.ceil(fractions.Fraction(str(percent)) * count / 100))
    assert percentiles.nearest_rank(percent, count) == expected
    assert percentiles.nearest_rank(percent, np.int32(count)) == expected


def test_percentile_outside_the_range_is_refused():
    for percent in (0, -1, 100.5):
        with pytest.raises(ValueError, match="percent"):
            percentiles.nearest_rank(percent, 10)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_masked_statistics_agree_under_jit_and_with_numpy(seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(3, 17)).astype(np.float32)
    mask = rng.random(17) < rng.choice([0.0, 0.3, 1.0])
    batched = jax.jit(percentiles.masked_percentile, static_argnums=2)(values, mask, 90)
    mean = jax.jit(percentiles.masked_mean)(values, mask)
    for row in range(3):
        chosen = values[row][mask]
        if not len(chosen):
            assert np.isnan(batched[row]) and np.isnan(mean[row])
            continue
        assert batched[row] == np.sort(chosen)[math.ceil(len(chosen) * 9 / 10) - 1]
        np.testing.assert_allclose(mean[row], chosen.mean(), rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(percentiles.masked_percentile(values, mask, 90), batched)


def test_masked_percentile_of_integer_ticks_does_not_round_while_sorting():
    ticks = np.array([2**53, 2**53 - 1, 2**53 - 2])
    assert percentiles.masked_percentile(ticks, np.ones(3, bool), 1) == 2**53 - 2
    assert isinstance(percentiles.masked_mean(jnp.arange(3), jnp.ones(3, bool)), jax.Array)


@pytest.mark.parametrize("percent", [50, 90, 99])
@pytest.mark.parametrize("count", [1, 2, 5, 20, 60])
def test_interval_ranks_are_the_tightest_by_exact_rationals(count, percent):
    q = fractions.Fraction(percent, 100)
    mass = [math.comb(count, k) * q**k * (1 - q) ** (count - k) for k in range(count + 1)]
    tail = fractions.Fraction(25, 1000)
    low, high = percentiles.interval_ranks(count, percent)
    assert sum(mass[:low]) <= tail < sum(mass[: low + 1])
    assert sum(mass[high:]) <= tail < sum(mass[high - 1 :])


@pytest.mark.parametrize("count", [367, 368, 5_000, 1_000_000])
def test_interval_ranks_against_scipy(count):
    low, high = percentiles.interval_ranks(count, 99)
    law = stats.binom(count, 0.99)
    assert law.cdf(low - 1) <= 0.025 < law.cdf(low)
    assert law.sf(high - 1) <= 0.025 < law.sf(high - 2)
    assert (high == count + 1) == (count < 368)


def test_the_interval_covers_the_true_percentile_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth = stats.expon.ppf(0.99)
    covered = 0
    for _ in range(400):
        low, high = percentiles.percentile_interval(rng.exponential(size=1000), 99)
        covered += low <= truth <= high
    assert covered >= 370  # 95 % of 400 is 380, standard deviation 4.4


def test_summary_leaves_nan_out_and_says_none_when_empty():
    got = percentiles.summary(np.array([3.0, np.nan, 1.0, 2.0]))
    assert got["count"] == 3 and got["mean"] == 2.0 and got["p50"] == 2.0 and got["p99"] == 3.0
    assert got["p99_interval"] == [2.0, None]  # P(2 or fewer of 3 below p99) = 2.97 %
    empty = percentiles.summary(np.array([np.nan]))
    assert empty["count"] == 0 and empty["p99"] is None and empty["p99_interval"] == [None, None]
