"""Requests that wait for earlier answers: both models agree, and a queue of N users has its known throughput."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest

from deepinfer_jax.simulator import loading, sessions, traces
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode, Status
from deepinfer_jax.simulator.workload import workload
from tests.simulator.dynamics_agreement_test import agree
from tests.simulator.oracle import hand, service, troubles
from tests.simulator.oracle.prompts import Dice
from tests.simulator.reuse import Reusable

TRACE = pathlib.Path(__file__).parents[2] / "configs/traces/claude_code_sessions_sample.jsonl.gz"


def case(topology, seed):
    """Random parents and delays on top of a random cluster with failures."""
    cluster, load = troubles.case(topology, seed)
    dice = Dice(seed + 10**6)
    share, longest = dice.one_of(0.3, 0.9, 1.0), dice.one_of(0, 20, 3_000)
    parent = [
        dice.between(max(0, q - 6), q - 1) if q and dice.chance(share) else -1
        for q in range(load.requests)
    ]
    delay = [dice.one_of(0, dice.between(0, longest)) for _ in parent]
    return cluster, dataclasses.replace(load, after=sessions.dependencies(parent, delay))


def compare(topology, reusable, seeds):
    for seed in seeds:
        cluster, load = case(topology, seed)
        made, expected = reusable.run(cluster, load), service.run(cluster, load)
        agree(made, expected, f"closed loop, {topology} {seed}")
        np.testing.assert_array_equal(made.requests.arrival, expected.arrival)


def test_every_event_agrees():
    compare("plain", Reusable(*case("plain", 0)), range(40))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["split", "co-located", "all"])
def test_every_event_agrees_on_more_cases(topology):
    compare(topology, Reusable(*case(topology, 0)), range(100))


def test_users_of_one_server_have_the_throughput_of_the_machine_repairman():
    """N users think and ask one exponential server: X = mu (1 - p0) of the finite-source M/M/1
    (Kleinrock, Queueing Systems I, section 3.8), and R = N / X - Z, the response-time law."""
    users, rounds, think, serve = 6, 3000, 40_000, 10_000
    random = np.random.default_rng(3)
    count = users * rounds
    lengths = np.maximum(1, np.rint(random.exponential(serve, count))).astype(int)
    parent = np.concatenate([np.full(users, -1), np.arange(count - users)])
    delay = np.rint(random.exponential(think, count)).astype(int)
    load = hand.workload([0] * count, lengths, [1] * count)
    load = dataclasses.replace(load, after=sessions.dependencies(parent, delay))
    cluster = ClusterConfig(modes=(Mode.MIXED,), cost=hand.cost(), batch_requests=1)
    run = Reusable(cluster, load).run(cluster, load)
    t = run.requests
    assert np.array_equal(t.arrival[users:], t.finish[:-users] + delay[users:])
    weights = [math.perm(users, n) * (serve / think) ** n for n in range(users + 1)]
    expected = (1 - weights[0] / sum(weights)) / serve
    throughput = count / t.finish.max()
    assert throughput == pytest.approx(expected, rel=0.02)
    response = np.mean(t.finish - t.arrival)
    assert response == pytest.approx(users / expected - think, rel=0.05)


def test_a_refused_turn_is_followed_by_its_next():
    load = hand.workload([0, 0, 0], [9, 2000, 3000], [2, 2, 2])
    load = dataclasses.replace(load, after=sessions.dependencies([-1, 0, 1], [0, 7, 5]))
    cluster = ClusterConfig(modes=(Mode.MIXED,), cost=hand.cost(), max_input_tokens=1000)
    run = service.run(cluster, load)
    assert run.status == [Status.COMPLETED, Status.TOO_LONG, Status.TOO_LONG]
    assert run.arrival == [0, 19 + 7, 26 + 5]


def test_coding_sessions_follow_the_answers_that_their_clients_waited_for():
    """Recorded arrival = end of the followed answer + think time, up to the file's whole seconds."""
    trace = loading.load(TRACE, on_invalid="reject")
    load = workload(trace, share_prefixes=False, closed_loop=True)
    after, arrival = load.after, trace.arrival_seconds
    follows = (after.parent >= 0) & ~np.isnan(trace.answer_seconds[after.parent])
    assert np.sum(after.parent < 0) == len(set(trace.session)) == 207
    ended = arrival[after.parent] + trace.answer_seconds[after.parent]
    gap = np.abs(arrival - ended - trace.think_seconds)[follows]
    assert np.mean(gap < 1.001) > 0.99 and follows.mean() > 0.95
    beside = np.isnan(trace.answer_seconds)
    assert beside.sum() > 1000


@pytest.mark.parametrize(
    ("parent", "delay", "message"),
    [([0], [0], "follows request 0"), ([-1, 0], [0, -1], "must not be negative")],
)
def test_impossible_dependencies_are_refused(parent, delay, message):
    with pytest.raises(ValueError, match=message):
        sessions.dependencies(parent, delay)


def test_a_trace_without_sessions_cannot_close_its_loop():
    with pytest.raises(ValueError, match="has no sessions"):
        workload(traces.plain("two", [0, 1], [9, 9], [1, 1]), closed_loop=True)
