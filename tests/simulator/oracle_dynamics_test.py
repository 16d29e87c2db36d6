"""Crashes, departures and storage failures of the readable model against answers worked out by hand."""

from __future__ import annotations

import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.simulator import storage
from deepinfer_jax.simulator.cluster import ClusterConfig, Incident, Mode, Pool, Status
from tests.simulator.oracle.hand import TICK, cost, workload
from tests.simulator.oracle.service import run
from tests.simulator.oracle.storage import holders

N, P, C = Mode.NORMAL, Mode.PROMPT, Mode.COMPLETION


def test_a_crash_keeps_what_was_sent() -> None:
    # Prompt 0..10, steps end at 20 and 30, the one under way at 35 is lost: 3 of 6 tokens are sent.
    # The other engine prefills 10 + 3 tokens until 48, which sends the 4th, and ends at 68.
    crash = ((35, Incident.HOST, 0),)
    one = workload([0], [10], [6])
    both = run(ClusterConfig(modes=(N, N), cost=cost(), incidents=crash, restart_ticks=100), one)
    assert (both.first_token, both.finish, both.crashes) == ([10], [68], [1])
    assert both.tokens == [[10, 20, 30, 48, 58, 68]]
    assert both.lives == [[0, 33, 35, 0], [0, 0, 68, 0]] and both.busy == [35, 33]
    # Alone, it waits for the restart at 135.
    alone = run(ClusterConfig(modes=(N,), cost=cost(), incidents=crash, restart_ticks=100), one)
    assert alone.tokens == [[10, 20, 30, 148, 158, 168]]
    # Without a retry it is lost at once.
    lost = run(ClusterConfig(modes=(N,), cost=cost(), incidents=crash, retry_limit=0), one)
    assert lost.status == [Status.CRASHED] and lost.emitted == [3]


def test_a_group_returns_with_its_healthy_gpus() -> None:
    # Two ranks take one prompt each; after GPU 1 is lost both prompts are computed by rank 0.
    service = ClusterConfig(
        modes=(N,), ranks=2, cost=cost(), incidents=((5, Incident.GPU, 1),), restart_ticks=10
    )
    result = run(service, workload([0, 0], [20, 20], [1, 1]))
    assert result.prefill_rank == [0, 0] and result.finish == [55, 55]
    # Without a healthy one it never returns.
    dead = ((5, Incident.GPU, 0), (5, Incident.GPU, 1))
    result = run(
        ClusterConfig(modes=(N,), ranks=2, cost=cost(), incidents=dead, restart_ticks=10),
        workload([0, 0], [20, 20], [1, 1]),
    )
    assert result.status == [Status.STUCK] * 2 and result.lives == [[0, 0, 5, 0]]
    # A repaired one comes back with the next start.
    repaired = ((5, Incident.GPU, 1), (30, Incident.HOST, 0))
    result = run(
        ClusterConfig(
            modes=(N,), ranks=2, cost=cost(), incidents=repaired, restart_ticks=10, repair_ticks=20
        ),
        workload([0, 0], [20, 20], [1, 1]),
    )
    assert result.prefill_rank == [0, 1] and result.finish == [60, 60]


def test_a_planned_departure_forwards_after_its_grace() -> None:
    # Decode from 15; leaves at 20, its grace ends at 32, the step at 35: 3 tokens sent, 12 in the KV.
    # They land at 40, and six more steps end at 100. Without the departure it ends at 95.
    service = ClusterConfig(
        modes=(P, C, C),
        cost=cost(),
        handoff_ticks=5,
        incidents=((20, Incident.DEPART, 1),),
        grace_ticks=12,
        block_tokens=4,
        block_bytes=100,
        live_bytes=7,
    )
    result = run(service, workload([0], [10], [9]))
    assert (result.handed_off, result.finish, result.decode_engine) == ([40], [100], [2])
    assert result.preemptions == [0] and result.forwards == 1
    assert result.handoff_bytes == (3 * 100 + 7) + (3 * 100 + 7)
    assert result.lives == [[0, 0, 100, 0], [60, 0, 20, 20], [0, 0, 100, 0]]


def test_two_requests_travel_together() -> None:
    # A byte takes a tick: two singles of 10 bytes would land 10 apart, one transfer lands both.
    service = ClusterConfig(
        modes=(P, C, C),
        cost=cost(),
        handoff_link="fifo",
        handoff_femtoseconds_per_byte=TICK,
        live_bytes=10,
        decode_policy="round_robin",
        incidents=((60, Incident.DEPART, 1),),
        grace_ticks=0,
    )
    result = run(service, workload([0, 0, 0], [10, 10, 10], [20, 20, 20]))
    # Round robin: requests 0 and 2 on engine 1 from 40 and 60 on, request 1 on engine 2 from 50.
    assert result.decode_engine == [2, 2, 2] and result.forwards == 2
    assert result.handed_off[0] == result.handed_off[2] == 60 + 20


def test_the_prompt_pool_follows_the_tokens_of_a_round() -> None:
    # Round 1: 30 tokens at 10 each want 3 engines + 1 spare, one more per round; then nothing comes
    # but one per round goes, above 0.8 none.
    pool = Pool(initial=1, minimum=1, maximum=4, capacity=10, spare=0, step_up=1, step_down=1)
    service = ClusterConfig(
        modes=(P, P, P, P, C),
        cost=cost(),
        scale_prompt=pool,
        scale_round_ticks=100,
        start_ticks=10,
        prefill_policy="least_quota",
    )
    arrivals = [0, 0, 0, 110, 111, 210, 310, 490]
    result = run(service, workload(arrivals, [10, 10, 10, 10, 8, 9, 1, 1], [1] * 8))
    assert [row[:4] for row in result.scalings] == [
        (100, 1, 30, 2),
        (200, 2, 18, 2),  # 0.9 of two engines; two are wanted anyway
        (300, 2, 9, 1),  # 0.45
        (400, 1, 1, 1),
    ]
    # 17 of 20 tokens use 0.85 of two engines: one would do for 10, but two stay.
    held = run(service, workload([0, 0, 110, 310], [10, 10, 17, 1], [1] * 4))
    assert [row[:4] for row in held.scalings][:2] == [(100, 1, 20, 2), (200, 2, 17, 2)]


@pytest.mark.parametrize("nodes", [13, 20])
def test_a_block_outlives_any_two_nodes_and_few_outlive_three(nodes: int) -> None:
    """A tenth fragment is missing where all three nodes hold one: C(n-3, 9) / C(n, 12) of the blocks."""
    blocks = range(3000)
    held = [set(holders(nodes, 7, b)) for b in blocks]
    assert all(len(h) == 12 for h in held)
    for down in itertools.combinations(range(nodes), 2):
        assert all(len(h - set(down)) >= 10 for h in held)
    share = np.mean([len(h - {0, 4, 9}) < 10 for h in held])
    exact = math.comb(nodes - 3, 9) / math.comb(nodes, 12)
    assert share == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / len(blocks)))

    with jax.enable_x64(True):
        cluster = types.SimpleNamespace(
            shape=types.SimpleNamespace(storage_nodes=nodes),
            scenario=types.SimpleNamespace(stripe_blocks=jnp.int64(1)),
        )
        up_at = jnp.zeros(nodes, jnp.int64).at[jnp.asarray([0, 4, 9])].set(10)
        state = types.SimpleNamespace(node_up_at=up_at, now=jnp.int64(5))
        ours = jax.jit(
            jax.vmap(lambda b: storage.readable(cluster, state, jnp.int32(7), b))  # type: ignore[arg-type]
        )(jnp.arange(3000))
    assert [bool(x) for x in ours] == [len(h - {0, 4, 9}) >= 10 for h in held]
