"""Reads from storage nodes: both models agree on every tick, and a read waits as order statistics say."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.simulator import storage
from deepinfer_jax.simulator.cache import Cluster
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Incident, Mode
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.state import initial_state
from deepinfer_jax.timeline import EVENTS
from tests.simulator.agreement_test import COUNTERS, REST
from tests.simulator.oracle import hand, service, troubles
from tests.simulator.oracle.prompts import Dice, Planned, workload_of
from tests.simulator.oracle.storage import TABLE, readable
from tests.simulator.oracle.world import World
from tests.simulator.reuse import Reusable

X = Mode.MIXED


def readers(dice, requests):
    """Prompts that begin with much of one of three documents and end with something of their own."""
    names = iter(range(10**6))
    documents = [tuple(next(names) for _ in range(dice.between(6, 20))) for _ in range(3)]
    horizon = dice.one_of(50, 1_000, 20_000)
    planned = []
    for arrival in sorted(dice.between(0, horizon) for _ in range(requests)):
        document = dice.one_of(*documents)
        kept = document[: dice.one_of(len(document), dice.between(1, len(document)))]
        chain = kept + tuple(next(names) for _ in range(dice.between(1, 4)))
        tokens, match = len(chain) * troubles.BLOCK, len(chain) - 1
        planned.append(Planned(arrival, tokens, 2, chain, match, len(chain), len(chain), match))
    return planned


def case(variant, seed, requests=24):
    """Small clusters whose fetches wait for 12 to 14 nodes; `split` has failures of everything."""
    dice = Dice(seed)
    if variant == "split":
        cluster, load = troubles.case(variant, seed, requests)
    else:
        load = troubles.padded(workload_of(readers(dice, requests)), 6 * requests)
        cluster = ClusterConfig(
            modes=(X, X),
            cost=troubles.cost(dice),
            block_tokens=troubles.BLOCK,
            reserve=3,
            slots=3,
            match_ticks=dice.one_of(0, 1, 20),
            block_bytes=dice.between(1, 300),
            cache_scope="shared",
            cache_blocks=dice.between(20, 90),
            warm_requests=(0, 1, 2),
            publish_output=True,
            swa=True,
            swa_ttl_ticks=dice.one_of(FOREVER, dice.between(100, 5_000)),
            fetch_link="fifo",
            fetch_ticks=dice.one_of(0, 30),
            storage_nodes=13,
        )
    return dataclasses.replace(
        cluster,
        storage_read_ticks=dice.one_of(1, dice.between(1, 60), dice.between(50, 2_000)),
        storage_femtoseconds_per_byte=dice.one_of(0, dice.between(1, 10**6)),
        storage_asked=dice.between(10, 12),
        stripe_blocks=dice.one_of(1, 2, 5),
        fetch_femtoseconds_per_byte=dice.one_of(0, 10_000),
        seed=dice.between(0, 2**62),
    ), load


def compare(variant, reusable, seeds):
    reads = cut = 0
    for seed in seeds:
        cluster, load = case(variant, seed)
        made, expected = reusable.run(cluster, load), service.run(cluster, load)
        for field in (*EVENTS[1:], *REST):
            ours, theirs = (np.asarray(getattr(x, field)) for x in (made.requests, expected))
            if field in ("decode_engine", "decode_rank"):
                decoded = np.asarray(expected.decode_start) >= 0
                ours, theirs = ours[decoded], theirs[decoded]
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{variant} {seed}: {field}")
        for field in COUNTERS:
            assert int(getattr(made, field)) == getattr(expected, field), (variant, seed, field)
        found = made.stored
        assert int(found.reads) == expected.storage_reads
        assert int(found.bytes) == expected.storage_bytes
        assert int(found.read_ticks) == expected.storage_ticks
        assert found.node_busy.tolist() == expected.nodes_busy
        if made.lives is not None:
            assert int(made.lives.unreadable_blocks) == expected.unreadable_blocks
        reads, cut = reads + expected.storage_reads, cut + expected.unreadable_matches
    return reads, cut


def test_every_event_agrees():
    reads, _ = compare("steady", Reusable(*case("steady", 0)), range(40))
    assert reads > 200


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["steady", "split"])
def test_every_event_agrees_on_more_cases(variant):
    reads, cut = compare(variant, Reusable(*case(variant, 0)), range(40, 300))
    assert reads > 400 and (cut > 20 or variant == "steady")


def one_stripe(asked, nodes=14, **changes):
    """A cluster with one block stored, and its state; `read` of it starts at time 0."""
    load = hand.workload([0], [9], [1], [(0, 0, 1)], [1], [1])
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        cache_scope="shared",
        block_tokens=4,
        reserve=1,
        block_bytes=100,
        storage_nodes=nodes,
        storage_asked=asked,
        **{"storage_read_ticks": 10**6} | changes,
    )
    shape, scenario = split(cluster, load)
    scenario, load = jax.tree.map(jnp.asarray, (scenario, load))
    state = initial_state(shape, scenario)
    one = jnp.ones(2, jnp.int32)
    return Cluster(shape, scenario, load), state.replace(hit_blocks=one, hit_node=one)


@pytest.mark.parametrize("asked", [10, 11, 12])
def test_the_tenth_reply_has_the_mean_of_its_order_statistic(asked):
    """10th of n unit exponentials: the sum of 1/k for k = n - 9 to n (Renyi 1953)."""
    count = 20_000
    with jax.enable_x64(True):
        c, state = one_stripe(asked)
        read = jax.jit(
            jax.vmap(lambda p: storage.read(c, state.replace(placements=p), jnp.int32(0))[1])
        )
        ticks = np.asarray(read(jnp.arange(1, count + 1))) / 10**6
    expected = sum(1 / k for k in range(asked - 9, asked + 1))
    assert round(expected, 4) == {10: 2.9290, 11: 2.0199, 12: 1.6032}[asked]
    deviation = math.sqrt(sum(1 / k**2 for k in range(asked - 9, asked + 1)))
    assert ticks.mean() == pytest.approx(expected, abs=3.5 * deviation / math.sqrt(count))
    assert ticks.std() == pytest.approx(deviation, rel=0.04)


def test_the_table_is_the_exponential():
    table = storage.exponential_table()
    assert table.tolist() == TABLE
    assert table.mean() / 2**20 == pytest.approx(1, abs=1e-6)
    quantile = -np.log(1 - (np.arange(4096) + 0.5) / 4096)
    assert np.abs(table / 2**20 - quantile)[:4000].max() < 1e-4


def test_flows_of_a_node_queue():
    """Twelve nodes, all asked, 10 bytes a fragment at 3 ticks each: read n ends at 30 n."""
    with jax.enable_x64(True):
        rate = {"storage_femtoseconds_per_byte": 3 * 10**6, "storage_read_ticks": 0}
        c, state = one_stripe(12, nodes=12, **rate)
        read = jax.jit(lambda s: storage.read(c, s, jnp.int32(0)))
        for n in range(1, 4):
            state, end = read(state.replace(placements=jnp.int64(n)))
            assert int(end) == 30 * n
        assert state.node_busy.tolist() == [90] * 12 and int(state.storage_bytes) == 360


def test_a_match_ends_before_the_first_block_that_cannot_be_read():
    """Nine blocks in six segments, three of 20 nodes down: as the readable model says, case by case."""
    ends = (1, 2, 4, 5, 8, 9)
    nodes = [(k, start, end) for k, (start, end) in enumerate(zip((0, *ends), ends, strict=False))]
    load = hand.workload([0], [60], [1], nodes, [6], [6])
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        cache_scope="shared",
        block_tokens=4,
        reserve=1,
        block_bytes=1,
        storage_nodes=20,
        storage_read_ticks=1,
        stripe_blocks=2,
    )
    shape, scenario = split(cluster, load)
    world = World(cluster, load)
    downs = list(itertools.combinations(range(20), 3))[::3]
    expected = []
    for down in downs:
        world.nodes_up_at = [9 * (n in down) for n in range(20)]
        expected.append(readable(world, world.requests[0], 9, 6))
    with jax.enable_x64(True):
        scenario, load = jax.tree.map(jnp.asarray, (scenario, load))
        c, state = Cluster(shape, scenario, load), initial_state(shape, scenario)
        up_at = jnp.asarray([[9 * (n in down) for n in range(20)] for down in downs])
        six, nine = jnp.int32(6), jnp.int32(9)
        ask = jax.vmap(lambda x: storage.readable_prefix(c, state.replace(node_up_at=x), six, nine))
        _, segment, blocks = jax.jit(ask)(up_at)
    found = list(zip(blocks.tolist(), segment.tolist(), strict=True))
    assert found == expected and len(set(expected)) >= 5


@pytest.mark.parametrize(("down", "hit"), [(0, 36), (2, 36), (3, 0)])
def test_two_failed_nodes_lose_nothing_and_three_lose_stripes(down, hit):
    """Of twelve nodes, so that every stripe has a fragment on each."""
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        block_tokens=4,
        cache_scope="shared",
        reserve=1,
        warm_requests=(0,),
        block_bytes=100,
        storage_nodes=12,
        storage_read_ticks=50,
        incidents=tuple((1, Incident.STORAGE, node) for node in range(down)),
    )
    load = hand.workload([10], [40], [2], [(0, 0, 9)], match=[1], publish=[1])
    run = service.run(cluster, load)
    assert run.block_hit_tokens == [hit]
    assert run.unreadable_blocks == (0 if hit else 9)
    # Asked are 11 of 12, or the ten that are left.
    assert run.storage_bytes == {0: 9 * 11 * 10, 2: 9 * 10 * 10, 3: 0}[down]
    assert (run.fetched[0] > 10) == (hit > 0)


def test_what_fails_between_match_and_placement_is_not_read():
    """The second request waits for quota while the third node fails: it computes everything."""
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        block_tokens=4,
        cache_scope="shared",
        reserve=1,
        warm_requests=(0,),
        tier_quota=(1,),
        storage_nodes=12,
        incidents=tuple((12, Incident.STORAGE, node) for node in range(3)),
    )
    one = [1, 1]
    load = hand.workload([10, 11], [40, 40], [1, 1], [(0, 0, 9)], match=one, publish=one)
    run = service.run(cluster, load)
    assert run.matched == [10, 11] and run.pulled == [10, 14]
    assert run.block_hit_tokens == [36, 0] and run.unreadable_blocks == 9
    assert run.finish == [14, 54]
