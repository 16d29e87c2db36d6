"""Every option has a rule for when it is read, and the rules tell the truth.

An option said to be unread changes nothing in a run, in the readable model (many clusters) and in the
compiled program (two); one said to be read changes some run.
"""

import collections
import dataclasses
import typing

import jax
import numpy as np
import pytest

from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import PolicyParameters
from deepinfer_jax.simulator import scenario, unused
from deepinfer_jax.simulator.checks import check_cluster
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Incident, Mode, Pool
from deepinfer_jax.simulator.options import OPTIONS, default, only_read
from deepinfer_jax.simulator.service import COSTS, ServiceConfig
from tests.simulator import retention_test, storage_test
from tests.simulator.oracle import generate, hand, service, troubles
from tests.simulator.reuse import Reusable

P, C, N, X = Mode.PROMPT, Mode.COMPLETION, Mode.NORMAL, Mode.MIXED
FIELDS = {field.name: field for field in dataclasses.fields(ClusterConfig)}
POOL = Pool(initial=1, maximum=1, capacity=3)
EMPTY = Pool(initial=0, minimum=0, maximum=0, capacity=3)


def takers(cluster):
    return sum(m != C for m in cluster.modes)


def dealt(cluster):
    return (takers(cluster) - cluster.tiers + 1,) + (1,) * (cluster.tiers - 1)


# Values that an option may take instead of its own, or functions of the cluster.
OTHER = {
    "modes": ((X,), (N, N)),
    "ranks": (1, 2),
    "slots": (1, 2),
    "kv_blocks": (None, 40),
    "block_tokens": (3, 128),
    "max_input_tokens": (5, 9),
    "cost": (hand.cost(), hand.cost(prefill_token=7)),
    "cache_scope": ("none", "local"),
    "publish_output": (False, True),
    "swa": (False, True),
    "swa_anchors": ("output_end", "every_chunk"),
    "warm_requests": ((0,), (1, 2)),
    "prefill_policy": ("random", "least_tokens"),
    "tier_edges": ((9,),),
    "tier_engines": (lambda c: dealt(c), lambda c: dealt(c)[::-1]),
    "tier_quota": ((3,), (1,)),
    "warm_engine": (lambda c: max(np.flatnonzero(c.serving_at_first)),),
    "fetch_link": ("fifo", "unlimited"),
    "decode_policy": ("random", "round_robin"),
    "handoff_link": ("fifo", "unlimited"),
    "nextn": (0, 1),
    "acceptance": ((), (0.1, 0.1, 0.1)),
    "prompt_usage_limit": ((0, 1), (1, 3)),
    "incidents": ((), ((40, Incident.HOST, 0),)),
    "storage_nodes": (15, 16),
    "storage_asked": (10, 12),
    "retention_ttl_ticks": ((5, 5, 5), (300, 300, 300)),
    "retention_low_blocks": (0, lambda c: c.retention_high_blocks),
    "retention_precedence": ("pressure_first", "class_first"),
    "scale_prompt": (lambda c: POOL if P in c.modes else EMPTY,),
    "scale_decode": (lambda c: POOL if C in c.modes else EMPTY,),
    "hold_above": (0.0, 0.3),
    "token_times": (False, True),
    "policy": ({}, {"short_below": 1, "token_beta": 10**6, "overlap_weight": 3.0}),
}
NUMBERS = (1, 7)
COUNTED = ("scale_prompt", "scale_decode", "retention_sweep_ticks")
"""Rounds without an engine or a cache change nothing, but a run counts them."""

TOGETHER = {
    "tier_edges": {"tier_quota": (FOREVER, FOREVER)},
    "nextn": {"acceptance": (0.5,)},
    "scale_prompt": {"scale_round_ticks": 50},
    "scale_decode": {"scale_round_ticks": 50},
    "retention_high_blocks": {"retention_low_blocks": 0},
    "retention_sweep_ticks": {"retention_ttl_ticks": (5, 5, 5)},
}


def varied(cluster, name):
    """The cluster with one option changed, in each way there is."""
    for value in OTHER.get(name, NUMBERS):
        value = value(cluster) if callable(value) else value
        if value != getattr(cluster, name):
            yield dataclasses.replace(cluster, **{name: value} | TOGETHER.get(name, {}))


def outcome(cluster, load):
    """All that the readable model says of a run."""
    return service.run(cluster, load)


def stored():
    """Three of twelve storage nodes are down when a warm prompt is matched."""
    cluster = ClusterConfig(
        modes=(X,),
        cost=hand.cost(),
        block_tokens=4,
        cache_scope="shared",
        reserve=1,
        warm_requests=(0,),
        incidents=tuple((1, Incident.STORAGE, node) for node in range(3)),
        storage_nodes=12,
    )
    one = [1, 1, 1]
    load = hand.workload([10, 10, 10], [40, 40, 40], [2, 2, 2], [(0, 0, 9)], match=one, publish=one)
    return cluster, load


def bare():
    """Nothing is counted in blocks, nothing moves, nothing fails."""
    cluster = ClusterConfig(modes=(N, N), cost=hand.cost(), slots=2)
    return cluster, hand.workload([0, 3, 3, 7], [30, 20, 9, 40], [5, 1, 9, 2])


def clusters(seeds):
    """Small ones with and without everything, and a workload for each."""
    yield bare()
    yield stored()
    for seed in range(3):
        yield retention_test.case("shared", seed)
        yield storage_test.case("steady", seed)
    for seed in seeds:
        yield generate.case(seed)
        for topology in troubles.TOPOLOGIES if seed % 7 == 0 else ():
            yield troubles.case(topology, seed)


def leaves(section, path=""):
    """Paths of all settings; a pool is one."""
    hints = typing.get_type_hints(section)
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{path}{name}.")
        elif name != "cost":
            yield path + name


def test_every_option_has_a_rule():
    assert set(OPTIONS) == set(FIELDS)
    assert all(
        default(FIELDS[n]) is not dataclasses.MISSING for n in FIELDS if OPTIONS[n].otherwise
    )
    paths = set(leaves(ServiceConfig))
    ours = {path for path in unused.SETTINGS if not path.startswith("cost.")}
    assert ours == {path for path in paths if not path.startswith("cost.")}
    known = {f"cost.{f.name}" for kind in COSTS.values() for f in dataclasses.fields(kind)}
    assert {path for path in unused.SETTINGS if path.startswith("cost.")} <= known
    assert {rule for rule in unused.SETTINGS.values() if isinstance(rule, str)} <= set(OPTIONS)


def test_every_policy_parameter_has_a_reader():
    read = {
        name
        for kind in ("prefill", "decode")
        for policy in registry.names(kind)
        for name in registry.resolve(kind, policy).__code__.co_names
    }
    assert {field.name for field in dataclasses.fields(PolicyParameters)} <= read


def test_what_is_unread_is_refused_and_changes_nothing():
    tried = collections.Counter()
    for cluster, load in clusters(range(21)):
        check_cluster(cluster)
        before = outcome(cluster, load)
        for name, option in OPTIONS.items():
            if option.read(cluster) or tried[name] == 4:
                continue
            tried[name] += 1
            assert getattr(cluster, name) == default(FIELDS[name])
            for other in varied(cluster, name):
                assert name in COUNTED or outcome(other, load) == before, (name, other)
                assert only_read(other) == cluster
                pattern = rf"^{name}=.* is set, but .*unset it$|wait for ever; use fewer {name}"
                with pytest.raises(ValueError, match=pattern):
                    check_cluster(other)
    assert set(tried) == {name for name in OPTIONS if OPTIONS[name].otherwise}, tried


def test_what_is_unread_changes_nothing_in_the_program(monkeypatch):
    """Where it does not select another program, which the readable model stands for above."""
    cluster, load = bare()
    program = Reusable(cluster, load)
    before = program.run(cluster, load)
    monkeypatch.setattr(scenario, "check_cluster", lambda cluster: None)
    tried = set()
    for name, option in OPTIONS.items():
        skipped = option.read(cluster) or name == "warm_requests"  # an array's size
        for other in () if skipped else varied(cluster, name):
            if scenario.split(other, load)[0] == program.shape:
                after = program.run(other, load)
                same = jax.tree.map(np.array_equal, dataclasses.replace(before), after)
                assert jax.tree.all(same), name
                tried.add(name)
    assert len(tried) > 25


def test_what_is_read_can_change_a_run():
    """`token_times` alone never does: it records."""
    left = {name for name in OPTIONS if name != "token_times"}
    for cluster, load in clusters((*range(21), 38, 61)):
        if not left:
            return
        before = outcome(cluster, load)
        for name in sorted(left):
            if not OPTIONS[name].read(cluster):
                continue
            for other in varied(cluster, name):
                try:
                    check_cluster(other)
                except ValueError:
                    continue
                if outcome(other, load) != before:
                    left.discard(name)
    assert not left
