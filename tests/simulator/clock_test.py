"""Clock arithmetic against Python's unbounded integers."""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from deepinfer_jax.simulator import clock
from deepinfer_jax.simulator.clock import SUBS_PER_FEMTOSECOND, SUBS_PER_TICK
from deepinfer_jax.simulator.steps import RUN_SUBS

MOST_STEPS = 2**50


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def total(steps, first, slope):
    return steps * first + slope * (steps * (steps - 1) // 2)


def fewest(target, first, slope):
    """Smallest number of steps that last at least `target`, by bisection."""
    low, high = 0, 1
    while total(high, first, slope) < target:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if total(middle, first, slope) >= target:
            high = middle
        else:
            low = middle + 1
    return low


@st.composite
def runs(draw):
    """(target, first, slope) of runs as long as the simulator makes them, boundaries included."""
    first = draw(st.integers(0, 61).flatmap(lambda k: st.integers(2**k // 2 + 1, 2**k)))
    slope = draw(st.one_of(st.just(0), st.integers(0, 50).flatmap(lambda k: st.integers(0, 2**k))))
    longest = min(MOST_STEPS, RUN_SUBS // first, int((RUN_SUBS / max(slope, 1)) ** 0.5))
    steps = draw(st.one_of(st.integers(1, max(longest, 1)), st.just(max(longest, 1))))
    last = total(steps, first, slope)
    target = last + draw(st.one_of(st.integers(-3, 3), st.integers(-first, first)))
    return min(target, total(max(longest, 1), first, slope)), first, slope


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(runs(), min_size=20, max_size=20))
def test_steps_of_a_run_to_the_last_sub(cases):
    target, first, slope = (np.array(x, np.int64) for x in zip(*cases, strict=True))
    reach = np.asarray(clock.steps_to_reach(target, first, slope)).tolist()
    within = np.asarray(clock.steps_within(target, first, slope)).tolist()
    lasts = np.asarray(clock.run_subs(np.array(reach), first, slope)).tolist()
    for case, found, inside, subs in zip(cases, reach, within, lasts, strict=True):
        expected = fewest(*case)
        assert found == expected, case
        assert inside == expected - (total(expected, *case[1:]) > case[0]), case
        assert subs == total(expected, *case[1:])


def test_steps_by_counting():
    targets = np.arange(-2, 150)
    for first, slope in itertools.product((1, 2, 7), (0, 1, 5)):
        ends = np.cumsum(first + slope * np.arange(200))
        reach = np.where(targets > 0, np.searchsorted(ends, targets, "left") + 1, 0)
        assert np.array_equal(clock.steps_to_reach(targets, first, slope), reach)
        within = clock.steps_within(targets[2:], first, slope)
        assert np.array_equal(within, np.searchsorted(ends, targets[2:], "right"))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.integers(0, 2**60), st.integers(0, SUBS_PER_TICK - 1), st.lists(st.integers(0, 2**61))
)
def test_a_clock_never_loses_a_sub(tick, remainder, durations):
    expected = tick * SUBS_PER_TICK + remainder
    at = (np.int64(tick), np.int64(remainder))
    for i, subs in enumerate(durations):
        if i % 2:
            at = clock.advance_femtoseconds(*at, np.int64(subs))
            expected += subs * SUBS_PER_FEMTOSECOND
        else:
            at = clock.advance_subs(*at, np.int64(subs))
            expected += subs
        assert 0 <= int(at[1]) < SUBS_PER_TICK
    assert int(at[0]) * SUBS_PER_TICK + int(at[1]) == expected


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.integers(1, 2**40), st.integers(0, 2**20), st.lists(st.integers(1, 1000), min_size=1)
)
def test_splitting_a_run_does_not_move_its_end(first, slope, parts):
    """Runs of `parts` steps, one after the other, end where one run of all steps ends."""
    at, done = (np.int64(5), np.int64(17)), 0
    for steps in parts:
        subs = clock.run_subs(np.int64(steps), np.int64(first + done * slope), np.int64(slope))
        at, done = clock.advance_subs(*at, subs), done + steps
    whole = clock.advance_subs(
        np.int64(5), np.int64(17), clock.run_subs(np.int64(done), np.int64(first), np.int64(slope))
    )
    assert [int(x) for x in at] == [int(x) for x in whole]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(0, 2**62))
def test_ticks_round_up(femtoseconds):
    assert int(clock.ceil_ticks(np.int64(femtoseconds))) == -(-femtoseconds // 10**6)


def test_float_time_divides_and_keeps_no_remainder():
    tick, remainder = clock.advance_subs(np.float64(3), np.float64(0), np.float64(640_000_000))
    assert (float(tick), float(remainder)) == (5.5, 0)
    tick, _ = clock.advance_femtoseconds(np.float64(3), np.float64(0), np.float64(1_250_000))
    assert float(tick) == 4.25
    assert float(clock.ceil_ticks(np.float64(1_500_000))) == 1.5
