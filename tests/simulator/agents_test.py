"""Agent sessions look like the trace whose means they take."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.simulator import prefixes, replay
from deepinfer_jax.simulator.agents import Agents
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.workload import workload


def test_defaults_have_dualpaths_context_and_hit_rate():
    """arXiv 2602.21548: 157 rounds, 32.7k of context, 429 appended, 98.7 % of the prompt hit."""
    trace = Agents(sessions=60, rate=1.0).trace(0)
    assert np.all(np.bincount(trace.session) == 157)
    assert trace.input_tokens.mean() == pytest.approx(32_700, rel=0.06)
    trie = prefixes.build(trace, 64, 1, outputs=True)
    hits = replay.infinite_hits(trie, trace.arrival) * 64
    later = trace.turn > 0
    assert hits[later].sum() / trace.input_tokens.sum() == pytest.approx(0.987, abs=0.003)


def test_contexts_grow_by_what_was_said():
    trace = Agents(sessions=7, rate=5.0, rounds=9).trace(1)
    load = workload(trace, 64, 1, closed_loop=True)
    parent, follows = load.after.parent, load.after.parent >= 0
    assert np.array_equal(follows, trace.turn > 0)
    assert np.array_equal(trace.session[parent[follows]], trace.session[follows])
    assert np.array_equal(trace.turn[parent[follows]] + 1, trace.turn[follows])
    said = trace.input_tokens[parent] + trace.output_tokens[parent]
    assert np.all(trace.input_tokens[follows] >= said[follows])
    assert np.allclose(load.after.delay[follows], trace.think_seconds[follows] * 1e9, atol=1)
    wanted = trace.input_tokens[parent] // 64
    shared = [len(np.intersect1d(trace.blocks(q), trace.blocks(p))) for q, p in enumerate(parent)]
    assert np.array_equal(np.asarray(shared)[follows], wanted[follows])


def test_a_config_can_ask_for_them():
    values = {"kind": "agents", "sessions": 3, "rate": 1.0, "rounds": 4}
    assert len(source(values).trace(0)) == 12


@pytest.mark.parametrize(
    "change", [{"rounds": 0}, {"rate": 0.0}, {"append_mean": 50.0}, {"tool_seconds": -1.0}]
)
def test_impossible_sessions_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(Agents(sessions=2, rate=1.0), **change).trace(0)
