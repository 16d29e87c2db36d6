"""The frontier against lab 25, brute force and scipy's Student t."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deepinfer_jax.cost import frontier as fr

LAB_25 = [
    (8, 100, 325.00, 2600.00),
    (16, 90, 292.50, 4680.00),
    (32, 60, 195.00, 6240.00),
    (48, 35, 113.75, 5460.00),
    (64, 40, 130.00, 8320.00),
]


def points(tau=3.25, **changed):
    return [fr.OperatingPoint(r, sps, changed.get(f"tau_{r}", tau)) for r, sps, _, _ in LAB_25]


def test_lab_25_table():
    for point, (_, _, user, device) in zip(points(), LAB_25, strict=True):
        assert (point.user_rate, point.device_rate) == (user, device)
    assert [p.requests for p in fr.frontier(points())] == [8, 16, 32, 64]


def test_one_scale_keeps_the_frontier_but_one_point_can_change_it():
    assert [p.requests for p in fr.frontier(points(tau=2.734375))] == [8, 16, 32, 64]
    # 48 requests at tau 4: 140 and 6,720 are dominated by nobody.
    assert [p.requests for p in fr.frontier(points(tau_48=4.0))] == [8, 16, 32, 48, 64]
    # 32 requests at tau 2: 120 and 3,840 lose to 64 requests.
    assert [p.requests for p in fr.frontier(points(tau_32=2.0))] == [8, 16, 64]


def test_published_point():
    point = fr.OperatingPoint(64, 246 / 3.25, 3.25)
    assert round(point.steps_per_second, 2) == 75.69
    assert point.device_rate == pytest.approx(15_744)
    halved = fr.OperatingPoint(64, 246 / 3.25, 3.25, context_parallel=2)
    assert halved.device_rate == pytest.approx(7_872)
    assert halved.user_rate == point.user_rate


grid = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=25)


@given(grid)
def test_against_brute_force(pairs):
    keep = fr.non_dominated([x for x, _ in pairs], [y for _, y in pairs])
    for i, (x, y) in enumerate(pairs):
        beaten = any((a >= x and b >= y) and (a > x or b > y) for a, b in pairs)
        assert keep[i] == (not beaten)


def test_infinite_and_nan():
    assert fr.non_dominated([np.inf, np.inf, 1], [-np.inf, 2, 3]).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="without NaN"):
        fr.non_dominated([1, np.nan], [1, 2])


def record(requests, sps, **extra):
    return {"requests": requests, "steps_per_second": sps, "model": "m", "ep": 64} | extra


def test_repeated_runs_are_combined():
    runs = [record(8, 100.0), record(16, 90.0), record(8, 104.0), record(8, 96.0)]
    eight, sixteen = fr.points_from_records(runs, fixed=["model", "ep"], tau={8: 3.0, 16: 2.5})
    assert (eight.requests, eight.runs, eight.steps_per_second, eight.tau) == (8, 3, 100.0, 3.0)
    low, _ = stats.t.interval(0.95, 2, loc=100.0, scale=stats.sem([100.0, 104.0, 96.0]))
    assert eight.half_width == pytest.approx((100.0 - low) / 100.0)
    assert (sixteen.runs, sixteen.half_width, sixteen.tau) == (1, 0.0, 2.5)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"ep": 8}, r"records mix ep=\[64, 8\]"),
        ({"context_parallel": 2}, r"records mix context_parallel=\[1, 2\]"),
        ({"model": ["list", "valued"]}, "records mix model"),
    ],
)
def test_mixed_configurations_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        fr.points_from_records(
            [record(8, 1.0), record(16, 1.0, **extra)], fixed=["model", "ep"], tau=3
        )


def test_undeclared_configuration_is_refused():
    with pytest.raises(ValueError, match="lacks 'nextn'"):
        fr.points_from_records([record(8, 1.0)], fixed=["nextn"], tau=3.0)
    with pytest.raises(ValueError, match="no tau for 8"):
        fr.points_from_records([record(8, 1.0)], fixed=["ep"], tau={16: 3.0})


def test_context_parallel_divides():
    runs = [record(8, 100.0, context_parallel=4)]
    (point,) = fr.points_from_records(runs, fixed=["ep"], tau=2.0)
    assert point.device_rate == 400.0


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 29, 100, 501])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_student_t(degrees, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, degrees)
    assert fr.student_t_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


def test_interval_needs_runs():
    assert fr.mean_interval([3.0]) == (3.0, float("inf"))
    with pytest.raises(ValueError, match="at least one run"):
        fr.mean_interval([])
    with pytest.raises(ValueError, match="confidence=1"):
        fr.student_t_quantile(1, 3)
