"""The resilience study: shares, dips and names from timelines whose answers are known."""

import numpy as np
import pytest

from deepinfer_jax import metrics
from experiments import resilience


def timeline(arrival, latency):
    """Requests of ten tokens that start at once and end `latency` seconds later."""
    begin = np.round(np.asarray(arrival) * 1e9).astype(np.int64)
    end = begin + np.round(np.asarray(latency) * 1e9).astype(np.int64)
    ten = np.full(len(begin), 10)
    return metrics.timeline(begin, end, first_token=begin, output_tokens=ten)


def test_shares_count_by_arrival():
    t = timeline([0.5, 1.5, 2.5, 2.6, 6.0], [1, 1, 1, 9, 9])
    edges, came, share = resilience.shares(t, metrics.Slo(e2e=2.0), 2.0)
    assert edges.tolist() == [0, 2, 4, 6, 8] and came.tolist() == [2, 2, 0, 1]
    assert share[:2].tolist() == [1.0, 0.5] and np.isnan(share[2]) and share[3] == 0


def test_a_dip_begins_with_the_event():
    edges = np.arange(0, 70, 10.0)
    share = np.array([0.2, 1.0, 0.7, 1.0, 0.9, 1.0])
    assert resilience.dip(edges, share, 15.0) == (0.7, 20.0, 35.0)
    assert resilience.dip(edges, np.ones(6), 15.0) == (1.0, 0.0, 0.0)


def test_a_column_per_event_and_one_line_per_case():
    edges = np.arange(0, 40, 10.0)
    lines = {"no spare": (edges, np.ones(3)), "one spare": (edges, np.zeros(3))}
    groups = {"no spare": (edges, np.full(3, 4.0)), "one spare": (edges, np.full(3, 5.0))}
    both = {"group lost": lines, "group leaves": lines}
    made = resilience.figure(both, dict.fromkeys(both, groups), 12.0)
    titles = [ax.get_title(loc="left") for ax in made.axes]
    assert titles == ["group lost", "group leaves", "", ""]
    for ax, (first, second) in zip(made.axes, [(1, 0), (1, 0), (4, 5), (4, 5)], strict=True):
        drawn = {line.get_label(): line for line in ax.lines}
        assert drawn["no spare"].get_xdata().tolist() == pytest.approx([5, 15, 25])
        assert drawn["no spare"].get_ydata().tolist() == [first] * 3
        assert drawn["one spare"].get_ydata().tolist() == [second] * 3
