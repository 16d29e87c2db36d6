"""Worked values of the released engine's variable lengths, and the split against sorting."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.draft_lengths import Chooser, cumulative, fill, split, total_rows
from deepinfer_jax.engine.step_curve import Drift, StepCurve, digest, load_or_measure, middle_mean

CURVE = StepCurve((1, 2, 4, 8, 16, 24), (10, 10.2, 10.6, 11.5, 13.5, 16))
CONFIDENCES = np.array([[0.9, 0.8, 0.7, 0.6, 0.5], [0.6, 0.5, 0.4, 0.3, 0.2]], np.float32)
LIVE = np.array([True, True])
on_device = jax.jit(lambda c, n, live: split(cumulative(c), n, live))


def lengths(rates: np.ndarray, slope: float = 0.0, sampler: float = 0.0) -> tuple[int, list[int]]:
    total, _ = total_rows(rates, [t + sampler for t in CURVE.times(2, 12, slope)])
    return total, split(rates, total - 2, LIVE).tolist()


def test_worked_throughputs() -> None:
    rates = cumulative(CONFIDENCES)
    best = np.sort(rates, axis=None)[::-1]
    expected = (2 + np.concatenate([[0], np.cumsum(best)])) / CURVE.times(2, 12)
    worked = [0.19608, 0.27358, 0.34151, 0.36696, 0.41078, 0.43708, 0.46317, 0.40575]
    np.testing.assert_allclose(expected, [*worked, 0.41464, 0.4173, 0.41784], atol=6e-6)


@pytest.mark.parametrize(
    ("slope", "sampler", "total", "q"),
    [(0, 0, 8, [5, 3]), (0, 60, 12, [6, 6]), (3, 60, 8, [5, 3]), (3, 1, 4, [3, 1])],
)
def test_worked_lengths(slope: float, sampler: float, total: int, q: list[int]) -> None:
    assert lengths(cumulative(CONFIDENCES), slope, sampler) == (total, q)


def test_unknown_rates() -> None:
    """Right after prefill nothing is worth verifying; one step later a proposal is pending."""
    assert lengths(fill([(), ()], [False, False], 5)) == (2, [1, 1])
    pending = fill([(), ()], [True, True], 5)
    assert lengths(pending) == (12, [6, 6])
    mixed = fill([(0.5,) * 5, ()], [True, False], 5)
    np.testing.assert_array_equal(mixed, [[0.5] * 5, [0] * 5])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=4, max_size=4), st.floats(0, 1))
def test_split_equals_sorting_on_host_and_device(seed: int, live: list[bool], share: float) -> None:
    random = np.random.default_rng(seed)
    confidences = random.choice([0.25, 0.5, 1.0, 0.9], (4, 3)).astype(np.float32)
    alive = np.array(live)
    drafts = int(share * 3 * alive.sum())
    rates = cumulative(confidences)
    entries = sorted((-rates[s, i], s, i) for s in range(4) for i in range(3) if alive[s])
    expected = [sum(e[1] == s for e in entries[:drafts]) + int(alive[s]) for s in range(4)]
    assert split(rates, drafts, alive).tolist() == expected
    np.testing.assert_array_equal(on_device(confidences, drafts, alive), expected)
    assert sum(expected) == drafts + alive.sum()


def test_drift_needs_enough_samples() -> None:
    drift = Drift()
    for _ in range(10):
        assert drift.slope == 0
        drift.record(CURVE, 7, 11.5 + 3 * 8)
    assert drift.slope == 3
    assert middle_mean([5, 1, 2, 3, 100]) == pytest.approx(10 / 3)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.lists(st.floats(0.1, 100), min_size=3, max_size=3),
)
def test_a_rectangle_is_the_best_of_all_widths(seed: int, count: int, times: list[float]) -> None:
    """Expected tokens by enumeration; a width that is no better than a narrower one is not taken."""
    random = np.random.default_rng(seed)
    rates = cumulative(random.choice([0.0, 0.25, 0.5, 1.0], (count, 3)).astype(np.float32))
    chooser = Chooser({2: StepCurve((2, 4, 8), times), 4: StepCurve((4, 8, 16), times)}, nextn=3)
    drafts, width = chooser([tuple(r) for r in rates.tolist()], [True] * count)
    worth = {w: count + rates[:, : w - 1].sum(dtype=np.float64) for w in (1, 2, 4)}
    best = max(worth[w] / t for w, t in zip((1, 2, 4), times, strict=True))
    assert worth[width] / times[(1, 2, 4).index(width)] == pytest.approx(best)
    assert drafts == (rates[:, : width - 1] > 0).sum()


def test_slow_wide_steps_make_steps_narrow() -> None:
    """Steps of 16 rows take 70 ms instead of 7: ten of them, and the choice is one row each."""
    chooser = Chooser({4: StepCurve((4, 16), (4.0, 7.0))}, nextn=3)
    rates = [(0.9, 0.8, 0.7)] * 4
    assert chooser(rates, [True] * 4) == (12, 4)
    for _ in range(10):
        chooser.observe(4, 4, 70.0)
    assert chooser(rates, [True] * 4) == (0, 1)


def test_sizes_beyond_the_curve_are_refused() -> None:
    with pytest.raises(ValueError, match="25 rows exceed 24"):
        CURVE.times(24, 25)
    with pytest.raises(ValueError, match="ascending"):
        StepCurve((2, 1), (1.0, 2.0))


def test_file(tmp_path, caplog) -> None:  # type: ignore[no-untyped-def]
    path, calls = tmp_path / "a" / "curve.json", []

    def measure() -> StepCurve:
        calls.append(1)
        return CURVE

    key = digest({"model": "tiny", "sizes": [1, 2]})
    for expected in (1, 1):
        assert load_or_measure(path, key, measure) == CURVE
        assert len(calls) == expected
    load_or_measure(path, digest({"model": "other"}), measure)
    assert len(calls) == 2
    load_or_measure(path, digest({"model": "other"}), measure, lifetime=-1)
    assert len(calls) == 3
    path.write_text('{"key": ')
    assert load_or_measure(path, key, measure) == CURVE
    assert "measured anew" in caplog.text
    assert len(calls) == 4
    assert [p.name for p in path.parent.iterdir()] == ["curve.json"]
