"""Crashes, departures, scaling and storage failures: both models agree on every event, to the tick.

Four topologies, one compilation each, under random incidents and limits.
"""

import numpy as np
import pytest

from deepinfer_jax.simulator.tokens import token_times
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.timeline import EVENTS
from tests.simulator.agreement_test import COUNTERS, REST
from tests.simulator.oracle import service, troubles
from tests.simulator.reuse import Reusable


@pytest.fixture(scope="module", params=["plain", "co-located"])
def quick(request):
    return request.param, Reusable(*troubles.case(request.param, 0))


@pytest.fixture(scope="module", params=list(troubles.TOPOLOGIES))
def every(request):
    return request.param, Reusable(*troubles.case(request.param, 0))


def agree(made: Trajectory, expected: service.Result, name: str) -> None:
    for field in (*EVENTS[1:], *REST):
        ours, theirs = (
            np.asarray(getattr(made.requests, field)),
            np.asarray(getattr(expected, field)),
        )
        if field in ("decode_engine", "decode_rank"):
            decoded = np.asarray(expected.decode_start) >= 0
            ours, theirs = ours[decoded], theirs[decoded]
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}: {field}")
    np.testing.assert_array_equal(made.emitted, expected.emitted)
    np.testing.assert_array_equal(made.busy.sum(axis=1), expected.busy)
    for field in COUNTERS:
        assert int(getattr(made, field)) == getattr(expected, field), (name, field)
    lives = made.lives
    assert lives is not None
    np.testing.assert_array_equal(lives.crashes, expected.crashes)
    np.testing.assert_array_equal(lives.life_ticks, expected.lives)
    for field in ("blocks_lost", "forwards", "unreadable_blocks", "unreadable_matches"):
        assert int(getattr(lives, field)) == getattr(expected, field), (name, field)
    if lives.scale_log is not None:
        most = len(lives.scale_log) - 1
        rounds = lives.scale_log[: int(lives.scale_rounds)][:most]
        assert [tuple(row) for row in rounds.tolist()] == expected.scalings[:most]


def compare(topology: str, service_: Reusable, seeds: range) -> None:
    for seed in seeds:
        cluster, load = troubles.case(topology, seed)
        made = service_.run(cluster, load)
        expected = service.run(cluster, load)
        agree(made, expected, f"{topology} {seed}")
        if cluster.token_times:
            ticks, splits = token_times(made, cluster)
            assert [x.tolist() for x in np.split(ticks, splits[1:-1])] == expected.tokens


def test_every_event_agrees(quick) -> None:
    compare(*quick, range(60))


@pytest.mark.slow
def test_every_event_agrees_on_more_cases(every) -> None:
    compare(*every, range(60, 400))
