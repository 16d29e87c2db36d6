"""The readable model of the service against answers worked out by hand and against public ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode, Status
from tests.simulator.oracle import generate
from tests.simulator.oracle.hand import TICK, cost, workload
from tests.simulator.oracle.service import Result, run

UNIT = 128  # ticks: 128 new tokens at one tick each


def cluster(*modes: Mode, **fields: Any) -> ClusterConfig:
    return ClusterConfig(**({"modes": modes, "cost": cost()} | fields))


def lab(hand_off: int, **fields: Any) -> Result:
    """The chapter's lab 23: four prompts of 1024, 768 of them shared; decode takes four units."""
    tails = [(1, 6, 8)] * 4
    requests = workload([0] * 4, [1024] * 4, [2] * 4, [(0, 0, 6), *tails], [1] * 4, [2, 3, 4, 5])
    service = cluster(
        Mode.PROMPT,
        Mode.PROMPT,
        Mode.COMPLETION,
        Mode.COMPLETION,
        **(
            {
                "cost": cost(decode_forms=[[4 * UNIT * TICK, 0, 0]]),
                "slots": 1,
                "batch_requests": 1,
                "match_ticks": UNIT,
                "handoff_ticks": hand_off * UNIT,
                "decode_policy": "round_robin",
            }
            | fields
        ),
    )
    return run(service, requests)


LOCAL = {"cache_scope": "local", "prefill_policy": "local_affinity", "warm_requests": (0,)}
SHARED = {"cache_scope": "shared", "warm_requests": (0,)}


@pytest.mark.parametrize(
    ("hand_off", "fields", "prefill_ends", "decode_ends"),
    [
        (1, LOCAL, [3, 5, 7, 9], [8, 10, 12, 14]),
        (1, SHARED, [3, 3, 5, 5], [8, 8, 12, 12]),
        (1, {}, [9, 9, 17, 17], [14, 14, 22, 22]),
        (3, SHARED, [3, 3, 5, 5], [10, 10, 14, 14]),
        (3, LOCAL, [3, 5, 7, 9], [10, 12, 14, 16]),
    ],
)
def test_lab_23(
    hand_off: int, fields: dict[str, Any], prefill_ends: list[int], decode_ends: list[int]
) -> None:
    result = lab(hand_off, **fields)
    assert sorted(result.first_token) == [UNIT * end for end in prefill_ends]
    assert sorted(result.finish) == [UNIT * end for end in decode_ends]


@pytest.mark.parametrize("femtoseconds_per_token", [TICK, TICK // 3])
def test_one_server_follows_lindleys_recursion(femtoseconds_per_token: int) -> None:
    draw = np.random.default_rng(5)
    arrival = np.sort(draw.integers(0, 60_000, 300)).tolist()
    length = draw.integers(1, 400, 300).tolist()
    service = cluster(
        Mode.NORMAL, cost=cost(prefill_token=femtoseconds_per_token), batch_requests=1
    )
    expected, free = [], 0  # femtoseconds
    for a, tokens in zip(arrival, length, strict=True):
        begin = a * TICK if a > free // TICK else free
        free = begin + tokens * femtoseconds_per_token
        expected.append(free // TICK)
    assert run(service, workload(arrival, length, [1] * 300)).finish == expected


def test_speculation_by_hand() -> None:
    # Every step commits 2: owed 5 takes n = 3, g = floor(256 * 5 / 3) = 426; owed 2 takes n = 1.
    # Prompts end at 10 + 20 = 30. Steps: 5 + 2 + 20 = 27; 5 + 1 + (2560 + 426) / 256 = 17.664...;
    # 5 + 1 + (2560 + 852) / 256 = 19.328...: boundaries 57, 74.664, 93.992.
    service = cluster(
        Mode.NORMAL,
        nextn=2,
        acceptance=(1.0, 0.0),
        cost=cost(prefill_base=10 * TICK, decode_forms=[[5 * TICK, TICK, TICK]]),
    )
    result = run(service, workload([0, 0], [10, 10], [6, 3]))
    assert result.first_token == [30, 30]
    assert result.finish == [93, 57]
    assert result.decode_steps == [3]
    # Two tokens a step, the last step cut at the end: ITL sees the bursts, TPOT their mean.
    assert result.tokens == [[30, 57, 57, 74, 74, 93], [30, 57, 57]]
    gaps = metrics.itl(np.concatenate(result.tokens), np.array([0, 6, 9]))
    assert np.rint(gaps * 1e9).tolist() == [27, 0, 17, 0, 19, 27, 0]


def test_preemption_by_hand() -> None:
    # 3 blocks of 4. After one decode step both need 2 blocks; request 0 leaves with 2 tokens sent,
    # waits for the end of request 1 at 16 + 5 * 10, prefills 3 + 2 tokens and runs 3 more steps.
    service = cluster(
        Mode.NORMAL, block_tokens=4, kv_blocks=3, slots=2, cost=cost(prefill_base=10 * TICK)
    )
    result = run(service, workload([0, 0], [3, 3], [6, 6]))
    assert result.first_token == [16, 16]
    assert result.finish == [111, 66]
    assert result.preemptions == [1, 0]
    assert result.prefill_start == [66, 0]


def test_preempted_on_completion_goes_the_whole_way() -> None:
    # Prompts end at 7 + 16, run from 28; after a step request 0 leaves at 38 with 2 tokens sent.
    # It is matched at 45 and prefilled until 60; 1 block is free until request 1 ends at 78, so its
    # 2 blocks arrive at 83, and 3 steps end at 113.
    service = cluster(
        Mode.PROMPT,
        Mode.COMPLETION,
        block_tokens=4,
        kv_blocks=3,
        slots=2,
        match_ticks=7,
        handoff_ticks=5,
        cost=cost(prefill_base=10 * TICK),
    )
    result = run(service, workload([0, 0], [3, 3], [6, 6]))
    assert result.first_token == [23, 23]
    assert result.matched == [45, 7]
    assert result.prefill_start == [45, 7]
    assert result.handed_off == [83, 28]
    assert result.finish == [113, 78]


@pytest.mark.parametrize(("ranks", "decode_steps"), [(1, 70), (2, 100)])
def test_a_prompt_waits_for_the_vote(ranks: int, decode_steps: int) -> None:
    # The released engine: with 3 decode steps done a new request waits for 67 more (all of one
    # rank want), or until step 100 when the other rank has nothing.
    requests = workload([0, 25 + 5], [5, 5], [200, 1])
    result = run(cluster(Mode.NORMAL, ranks=ranks), requests)
    assert result.first_token[0] == 5
    assert result.prefill_start[1] == 5 + 10 * decode_steps


def test_chunks_fill_the_token_budget() -> None:
    # The released engine: (128), (128), (44 + 50) tokens.
    service = cluster(Mode.NORMAL, batch_tokens=128)
    result = run(service, workload([0, 0], [300, 50], [1, 1]))
    assert result.first_token == [350, 350]
    assert result.prefill_start == [0, 256]
    assert result.prefill_steps == [3]


def test_mixed_steps_hold_rows_and_chunks() -> None:
    # Request 0 prefills 0..9 and decodes 9..19 alone. Request 1, of 12 tokens, gets 8 of the budget
    # of 9 beside the row: 19..37; then 4: 37..51, where request 0 ends (its third step). Request 1
    # decodes alone until 61.
    service = cluster(Mode.MIXED, batch_tokens=9, chunk_multiple=4)
    result = run(service, workload([0, 15], [9, 12], [4, 2]))
    assert result.first_token == [9, 51]
    assert result.finish == [51, 61]
    assert (result.prefill_steps, result.mixed_steps, result.decode_steps) == ([0], [3], [2])


@pytest.mark.parametrize(("link", "ends"), [("fifo", [205, 405]), ("unlimited", [205, 205])])
def test_fetches_share_a_fifo_link(link: str, ends: list[int]) -> None:
    service = cluster(
        Mode.NORMAL,
        cache_scope="shared",
        block_tokens=4,
        reserve=1,
        warm_requests=(0,),
        fetch_link=link,
        fetch_ticks=5,
        fetch_femtoseconds_per_byte=TICK,
        block_bytes=100,
    )
    requests = workload([0, 0], [9, 10], [1, 1], [(0, 0, 2)], [1, 1], [1, 1])
    result = run(service, requests)
    assert result.fetched == ends
    assert result.fetched_bytes == 400
    assert result.block_hit_tokens == result.compute_hit_tokens == [8, 8]


HITS = {128: (0, 0, 0), 261: (0, 0, 0), 262: (128, 128, 0), 390: (256, 256, 128)}
HITS |= {902: (768, 768, 640), 1024: (768, 768, 640)}


@pytest.mark.parametrize("tokens", HITS)
@pytest.mark.parametrize("ttl", [FOREVER, 10])
def test_lab_24_hit_lengths(tokens: int, ttl: int) -> None:
    block_hit, with_state, without_state = HITS[tokens]
    cap = block_hit // 128
    nodes = [(0, 0, cap), (1, cap, tokens // 128)] if cap else [(0, 0, tokens // 128)]
    requests = workload([20], [tokens], [1], nodes, [min(cap, 1)], [len(nodes)])
    service = cluster(
        Mode.PROMPT,
        Mode.COMPLETION,
        cache_scope="shared",
        swa=True,
        swa_ttl_ticks=ttl,
        warm_requests=(0,),
    )
    result = run(service, requests)
    assert result.block_hit_tokens == [block_hit]
    assert result.compute_hit_tokens == [with_state if ttl == FOREVER else without_state]


def test_the_head_of_a_tier_is_never_skipped() -> None:
    # Cap 10 on one engine: 8, then 9 waits for the credit although 1 would fit; 9 + 1 fit together.
    service = cluster(Mode.NORMAL, tier_quota=(10,))
    result = run(service, workload([0, 1, 2], [8, 9, 1], [1, 1, 1]))
    assert result.pulled == [0, 8, 8]
    assert result.finish == [8, 18, 18]


def test_rejections_and_their_ticks() -> None:
    service = cluster(Mode.NORMAL, match_ticks=3, max_input_tokens=20, block_tokens=4, kv_blocks=4)
    result = run(service, workload([0, 0, 1], [21, 13, 12], [1, 4, 4]))
    assert result.status == [Status.TOO_LONG, Status.DOES_NOT_FIT, Status.COMPLETED]
    assert result.finish[:2] == [-1, -1]


@pytest.mark.parametrize("seed", range(48))
def test_random_cases_conserve_and_repeat(seed: int) -> None:
    service, requests = generate.case(seed)
    result = run(service, requests)  # conservation is asserted inside
    again = run(*generate.case(seed))
    assert dataclasses.asdict(result) == dataclasses.asdict(again)
    for i, status in enumerate(result.status):
        if status == Status.COMPLETED:
            stages = (result.matched, result.pulled, result.fetched, result.prefill_start)
            times = [stage[i] for stage in (result.arrival, *stages, result.finish)]
            assert times == sorted(times)
            assert result.first_token[i] <= result.finish[i]
    with_steps = zip(result.busy, result.prefill_steps, result.decode_steps, strict=True)
    assert all(busy >= p + d for busy, p, d in with_steps)
