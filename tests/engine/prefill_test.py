"""Prompt steps: the released chunk table, images, quota by a linear search, checkpoints."""

import pytest

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.engine.plan import RowOutcome
from deepinfer_jax.engine.prefill import uncut
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.policy.prefix import Image
from tests.engine.scripted import Loop

COST = StepCost(1000, 10, 1, 2, 0, 0, [[0, 0, 0]], 0, 0)


def chunks(config: EngineConfig, *requests: Request, cost: StepCost | None = None) -> list:
    """(q, k) of each row of each prompt step."""
    scheduler = Scheduler(config, 10, cost)
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler, lambda p, i: RowOutcome((5,)))
    steps = []
    while (plan := loop.call()).is_prompt:
        steps.append([(row.q, row.k) for row in plan.rows])
    return steps


def engine(**changes: object) -> EngineConfig:
    fields = {"cache": CacheConfig(nextn=0), "max_num_seqs": 4, "num_blocks": 64}
    return EngineConfig(**{**fields, **changes})


def test_the_released_chunk_table() -> None:
    config = engine(chunked_prefill=True, max_num_batched_tokens=128)
    steps = chunks(config, Request(1, [3] * 300), Request(2, [3] * 50))
    assert steps == [[(128, 128)], [(128, 256)], [(44, 300), (50, 50)]]
    whole = engine(max_num_batched_tokens=400, max_model_len=400)
    assert chunks(whole, Request(1, [3] * 300), Request(2, [3] * 300)) == [[(300, 300)]] * 2


def test_checkpoints_end_chunks() -> None:
    config = engine(chunked_prefill=True)
    steps = chunks(config, Request(1, [3] * 300, checkpoints=(128, 256)))
    assert steps == [[(128, 128)], [(128, 256)], [(44, 300)]]


@pytest.mark.parametrize("quota", [1500, 5000, 40_000])
def test_a_quota_cuts_where_a_linear_search_does(quota: int) -> None:
    config = engine(chunked_prefill=True, step_quota=quota, chunk_multiple=4)
    expected, start = [], 0
    while start < 300:
        fits = [
            q
            for q in range(300 - start + 1)
            if 1000 + 10 * q + q * start + q * (q + 1) // 2 + 2 * start <= quota
        ]
        q = max(fits, default=0)
        if q < 300 - start:
            q = q // 4 * 4 or 4  # the first of a step takes one multiple whatever the time
        start += q
        expected.append([(q, start)])
    assert chunks(config, Request(1, [3] * 300), cost=COST) == expected


def test_no_chunk_cuts_an_image() -> None:
    images = (Image(100, 150, b"a"),)
    config = engine(chunked_prefill=True, max_num_batched_tokens=128)
    assert chunks(config, Request(1, [3] * 200, images=images)) == [[(100, 100)], [(100, 200)]]
    assert uncut(images, 0, 120, 160) == 150  # extended where the budget allows
    assert uncut(images, 100, 120, 120) == 100  # else nothing
    assert uncut(images, 0, 100, 100) == 100 and uncut(images, 0, 150, 150) == 150
