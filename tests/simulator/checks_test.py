"""Contradictions are refused in one line; requests that cannot be served are counted, not lost."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.simulator.cluster import (
    FOREVER,
    ClusterConfig,
    Incident,
    Mode,
    Pool,
    Status,
)
from deepinfer_jax.simulator.scenario import split
from deepinfer_jax.simulator.simulate import sweep
from tests.simulator.oracle.hand import cost, workload
from tests.simulator.reuse import Reusable

MIXED = {"modes": (Mode.MIXED, Mode.MIXED), "cost": cost()}
LOAD = workload([0], [10], [1])
SPLIT = {"modes": (Mode.PROMPT, Mode.COMPLETION, Mode.COMPLETION)}


def slow_step(seconds):
    return cost(decode_forms=((10**15 * seconds, 0, 0),))


# changes to a good cluster, the value the message must show, the rule, the remedy
RULES = [
    ({"modes": (Mode.COMPLETION,)}, "modes=", "no engine takes prompts", "add a PROMPT"),
    ({"modes": (Mode.PROMPT,)}, "PROMPT", "no COMPLETION engine", "add one"),
    ({"modes": (Mode.COMPLETION, Mode.MIXED)}, "COMPLETION", "no PROMPT engine", "add one"),
    ({"ranks": 0}, "ranks=0", "at least 1", ""),
    ({"match_ticks": -1}, "match_ticks=-1", "at least 0", ""),
    ({"nextn": -1}, "nextn=-1", "at least 0", ""),
    ({"prompt_interval": 0}, "prompt_interval=0", "at least 1", ""),
    ({"prompt_usage_limit": (9, 0)}, "(9, 0)", "fraction", ""),
    ({"tier_quota": (-1,)}, "(-1,)", "must not be negative", ""),
    ({"modes": (Mode.MIXED, 7)}, "7", "modes", "use PROMPT"),
    ({"policy": {"short_bellow": 1}}, "'short_bellow'", "unknown", "'short_below'"),
    ({"cost": cost(prefill_token=-1)}, "prefill_token=-1", "must not be negative", ""),
    ({"cache_scope": "local", "warm_requests": (9,)}, "9", "requests are 0..0", ""),
    ({"slots": 0}, "slots=0", "at least 1", ""),
    ({"block_tokens": -128}, "block_tokens=-128", "at least 1", ""),
    ({"batch_tokens": 0}, "batch_tokens=0", "at least 1", ""),
    ({"batch_requests": 0}, "batch_requests=0", "at least 1", ""),
    ({"chunk_multiple": 0}, "chunk_multiple=0", "at least 1", ""),
    ({"kv_blocks": 0}, "kv_blocks=0", "must be positive", "use None"),
    ({"nextn": 2, "acceptance": (0.5,)}, "1 positions for nextn=2", "each", "give one"),
    ({"nextn": 1, "acceptance": (0.5, 0.5)}, "2 positions for nextn=1", "each", "give one"),
    ({"nextn": 1, "acceptance": (1.5,)}, "(1.5,)", "lie in [0, 1]", ""),
    ({"cache_scope": "global"}, "cache_scope='global'", "unknown", "shared"),
    ({"fetch_link": "lifo"}, "fetch_link='lifo'", "unknown", "fifo"),
    ({"handoff_link": "lifo"}, "handoff_link='lifo'", "unknown", "unlimited"),
    ({"swa_anchors": "never"}, "swa_anchors='never'", "unknown", "prompt_end"),
    ({"reserve": 0}, "reserve=0", "at least one prompt token", "use 1"),
    ({"swa": True}, "swa", "cache_scope='none'", "choose 'shared' or 'local'"),
    ({"publish_output": True}, "publish_output", "cache_scope='none'", "choose"),
    ({"warm_requests": (0,)}, "warm_requests", "cache_scope='none'", "choose"),
    ({"write_back_ticks": 5}, "write_back_ticks", "cache_scope='none'", "choose"),
    ({"cache_scope": "local", "fetch_ticks": 5}, "fetch_ticks=5", "nothing is fetched", "'shared'"),
    ({"cache_scope": "shared", "fetch_ticks": 5}, "fetch_ticks=5", "nothing", "with block_bytes"),
    ({"warm_engine": 2}, "warm_engine=2", "engines are 0..1", ""),
    (
        {"prefill_policy": "random", "tier_edges": (9,), "tier_quota": (1, 1)},
        "tier_edges=(9,)",
        "only prefill_policy='pull' has tiers",
        "choose it",
    ),
    (
        {"tier_edges": (9, 9), "tier_quota": (1, 1, 1), "modes": (Mode.MIXED,) * 3},
        "tier_edges=(9, 9)",
        "ascend",
        "",
    ),
    ({"tier_edges": (9,)}, "1 caps for 2 tiers", "each", "give one"),
    (
        {"tier_edges": (9,), "tier_quota": (1, 1), "tier_engines": (2, 1)},
        "tier_engines=(2, 1)",
        "must deal 2",
        "to 2 tiers",
    ),
    (
        {"tier_edges": (9, 10), "tier_quota": (1, 1, 1)},
        "3 tiers for 2",
        "wait for ever",
        "use fewer",
    ),
    (
        {"tier_edges": (9,), "tier_quota": (1, 1), "tier_round_ticks": 0},
        "tier_round_ticks=0",
        "at least 1",
        "",
    ),
    ({"cost": slow_step(9)}, "9 s", "the clock holds 8 s", "use smaller units"),
    ({"cost": cost(decode_forms=((1, -2, 0),))}, "((1, -2, 0),)", "not be negative", ""),
    ({"prefill_policy": "pul"}, "'pul'", "did you mean 'pull'", "package.module:function"),
    (SPLIT | {"decode_policy": "two_loads"}, "'two_loads'", "did you mean 'two_load'", "Known"),
    ({"incidents": ((5, Incident.GPU, 0), (4, Incident.GPU, 0))}, "[5, 4]", "ascend", ""),
    ({"incidents": ((5, 9, 0),)}, "(5, 9, 0)", "incidents holds", "use GPU"),
    ({"incidents": ((5, Incident.HOST, 2),)}, "2)", "there are 2 engines", "from 0"),
    ({"storage_nodes": 13}, "storage_nodes=13", "no node of a shared store", "'shared' with"),
    (
        {"storage_nodes": 11, "cache_scope": "shared"},
        "storage_nodes=11",
        "fragments on 12 nodes",
        "use as many",
    ),
    (
        {"storage_nodes": 13, "cache_scope": "shared"},
        "storage_nodes=13",
        "no node of a shared store fails",
        "unset",
    ),
    ({"policy": {"token_beta": 5}}, "policy['token_beta']", "neither", "unset it"),
    ({"prompt_interval": 5}, "prompt_interval=5", "only NORMAL engines vote", "add one"),
    ({"restart_ticks": 5}, "restart_ticks=5", "no incident crashes", "unset it"),
    ({"retry_limit": 5}, "retry_limit=5", "no incident crashes", "unset it"),
    ({"start_ticks": 5}, "start_ticks=5", "no pool is scaled", "unset it"),
    ({"grace_ticks": 5}, "grace_ticks=5", "no COMPLETION engine leaves", "unset it"),
    (
        {"scale_prompt": Pool(initial=1, maximum=1, capacity=1), "scale_round_ticks": 5},
        "maximum=1",
        "<= 0, the PROMPT engines",
        "must hold",
    ),
    (
        SPLIT | {"scale_decode": Pool(initial=2, maximum=1, capacity=1), "scale_round_ticks": 5},
        "initial=2",
        "<= 2, the COMPLETION engines",
        "must hold",
    ),
    (
        SPLIT | {"scale_decode": Pool(initial=1, maximum=2, capacity=0), "scale_round_ticks": 5},
        "capacity=0",
        "at least 1",
        "",
    ),
    (
        SPLIT | {"scale_decode": Pool(initial=1, maximum=2, capacity=1)},
        "scale_decode",
        "no round ever comes",
        "set scale_round_ticks",
    ),
    (
        SPLIT | {"decode_policy": "no_such:thing"},
        "'no_such:thing'",
        "cannot be imported",
        "import path",
    ),
]


@pytest.mark.parametrize("changes, value, rule, remedy", RULES, ids=[str(r[1]) for r in RULES])
def test_a_contradiction_is_refused_in_one_line(changes, value, rule, remedy):
    split(ClusterConfig(**MIXED), LOAD)
    with pytest.raises(ValueError) as caught:
        split(ClusterConfig(**(MIXED | changes)), LOAD)
    message = str(caught.value)
    assert "\n" not in message
    for part in (value, rule, remedy):
        assert part in message


def test_sweep_names_what_differs():
    one = ClusterConfig(**MIXED)
    other = dataclasses.replace(one, slots=3, nextn=1, acceptance=(0.5,), match_ticks=7)
    with pytest.raises(ValueError, match=r"differ in slots, nextn, which .* one sweep for each"):
        sweep([one, other], LOAD, lambda run: run.end)
    with pytest.raises(ValueError, match="differ in requests, "):
        sweep([one, one], [LOAD, workload([0, 1], [10, 10], [1, 1])], lambda run: run.end)


LENGTHS = [500, 501, 1_270, 1_271, 1_280]
TIERED = MIXED | {
    "block_tokens": 128,
    "kv_blocks": 10,
    "slots": 4,
    "match_ticks": 7,
    "tier_edges": (1_000,),
    "tier_quota": (FOREVER, FOREVER),
}


@pytest.fixture(scope="module")
def tiered():
    load = workload([0, 0, 5, 5, 6], LENGTHS, [10] * 5)
    service = Reusable(ClusterConfig(**TIERED), load)
    return lambda **changes: service.run(ClusterConfig(**(TIERED | changes)), load).requests


def statuses(run):
    return [Status(s).name for s in run.status]


def test_too_long_and_does_not_fit_are_counted_when_matched(tiered):
    run = tiered()
    assert statuses(run) == ["COMPLETED"] * 3 + ["DOES_NOT_FIT"] * 2  # 1280 tokens of KV blocks
    run = tiered(max_input_tokens=500)
    assert statuses(run) == ["COMPLETED"] + ["TOO_LONG"] * 4
    run = tiered(max_input_tokens=1_275)
    assert statuses(run) == ["COMPLETED"] * 3 + ["DOES_NOT_FIT", "TOO_LONG"]
    assert run.matched.tolist() == [7, 7, 12, 12, 13]
    assert np.all(run.finish[3:] == -1) and np.all(run.pulled[3:] == -1)


def test_what_cannot_progress_is_stuck_and_the_run_ends(tiered):
    """All engines belong to the lower tier, and without rounds none ever moves to the upper one."""
    run = tiered(tier_engines=(2, 0))
    assert statuses(run) == ["COMPLETED", "COMPLETED", "STUCK", "DOES_NOT_FIT", "DOES_NOT_FIT"]
    assert run.pulled[2] == run.finish[2] == -1 and run.matched[2] == 12
    # The first round sees the upper tier's demand, and one engine, drained by then, changes sides.
    run = tiered(tier_engines=(2, 0), tier_round_ticks=10_000)
    assert statuses(run)[2] == "COMPLETED" and run.pulled[2] == 10_000
    # Two prompts keep both engines busy until later.
    run = tiered(tier_engines=(2, 0), tier_round_ticks=100)
    assert statuses(run)[2] == "COMPLETED" and run.pulled[2] == min(run.first_token[:2])


def test_a_policy_that_never_takes_anybody():
    load = workload([0, 3, 4], [100, 20, 30], [5, 5, 5])
    cluster = ClusterConfig(**MIXED, prefill_policy="dualpath", policy={"token_beta": -1})
    service = Reusable(cluster, load)
    run = service.run(cluster, load).requests
    assert statuses(run) == ["STUCK"] * 3 and np.all(run.pulled == -1)
    willing = dataclasses.replace(cluster, policy={"token_beta": 10**6})
    assert statuses(service.run(willing, load).requests) == ["COMPLETED"] * 3
