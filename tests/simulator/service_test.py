"""A service in friendly units becomes the exact cluster that was meant, or one line of refusal."""

import math

import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.cost import hardware, memory
from deepinfer_jax.simulator.cluster import FOREVER, Mode
from deepinfer_jax.simulator.plain_config import merged
from deepinfer_jax.simulator.service import service
from deepinfer_jax.simulator.source import source
from deepinfer_jax.simulator.translate import translate
from deepinfer_jax.simulator.usage import spread_back

SECONDS = {
    "kind": "seconds",
    "prefill_step": 0.01,
    "prefill_token": 2e-5,
    "prefill_pair": 1e-9,
    "decode_forms": [[5e-3, 1e-4, 5e-8]],
}
MIXED = {"engines": {"mixed": 2}, "cost": SECONDS}
SPLIT = {
    "engines": {"prompt": 2, "completion": 1, "ranks": 8, "slots": 32},
    "model": "v41_flash",
    "hardware": "B200",
}


def cluster(values, **changes):
    return translate(service(merged(values, changes)), seed=3).cluster


def test_seconds_become_femtoseconds_and_ticks():
    c = cluster(
        MIXED,
        cache={"match_seconds": 2e-3},
        prefill={"step_quota_seconds": 0.3, "batch_tokens": 8192, "chunk_multiple": math.inf},
    )
    assert c.modes == (Mode.MIXED, Mode.MIXED) and c.seed == 0  # nothing is drawn
    assert c.cost.prefill_base == 10**13 and c.cost.prefill_token == 2 * 10**10
    assert c.cost.prefill_pair == 10**6
    assert c.cost.decode_forms == ((5 * 10**12, 10**11, 5 * 10**7),)
    assert c.match_ticks == 2_000_000 and c.step_quota == 3 * 10**14
    assert c.batch_tokens == 8192 and c.chunk_multiple == FOREVER
    assert c.kv_blocks is None and c.max_input_tokens == FOREVER


def test_retention_in_seconds_and_shares_of_the_capacity():
    collector = {
        "sweep_seconds": 3600.0,
        "ttl_seconds": (604_800.0, math.inf),
        "high": 0.9,
        "low": 0.8,
    }
    scope = {"scope": "shared", "capacity_blocks": 1000}
    c = cluster(MIXED, cache=scope | {"retention": collector})
    assert c.retention_sweep_ticks == 36 * 10**11
    assert c.retention_ttl_ticks == (6048 * 10**11, FOREVER)
    assert (c.retention_high_blocks, c.retention_low_blocks) == (900, 800)


def test_storage_nodes_in_seconds_and_bytes_per_second():
    storage = {"read_seconds": 2e-3, "bytes_per_second": 2e9, "asked": 12, "stripe_blocks": 8}
    c = cluster(SPLIT, cache={"scope": "shared"}, storage=storage, failures={"storage_nodes": 20})
    assert c.storage_nodes == 20 and c.storage_reads
    assert (c.storage_read_ticks, c.storage_femtoseconds_per_byte) == (2_000_000, 500_000)
    assert (c.storage_asked, c.stripe_blocks) == (12, 8)


def test_bytes_are_the_released_layouts_and_links_are_those_of_all_ranks():
    c = cluster(SPLIT, cache={"scope": "shared", "swa": True, "capacity_gib": 1.0})
    assert (c.block_bytes, c.swa_bytes, c.live_bytes) == (113_920, 1_415_040, 3_128_928)
    assert c.cache_blocks == 2**30 // 113_920
    assert c.fetch_femtoseconds_per_byte == 10**15 // (8 * 6_250_000_000)
    assert c.handoff_femtoseconds_per_byte == 10**15 // (8 * 50_000_000_000)
    assert c.swa_femtoseconds_per_byte == c.handoff_femtoseconds_per_byte


def test_weights_leave_the_kv_blocks_that_plain_arithmetic_says():
    # 40 layers x 384 experts and 3 x 128 of the drafter, three 5120 x 2304 matrices in FP4 with a
    # scale byte per 32; 196.6e9 Engram values in FP8 with one per 32; both split over 8 ranks.
    split = (40 * 384 + 3 * 128) * 3 * 5120 * 2304 * (0.5 + 1 / 32)
    split += (384_006_168 + 384_016_682) * 256 * (1 + 1 / 32)
    model = presets.v41_flash()
    one, eight = (memory.weight_bytes_per_rank(model, r) for r in (1, 8))
    assert one - eight == pytest.approx(split * 7 / 8)
    assert 10e9 < eight - split / 8 < 13e9  # the replicated rest: 8.6 G in FP8, 1.9 G in BF16
    blocks = translate(service(merged(SPLIT, {"memory": {"kv": "hbm"}}))).kv_from_hbm
    slots = (32 * 6 // 5 + 1) * 3_128_928
    left = 180e9 * 0.9 - 4 * 2**30 - eight - slots
    assert blocks == int(left // 114_048)
    with pytest.raises(ValueError, match="use more ranks"):
        memory.kv_blocks_per_rank(model, hardware.H800, 4, 32)


def test_dualpath_and_mooncake_parameters_follow_from_links_and_costs():
    shared = {"cache": {"scope": "shared"}, "cost": SECONDS, "policy": {"prefill": "dualpath"}}
    got = cluster(SPLIT, **shared).policy
    per_token = 113_920 / 128
    assert got["reading_alpha"] == pytest.approx(3 * 8 * 6.25e9 / per_token, rel=1e-6)
    step = 0.01 + 8192 * 2e-5 + 1e-9 * 8192 * 8193 / 2
    assert got["token_beta"] == pytest.approx(8 * 5 * 8192 / step, rel=1e-4)
    given = merged(shared, {"policy": {"parameters": {"token_beta": 7}}})
    assert cluster(SPLIT, **given).policy["token_beta"] == 7
    mooncake = cluster(SPLIT, cost=SECONDS, policy={"prefill": "mooncake"}).policy
    assert mooncake["transfer_ticks_per_token"] == round(per_token / (8 * 50e9) * 1e9)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"engines": {"mixd": 1}}, r"engines\.mixd is unknown: did you mean engines\.mixed"),
        ({"engin": {}}, "engin is unknown: did you mean engines"),
        ({"engines": {"ranks": 1.5}}, r"engines\.ranks=1\.5 is not of type int"),
        ({"cost": {"kind": "second"}}, r"cost\.kind='second' is unknown: did you mean 'seconds'"),
        ({"policy": {"prefill": "round_robbin"}}, "did you mean 'round_robin'"),
        ({"policy": {"parameters": {"token_bet": 1}}}, "did you mean token_beta"),
        ({"policy": {"parameters": {"token_beta": 1}}}, "reads it: leave it out"),
        ({"policy": {"decode": "random"}}, "no PROMPT engine to hand anything over"),
        ({"cache": {"swa": True}}, r"cache\.scope='none' has no cache"),
        ({"links": {"fetch_seconds": 1.0}}, r"nothing is fetched; use cache\.scope='shared'"),
        ({"links": {"handoff_seconds": 1.0}}, "no PROMPT engine"),
        (
            {"tiers": {"edges": (9,)}, "policy": {"prefill": "random"}},
            r"only policy\.prefill='pull' has tiers",
        ),
        ({"decode": {"prompt_interval": 3}}, "only NORMAL engines vote"),
        ({"decode": {"acceptance": (0.5,)}}, "drafts nothing"),
        ({"failures": {"retry_limit": 9}}, "no GPU or host fails"),
        ({"failures": {"gpu_per_hour": 1.0}}, "rates need an end"),
        ({"failures": {"gpu_per_hour": -1.0}}, "must not be negative"),
        ({"failures": {"until_seconds": 9.0}}, "no part has a rate"),
        ({"failures": {"events": ((1.0, "gpus", 0),)}}, "did you mean 'gpu'"),
        ({"failures": {"events": ((1.0, "gpu"),)}}, r"give \(seconds, kind, index\)"),
        ({"scaling": {"round_seconds": 9.0}}, "no pool is scaled"),
        ({"scaling": {"prompt": {"initial": 1}}}, r"scaling\.prompt\.maximum is missing"),
        ({"memory": {"kv_blocks": 3}}, "use 'blocks'"),
        ({"memory": {"hbm_share": 0.5}}, "use 'hbm'"),
        ({"memory": {"kv": "hbm"}}, "needs a model and a hardware"),
        ({"hardware": "B200"}, "given explicitly: leave it out"),
        ({"hardware": "B20", "memory": {"kv": "hbm"}, "model": "tiny"}, "did you mean 'B200'"),
        ({"model": "v41"}, "did you mean 'v41_flash'"),
        ({"cache": {"match_seconds": -1.0}}, "must not be negative"),
        ({"cache": {"scope": "local", "capacity_gib": 1, "capacity_blocks": 1}}, "give one"),
        ({"cache": {"scope": "local", "retention": {"high": 0.9}}}, "give both shares"),
        ({"cache": {"scope": "local", "retention": {"high": 1, "low": 1}}}, "the cache has none"),
        (
            {"cache": {"scope": "local", "retention": {"ttl_seconds": (1.0,)}}},
            "nothing ever sweeps",
        ),
        ({"cache": {"retention": {"sweep_seconds": 1.0}}}, "has no cache"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        cluster(MIXED, **changes)
    assert "\n" not in str(caught.value)


def test_synthetic_requests_share_the_prefixes_asked_for():
    values = {"kind": "synthetic", "requests": 200, "rate": 5.0, "groups": 4, "group_tokens": 256}
    trace = source(values).trace(seed=1)
    assert len(trace) == 200 and len({tuple(trace.blocks(q)) for q in range(200)}) == 4
    assert trace.input_tokens.min() > 256
    assert source(values).trace(seed=1).arrival.tolist() == trace.arrival.tolist()
    with pytest.raises(ValueError, match=r"workload\.rat is unknown: did you mean workload\.rate"):
        source(values | {"rat": 1})


def test_work_that_ended_late_is_spread_over_the_bins_before():
    booked = np.array([[5.0, 0.0], [0.0, 0.0], [0.0, 3.0], [25.0, 10.0]])
    want = [[5.0, 0.0], [5.0, 0.0], [10.0, 3.0], [10.0, 10.0]]
    got = spread_back(booked, 10.0)
    assert got.tolist() == want and got.sum() == booked.sum()
    # An engine that served for 3 of the third bin's 10 cannot have worked longer there.
    served = np.full((4, 2), 10.0)
    served[2] = 3.0
    got = spread_back(booked, served)
    assert got.tolist() == [[7.0, 0.0], [10.0, 0.0], [3.0, 3.0], [10.0, 10.0]]
