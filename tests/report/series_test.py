"""Time series against brute force over a fine grid."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.report import series

intervals = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 30), st.integers(0, 2)), max_size=12
)


@hypothesis.given(intervals)
def test_counts_and_busy_shares_equal_a_tick_by_tick_count(rows):
    starts = np.array([s for s, _, _ in rows], np.int64)
    ends = np.array([s + d for s, d, _ in rows], np.int64)
    engine = np.array([m for _, _, m in rows], np.int64)
    edges = np.arange(0, 121, 8)
    alive = np.zeros((3, 120))
    for s, e, m in zip(starts, ends, engine, strict=True):
        alive[m, s:e] += 1
    counts = alive.sum(0).reshape(-1, 8).mean(1)
    busy = (alive > 0).mean(0).reshape(-1, 8).mean(1)
    np.testing.assert_allclose(series.average_count(starts, ends, edges), counts, atol=1e-9)
    np.testing.assert_allclose(series.busy_share(starts, ends, engine, 3, edges), busy, atol=1e-9)


def test_real_tick_sizes_keep_their_precision():
    starts = np.arange(1000) * 10**9 + 10**15
    got = series.average_count(starts, starts + 10**9, np.linspace(10**15, 10**15 + 10**12, 11))
    np.testing.assert_allclose(got, 1.0, atol=1e-6)


def test_littles_law_holds_for_the_waiting_series():
    rng = np.random.default_rng(1)
    arrival = np.sort(rng.integers(0, 10**12, 500))
    start = arrival + rng.integers(0, 10**10, 500)
    first = start + 10**9
    t = metrics.timeline(
        arrival=arrival,
        prefill_start=start,
        first_token=first,
        finish=first,
        output_tokens=[1] * 500,
    )
    got = series.series(t, bins=50)
    horizon = (first.max() - arrival.min()) / 1e9
    waits = (start - arrival).sum() / 1e9
    np.testing.assert_allclose(got.waiting.mean() * horizon, waits, rtol=1e-9)
    assert got.decoding.max() == 0 and got.edges[0] == 0


def test_empty_and_unfinished_timelines():
    empty = metrics.timeline(arrival=np.zeros(0), finish=np.zeros(0))
    assert series.series(empty, bins=4).waiting.tolist() == [0, 0, 0, 0]
    never = metrics.timeline(arrival=np.array([5]), finish=np.array([-1]))
    assert not np.isnan(series.series(never, bins=4).prefill_busy).any()
