"""Time series against brute force over a fine grid."""

import dataclasses

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


def test_progress_counts_every_request_once_where_it_belongs():
    rng = np.random.default_rng(7)
    arrival = np.sort(rng.integers(10**9, 10**11, 300))
    first = arrival + rng.integers(10**8, 3 * 10**9, 300)
    refused = np.arange(300) % 10 == 0
    t = metrics.timeline(
        arrival,
        np.where(refused, -1, first + 10**9),
        first_token=np.where(refused, -1, first),
        input_tokens=rng.integers(1, 900, 300),
        compute_hit_tokens=np.zeros(300, int),
        output_tokens=[2] * 300,
        status=np.where(refused, 1, 0),
    )
    skipped = t.input_tokens // 3
    t = dataclasses.replace(t, compute_hit_tokens=skipped)
    slo = metrics.Slo(ttft=1.5)
    got = series.progress(t, slo, bins=13)
    width = got.edges[1]
    since = (arrival - arrival.min()) / 1e9
    ends = (np.where(refused, np.nan, t.finish) - arrival.min()) / 1e9
    met = ~refused & (first - arrival <= 1.5e9)
    for k in range(13):
        low, high = got.edges[k], got.edges[k + 1] + (1e-6 if k == 12 else 0)
        inside = (since >= low) & (since < high)
        np.testing.assert_allclose(got.offered[k] * width, inside.sum())
        out = (ends >= low) & (ends < high)
        np.testing.assert_allclose(got.completed[k] * width, out.sum())
        np.testing.assert_allclose(got.good[k] * width, (out & met).sum())
        came = inside & ~refused
        if came.any():
            share = skipped[came].sum() / t.input_tokens[came].sum()
            np.testing.assert_allclose(got.hit[k], share)
        else:
            assert np.isnan(got.hit[k])
    assert 0 < met.sum() < 270


def test_progress_of_nothing():
    empty = metrics.timeline(arrival=np.zeros(0), finish=np.zeros(0))
    assert series.progress(empty, metrics.Slo(), bins=3).offered.tolist() == [0, 0, 0]
    never = metrics.timeline(arrival=np.array([-1, 4]), finish=np.array([-1, -1]))
    assert series.progress(never, metrics.Slo(), bins=3).completed.sum() == 0
