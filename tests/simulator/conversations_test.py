"""Weeks of conversations: their law of returns, and what a cache that forgets can still hit of them."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.simulator.conversations import AGENT, CHAT, DAY_SECONDS, Conversations
from deepinfer_jax.simulator.source import source

WEEK = Conversations(requests=4000, conversations=900, days=20.0, agent_share=0.1, leave=0.2)


def gaps(trace):
    """Days between the requests of a session, and the session of each gap."""
    order = np.lexsort((trace.turn, trace.session))
    session, arrival = trace.session[order], trace.arrival[order]
    same = session[1:] == session[:-1]
    assert np.all(np.diff(trace.turn[order])[same] == 1)
    return np.diff(arrival)[same] / DAY_SECONDS / 1e9, order[1:][same], order[:-1][same]


def test_returns_follow_their_law():
    """A fifth of the replies comes after a log-normal time away, whose median is a day."""
    endless = dataclasses.replace(WEEK, requests=8000, days=0.001, agent_share=0.0, away_days=1.0)
    found, _, _ = gaps(endless.trace(1))
    away = found > 0.02  # half an hour: twenty times the mean reply
    assert away.mean() == pytest.approx(0.2, abs=0.03)
    gap = np.log(found[found > 0.02])
    # Those who are away longest are cut off with the last requests: compare the lower half.
    assert np.median(gap[gap < 0]) == pytest.approx(1.3 * -0.674, abs=0.15)


def test_prompts_repeat_what_was_said_and_blocks_tell_so():
    trace = WEEK.trace(0)
    assert set(trace.traffic) == {CHAT, AGENT} and len(trace) == 4000
    _, later, earlier = gaps(trace)
    said = trace.input_tokens[earlier] + trace.output_tokens[earlier]
    assert np.all(trace.input_tokens[later] > said)
    for one, two in list(zip(earlier, later, strict=True))[:40]:
        mine, next_ = trace.blocks(one), trace.blocks(two)
        assert np.array_equal(next_[: len(mine)], mine)
    first = np.flatnonzero(trace.turn == 0)
    a, b = (first[trace.traffic[first] == kind] for kind in (CHAT, AGENT))
    common = 1024 // 128
    assert np.array_equal(trace.blocks(a[0])[:common], trace.blocks(a[1])[:common])
    assert not np.intersect1d(trace.blocks(a[0]), trace.blocks(b[0])).size
    assert not np.intersect1d(trace.blocks(a[0])[common:], trace.blocks(a[1])[common:]).size


def test_agents_never_leave():
    trace = WEEK.trace(2)
    found, later, _ = gaps(trace)
    agents = trace.traffic[later] == AGENT
    assert found[agents].max() < 0.01 < found[~agents].max()


def test_a_config_can_ask_for_them():
    values = {"kind": "conversations", "requests": 30, "conversations": 9, "days": 2}
    assert len(source(values).trace(0)) == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": 0.5}, "turns=0.5"),
        ({"leave": 1.5}, "leave=1.5"),
        ({"away_sigma": -1.0}, "away_sigma"),
        ({"requests": 10**6}, "are wanted"),
    ],
)
def test_impossible_weeks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WEEK, **change).trace(0)
