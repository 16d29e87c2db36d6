"""Synthetic arrivals against the distributions that they claim."""

import numpy as np
import pytest
import scipy.stats

from deepinfer_jax.simulator import prefixes, synthetic
from deepinfer_jax.simulator.synthetic import (
    ConstantLengths,
    LognormalLengths,
    PrefixGroups,
    TraceLengths,
)

ONE = ConstantLengths(10, 2)


def gaps(kind, rate=4.0, requests=20_000, **shape):
    trace = synthetic.synthetic(kind, requests=requests, rate=rate, lengths=ONE, seed=3, **shape)
    return np.diff(trace.arrival_seconds)


def test_deterministic_arrivals_are_evenly_spaced():
    trace = synthetic.synthetic("deterministic", requests=5, rate=4.0, lengths=ONE)
    assert trace.arrival.tolist() == [0, 250_000_000, 500_000_000, 750_000_000, 10**9]
    assert trace.input_tokens.tolist() == [10] * 5 and trace.output_tokens.tolist() == [2] * 5


def test_poisson_and_gamma_gaps_follow_their_laws():
    assert scipy.stats.kstest(gaps("poisson"), "expon", (0, 0.25)).pvalue > 0.01
    assert scipy.stats.kstest(gaps("gamma", cv=2.0), "gamma", (0.25, 0, 1.0)).pvalue > 0.01
    assert scipy.stats.kstest(gaps("gamma", cv=0.5), "gamma", (4, 0, 1 / 16)).pvalue > 0.01


def test_bursts_are_poisson_while_on_and_silent_while_off():
    trace = synthetic.synthetic(
        "bursty", requests=20_000, rate=10.0, lengths=ONE, on_seconds=2.0, off_seconds=6.0
    )
    phase = trace.arrival_seconds % 8.0
    assert phase.max() < 2.0
    assert scipy.stats.kstest(phase, "uniform", (0, 2)).pvalue > 0.01
    assert len(trace) / trace.arrival_seconds[-1] == pytest.approx(10.0, rel=0.03)


def test_diurnal_arrivals_have_the_rate_of_their_hour():
    trace = synthetic.synthetic(
        "diurnal", requests=40_000, rate=5.0, lengths=ONE, amplitude=0.8, period_seconds=1_000.0
    )
    time = trace.arrival_seconds[trace.arrival_seconds < 7_000]

    def cumulative(phase):
        turn = 2 * np.pi / 1_000
        return (phase + 0.8 / turn * (1 - np.cos(turn * phase))) / 1_000

    assert scipy.stats.kstest(time % 1_000, cumulative).pvalue > 0.01
    assert len(time) / 7_000 == pytest.approx(5.0, rel=0.03)
    assert np.all(np.diff(trace.arrival) >= 0)


def test_lengths_are_lognormal_and_clipped():
    lengths = LognormalLengths(1_000, 0.7, 200, 0.5, input_limit=4_000)
    trace = synthetic.synthetic("poisson", requests=20_000, rate=1.0, lengths=lengths)
    assert np.median(trace.input_tokens) == pytest.approx(1_000, rel=0.03)
    assert np.log(trace.output_tokens).std() == pytest.approx(0.5, rel=0.03)
    above = scipy.stats.norm.sf(np.log(4) / 0.7)
    assert (trace.input_tokens == 4_000).mean() == pytest.approx(above, rel=0.1)


def test_lengths_of_a_trace_stay_pairs():
    base = synthetic.synthetic(
        "poisson", requests=30, rate=1.0, lengths=LognormalLengths(100, 1, 50, 1)
    )
    drawn = synthetic.synthetic("poisson", requests=500, rate=1.0, lengths=TraceLengths(base))
    pairs = set(zip(base.input_tokens.tolist(), base.output_tokens.tolist(), strict=True))
    assert set(zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)) == pairs


def test_seeds_repeat_and_streams_are_separate():
    def made(seed, lengths=ONE, kind="poisson"):
        return synthetic.synthetic(kind, requests=50, rate=1.0, lengths=lengths, seed=seed)

    varied = LognormalLengths(100, 1, 50, 1)
    assert made(1).arrival.tolist() == made(1).arrival.tolist() != made(2).arrival.tolist()
    assert made(1).arrival.tolist() == made(1, varied).arrival.tolist()
    other = made(1, varied, "deterministic").input_tokens
    assert made(1, varied).input_tokens.tolist() == other.tolist()


def test_groups_share_exactly_their_prompt():
    groups = PrefixGroups(groups=3, tokens=300, skew=1.0)
    trace = synthetic.synthetic(
        "poisson", requests=6_000, rate=1.0, lengths=ConstantLengths(200, 1), prefixes=groups
    )
    assert set(trace.input_tokens) == {500}
    share = np.bincount([trace.blocks(q)[0] for q in range(len(trace))])[::2] / len(trace)
    assert share == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.02)
    trie = prefixes.build(trace, 128, 0)
    roots = trie.node_parent[1:] == 0
    assert roots.sum() == 3 and set(trie.node_end[1:][roots]) == {2}
    assert (trie.node_end == 3).sum() == len(trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "weibull"}, "choose one of deterministic, poisson"),
        ({"rate": 0.0}, "rate = 0.0"),
        ({"requests": 0}, "requests = 0"),
        ({"amplitude": 1.0, "kind": "diurnal"}, "amplitude = 1.0"),
        ({"cv": 2.0}, r"\['cv'\] are not all parameters"),
        ({"lengths": ConstantLengths(0, 1)}, "at least 1 input"),
        ({"prefixes": PrefixGroups(1, 100)}, "one full block"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    call = {"kind": "poisson", "requests": 3, "rate": 1.0, "lengths": ONE, **change}
    with pytest.raises(ValueError, match=message):
        synthetic.synthetic(call.pop("kind"), **call)
