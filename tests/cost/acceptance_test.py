"""Every meaning of acceptance against the chapter's lab 25, Leviathan's table and InferenceX."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cost import acceptance as ac

probabilities = st.fractions(0, 1, max_denominator=24)


def test_lab_25():
    quarters = Fraction(3, 4)
    fraction_reading = ac.tau_from_mean_fraction(quarters, 3)
    conditional_reading = ac.tau_by_enumeration([quarters] * 3)
    assert fraction_reading == Fraction("3.25")
    assert conditional_reading == Fraction("2.734375")
    assert conditional_reading / fraction_reading == Fraction(175, 208)
    assert f"{float(1 - conditional_reading / fraction_reading):.4%}" == "15.8654%"


def leviathan(alpha, gamma):
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


@pytest.mark.parametrize(
    "alpha, values",
    [
        (0.75, [1.75, 2.3125, 2.734375, 3.2881, 3.5995]),
        (0.8, [1.8, 2.44, 2.952, 3.6893, 4.1611]),
        (0.85, [1.85, 2.5725, 3.1866, 4.1523, 4.8501]),
        (0.9, [1.9, 2.71, 3.439, 4.6856, 5.6953]),
    ],
)
def test_leviathan_table(alpha, values):
    for gamma, value in zip([1, 2, 3, 5, 7], values, strict=True):
        got = ac.tau_from_constant_conditional(alpha, gamma)
        assert got == pytest.approx(value, abs=5e-5)
        assert got == pytest.approx(leviathan(alpha, gamma))
        assert ac.constant_conditional_from_acceptance_length(got, gamma) == pytest.approx(alpha)
    assert ac.tau_from_constant_conditional(1.0, 5) == 6


@pytest.mark.parametrize("length, alpha", [(3.25, 0.8629), (3.01, 0.8127)])
def test_published_inverses(length, alpha):
    got = ac.constant_conditional_from_acceptance_length(length, 3)
    assert got == pytest.approx(alpha, abs=5e-5)
    assert ac.mean_fraction_from_acceptance_length(length, 3) == pytest.approx((length - 1) / 3)


@given(st.lists(probabilities, min_size=0, max_size=5))
def test_enumeration_equals_the_closed_form(conditionals):
    exact = ac.tau_by_enumeration(conditionals)
    assert exact == ac.tau_from_conditionals(conditionals)
    assert exact == ac.tau_from_survival(ac.survival_from_conditionals(conditionals))


@given(probabilities, st.integers(1, 6))
def test_the_two_readings_differ_unless_trivial(a, n):
    conditional = ac.tau_from_constant_conditional(a, n)
    assert conditional <= ac.tau_from_mean_fraction(a, n)
    assert (conditional == ac.tau_from_mean_fraction(a, n)) == (n == 1 or a in (0, 1))


def test_inferencex_dspark_curve():
    # InferenceX, DSV4-Pro-0813 with DSpark: acceptance length with 1..6 drafts.
    lengths = [1.84, 2.51, 3.01, 3.36, 3.61, 3.77]
    survival = ac.survival_from_acceptance_lengths(lengths)
    assert np.round(survival, 2).tolist() == [0.84, 0.67, 0.5, 0.35, 0.25, 0.16]
    conditional = ac.conditionals_from_survival(survival)
    assert np.allclose(conditional, [0.84, 0.80, 0.75, 0.70, 0.71, 0.64], atol=0.006)
    assert ac.mean_fraction_from_acceptance_length(lengths[2], 3) == pytest.approx(0.67, abs=1e-9)
    for n, length in enumerate(lengths, start=1):
        assert ac.tau_from_survival(survival[:n]) == pytest.approx(length)
        assert ac.tau_from_conditionals(conditional[:n]) == pytest.approx(length)
    mtp = ac.survival_from_acceptance_lengths([1.79, 2.27, 2.49])
    assert np.allclose(ac.conditionals_from_survival(mtp), [0.79, 0.61, 0.46], atol=0.006)


def test_engine_counters_worked_example():
    steps = [(2, 1, 1, 0, 0), (1, 1, 0, 0, 0), (2, 2, 1, 1, 0)]
    got = ac.engine_acceptance(steps, requests=2)
    assert got.mean_fraction == Fraction(12, 30)
    assert got.tau == 3
    assert got.survival == tuple(Fraction(k, 6) for k in (5, 4, 2, 1, 0))
    assert ac.tau_from_mean_fraction(got.mean_fraction, 5) == got.tau
    assert ac.tau_from_survival(got.survival) == got.tau


def simulate(conditionals, limit, generator):
    """One request: (tokens kept, steps, tokens released), stopped by a token limit."""
    kept = steps = released = 0
    while kept < limit:
        run = 0
        while run < len(conditionals) and generator.random() < conditionals[run]:
            run += 1
        steps, released, kept = steps + 1, released + run + 1, min(limit, kept + run + 1)
    return kept, steps, released


def test_measured_recovers_the_model_and_counts_clipping():
    generator = np.random.default_rng(7)
    conditionals = [0.8, 0.7, 0.5]
    runs = [simulate(conditionals, int(generator.integers(2, 40)), generator) for _ in range(4000)]
    kept, steps, released = zip(*runs, strict=True)
    got = ac.measured_tokens_per_step(kept, steps, released)
    expected = ac.tau_from_conditionals(conditionals)
    assert got.tokens == sum(kept) and got.request_steps == sum(steps)
    assert got.clipped_requests == sum(k < r for k, _, r in runs) > 0
    assert got.clipped_tokens == sum(released) - sum(kept)
    assert got.unclipped_tau == pytest.approx(sum(released) / sum(steps))
    assert got.tau < got.unclipped_tau  # limits only ever cut
    assert abs(got.unclipped_tau - expected) < 0.05  # length-biased stopping leaves a little
    assert 0 < got.half_width < 0.03


def test_measured_interval_covers():
    # Coverage of the ratio interval over repeated experiments, long-run ratio as the truth.
    generator = np.random.default_rng(11)
    runs = [simulate([0.8, 0.6], 12, generator)[:2] for _ in range(20000)]
    truth = sum(k for k, _ in runs) / sum(s for _, s in runs)
    covered = 0
    for start in range(0, 20000, 100):
        got = ac.measured_tokens_per_step(*zip(*runs[start : start + 100], strict=True))
        covered += abs(got.tau - truth) <= got.half_width
    assert 0.88 <= covered / 200 <= 0.99


def test_single_request_has_no_interval():
    got = ac.measured_tokens_per_step([6], [2])
    assert (got.tau, got.half_width, got.clipped_requests) == (3.0, math.inf, 0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ac.tau_from_survival([0.5, 0.6]), "did you mean tau_from_conditionals"),
        (lambda: ac.tau_from_mean_fraction(75, 3), "not a probability"),
        (lambda: ac.tau_from_conditionals([0.5, 1.2]), "not a probability"),
        (lambda: ac.constant_conditional_from_acceptance_length(4.5, 3), "bonus token"),
        (lambda: ac.mean_fraction_from_acceptance_length(0.75, 3), "bonus token"),
        (lambda: ac.measured_tokens_per_step([1, 2], [1]), "one count per request"),
        (lambda: ac.measured_tokens_per_step([], []), "one count per request"),
        (lambda: ac.measured_tokens_per_step([1], [0]), "no step"),
        (lambda: ac.measured_tokens_per_step([5], [1], [4]), "more than its steps released"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_speedup():
    # Leviathan et al.: alpha .8, gamma 5, c .05 gives 3.6893 / 1.25.
    assert ac.speculative_speedup(0.8, 5, 0.05) == pytest.approx(2.9514, abs=1e-4)
    assert ac.conditionals_from_survival([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
