"""Sweeps of the caches: both models agree on every event and block, what is deleted is counted, and TTLs
keep exactly what they promise."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from deepinfer_jax.simulator.options import only_read
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.timeline import EVENTS
from tests.simulator.agreement_test import COUNTERS, REST
from tests.simulator.oracle import hand, service, troubles
from tests.simulator.oracle.prompts import Dice, workload_of
from tests.simulator.reuse import Reusable

P, C, X = Mode.PROMPT, Mode.COMPLETION, Mode.MIXED
SWEPT = ("sweeps", "expired", "reclaimed", "held_at_sweeps")
VARIANTS = {
    "shared": {
        "modes": (X, X),
        "cache_scope": "shared",
        "cache_blocks": 40,
        "retention_precedence": "class_first",
        "fetch_ticks": 40,
    },
    "local": {
        "modes": (X, X),
        "cache_scope": "local",
        "prefill_policy": "least_loaded",
        "cache_blocks": 60,
        "swa": True,
        "write_back_ticks": 3,
        "retention_precedence": "pressure_first",
    },
    "unbounded": {"modes": (P, C), "cache_scope": "shared", "retention_precedence": "age_first"},
    "tiers": {
        "modes": (P, P, C),
        "cache_scope": "shared",
        "cache_blocks": 40,
        "tier_edges": (20,),
        "tier_quota": (40, FOREVER),
        "tier_round_ticks": 60,
        "retention_precedence": "age_first",
    },
    "split": {"retention_precedence": "class_first"},
    "co-located": {"retention_precedence": "age_first"},
}


def case(variant, seed, requests=24):
    """A cluster whose sweeps bite, and requests of three traffic classes."""
    dice = Dice(seed)
    fixed = VARIANTS[variant]
    if variant in troubles.TOPOLOGIES:
        cluster, load = troubles.case(variant, seed, requests)
    else:
        load = troubles.padded(workload_of(troubles.fitting(dice, requests, 30)), 6 * requests)
        cluster = ClusterConfig(
            cost=troubles.cost(dice),
            block_tokens=troubles.BLOCK,
            reserve=3,
            publish_output=True,
            slots=3,
            match_ticks=dice.one_of(0, 1, 20),
            batch_tokens=dice.one_of(16, FOREVER),
            block_bytes=200,
            **fixed,
        )
    low, horizon = dice.between(0, 25), int(load.arrival[-1]) + 500
    cluster = dataclasses.replace(
        cluster,
        retention_precedence=fixed["retention_precedence"],
        retention_sweep_ticks=max(1, horizon // dice.one_of(2, 10, 40)),
        retention_ttl_ticks=tuple(
            dice.one_of(0, dice.between(1, 400), dice.between(300, 9_000), FOREVER)
            for _ in range(3)
        ),
        retention_low_blocks=low,
        retention_high_blocks=low + dice.between(0, 15),
    )
    traffic = np.asarray([dice.between(0, 2) for _ in range(requests)], np.int32)
    return only_read(cluster), dataclasses.replace(load, traffic=traffic)


def compare(variant, reusable, seeds):
    seen = dict.fromkeys(("expired", "reclaimed", "blocks_evicted"), 0)
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
        for field in SWEPT:
            assert int(getattr(made.swept, field)) == getattr(expected, field), (seed, field)
        seen["expired"] += expected.expired
        seen["reclaimed"] += expected.reclaimed
        seen["blocks_evicted"] += expected.blocks_evicted
    return seen


@pytest.fixture(scope="module")
def shared():
    return Reusable(*case("shared", 0))


def test_every_event_agrees(shared):
    seen = compare("shared", shared, range(40))
    assert min(seen.values()) > 0, "nothing was deleted in some way; the cases prove little"


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_event_agrees_on_more_cases(variant):
    seen = compare(variant, Reusable(*case(variant, 0)), range(40, 210))
    assert seen["expired"] > 0 and seen["reclaimed"] > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1_000, 10**6))
def test_who_forgets_nothing_is_as_without_sweeps(shared, seed):
    """Blocks are conserved, and sweeps that find nothing to delete change no time of any request."""
    cluster, load = case("shared", seed)
    roomy = dataclasses.replace(
        cluster,
        cache_blocks=10**6,
        retention_ttl_ticks=(FOREVER,) * 3,
        retention_high_blocks=10**6,
    )
    kept = shared.run(roomy, load)
    assert int(kept.swept.expired + kept.swept.reclaimed) == 0
    rare = shared.run(dataclasses.replace(roomy, retention_sweep_ticks=FOREVER - 1), load)
    assert int(rare.swept.sweeps) == 0
    assert np.array_equal(kept.requests.finish, rare.requests.finish)
    run = shared.run(cluster, load)
    gone = int(run.swept.expired + run.swept.reclaimed + run.blocks_evicted)
    assert int(run.blocks_published) == int(run.blocks_present) + gone


def second_hit(gap, traffic, ttl, sweep, between=()):
    """Tokens that the last of equal prompts hits `gap` ticks after the first; others may come between."""
    arrival = [0, *between, gap]
    count = len(arrival)
    load = hand.workload(
        arrival, [12] * count, [1] * count, [(0, 0, 2), (1, 2, 3)], [1] * count, [2] * count
    )
    load = dataclasses.replace(load, traffic=np.asarray(traffic, np.int32))
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        cache_scope="shared",
        block_tokens=4,
        reserve=1,
        retention_sweep_ticks=sweep,
        retention_ttl_ticks=ttl,
    )
    return cluster, load


@pytest.mark.parametrize(
    ("gap", "traffic", "ttl", "sweep", "between", "hit"),
    [
        # Published at 12; 88 ticks to live; the sweep at 100 deletes it, the one at 90 does not.
        (100, [0, 0], (88,), 10, (), 0),
        (99, [0, 0], (88,), 10, (), 8),
        (100, [0, 0], (89,), 10, (), 8),
        # Expired at 100, but nobody looks before 150: it still matches at 149.
        (149, [0, 0], (88,), 150, (), 8),
        (150, [0, 0], (88,), 150, (), 0),
        # Published again at 64 by another class, it lives until 114; by its own class, until 152.
        (120, [0, 1, 0], (88, 50), 10, (60,), 0),
        (119, [0, 1, 0], (88, 50), 10, (60,), 8),
        (159, [0, 0, 0], (88, 50), 10, (60,), 8),
        (160, [0, 0, 0], (88, 50), 10, (60,), 0),
        (200, [1, 1], (88, FOREVER), 10, (), 8),
    ],
)
def test_a_block_lives_as_long_as_its_class_says(gap, traffic, ttl, sweep, between, hit):
    cluster, load = second_hit(gap, traffic, ttl, sweep, between)
    assert service.run(cluster, load).block_hit_tokens[-1] == hit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retention_ttl_ticks": (5, 5)}, "3 traffic classes"),
        ({"retention_low_blocks": 50}, "exceeds retention_high_blocks"),
        ({"retention_high_blocks": 41}, "never reached"),
        ({"retention_sweep_ticks": FOREVER}, "nothing ever sweeps"),
        ({"retention_precedence": "lru"}, "is unknown"),
        ({"retention_ttl_ticks": (), "retention_high_blocks": FOREVER}, "nothing expires"),
        ({"retention_sweep_ticks": 0}, "at least 1"),
    ],
)
def test_contradictions_are_refused(changes, message):
    cluster, load = case("shared", 4)
    with pytest.raises(ValueError, match=message):
        split(dataclasses.replace(cluster, **changes), load)
