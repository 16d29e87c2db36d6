"""Crashes, departures, scaling and storage failures: both models agree on every event, to the tick.

Four topologies, one compilation each, under random incidents and limits; one runs with every change.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_jax.simulator.cluster import Status
from deepinfer_jax.simulator.tokens import token_times
from deepinfer_jax.simulator.trajectory import Trajectory
from deepinfer_jax.simulator.usage import busy_over_time, up_over_time, usage
from deepinfer_jax.timeline import EVENTS
from tests.simulator.agreement_test import COUNTERS, REST
from tests.simulator.oracle import service, troubles
from tests.simulator.reuse import Reusable


@pytest.fixture(scope="module")
def quick():
    return Reusable(*troubles.case("plain", 0))


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
    compare("plain", quick, range(40))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1_000, 10**6))
def test_everything_is_conserved(quick, seed: int) -> None:
    """Besides what every run checks of itself: requests, tokens, engine time, KV bytes."""
    cluster, load = troubles.case("plain", seed)
    run = quick.run(cluster, load)
    status, crashes = np.asarray(run.requests.status), np.asarray(run.lives.crashes)
    ended = [int(np.sum(status == s)) for s in Status]
    assert sum(ended) == load.requests
    assert np.array_equal(status == Status.CRASHED, crashes > cluster.retry_limit)
    done = status == Status.COMPLETED
    assert np.array_equal(run.emitted[done], load.output_tokens[done])
    assert np.all(run.emitted <= load.output_tokens)
    ticks = np.asarray(run.lives.life_ticks)
    assert ticks.min() >= 0 and np.all(ticks.sum(axis=1) == run.end)
    assert np.all(run.busy.sum(axis=1) <= ticks[:, 2:].sum(axis=1))
    if not np.any(status == Status.STUCK):
        assert not np.any(run.left)
    if not crashes.any() and not run.lives.forwards:
        # Each request that decodes at all moved once, with its blocks and its live state.
        moved = np.asarray(run.requests.handed_off) >= 0
        blocks = -(-load.input_tokens[moved].astype(np.int64) // cluster.block_tokens)
        once = int(np.sum(blocks * cluster.block_bytes + cluster.live_bytes))
        assert int(run.handoff_bytes) >= once  # redirected ones moved again


@pytest.mark.slow
def test_every_event_agrees_on_more_cases(every) -> None:
    compare(*every, range(40, 300))


def test_usage_counts_what_is_held(quick) -> None:
    """GPU-hours are those of engines that are not off; shares are of the time they serve."""
    seen = 0
    for seed in range(8):
        cluster, load = troubles.case("plain", seed)
        run = quick.run(cluster, load)
        gpus = cluster.engines * cluster.ranks * 2
        used = usage(run, cluster, gpus)
        off = np.asarray(run.lives.life_ticks)[:, 0]
        held = cluster.engines * int(run.end) - int(off.sum())
        assert used["gpu_hours"] == pytest.approx(held * gpus / cluster.engines / 3.6e12)
        assert 0 <= used["busy_fraction"] <= 1 and 0 <= used["decode_busy_fraction"] <= 1
        shares, edges = busy_over_time(run, cluster)
        assert edges[-1] * 1e9 >= run.end and all(np.all(s >= 0) for s in shares.values())
        assert all(np.all(s <= 1 + 1e-9) for s in shares.values())
        up = up_over_time(run, cluster)
        served = sum(np.asarray(run.lives.life_ticks)[:, 2:].sum(axis=1))
        lasted = np.minimum(np.diff(edges) * 1e9, run.end - edges[:-1] * 1e9)
        assert sum(np.sum(lasted * x) for x in up.values()) == pytest.approx(served)
        seen += used["crashes"] > 0
    assert seen
