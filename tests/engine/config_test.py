"""The engine's configuration: the released arithmetic, and every rule broken once."""

import dataclasses

import pytest

from deepinfer_jax import layout
from deepinfer_jax.config import CacheConfig, EngineConfig, Role
from deepinfer_jax.presets import v41_flash
from deepinfer_jax.rules import check_cache


def test_released_sizes() -> None:
    engine = EngineConfig()
    assert engine.runtime_max_len == 4112
    assert dataclasses.replace(engine, overlap=False).runtime_max_len == 4106
    assert engine.num_slots == layout.state_slots(256) == 308
    assert engine.step_rows == 6 and engine.batched_tokens == 4096
    assert dataclasses.replace(engine, max_num_seqs=1000).batched_tokens == 6000
    plain = CacheConfig(nextn=0)
    assert EngineConfig(cache=plain).runtime_max_len == 4097


def test_roles_are_words_too() -> None:
    assert EngineConfig(role="normal").role == Role.NORMAL
    assert [r.value for r in Role] == ["normal", "prompt", "completion"]


def test_the_pool_bound_is_met_exactly() -> None:
    # 0.8 * 128 * 40 = 4096 = 4080 + 16 positions.
    EngineConfig(max_model_len=4080, num_blocks=40)
    with pytest.raises(ValueError, match="4097 positions"):
        EngineConfig(max_model_len=4081, num_blocks=40)


BROKEN = {
    "max_model_len is 0": {"max_model_len": 0},
    "prefill_interval is -1": {"prefill_interval": -1},
    "step_quota is -5; it may not": {"step_quota": -5},
    "role is 'decode'": {"role": "decode"},
    "256 requests with 6 rows each need 1536": {"max_num_batched_tokens": 1535},
    "without chunked_prefill a prompt is one step": {"max_num_batched_tokens": 4095},
    "max_prefill_context is 4095": {"max_prefill_context": 4095},
    "below the smallest chunk of 5000": {"min_chunk": 5000},
    "cannot compute a preempted request again": {"role": Role.COMPLETION},
    "nothing can overlap": {"role": Role.PROMPT},
    "which runs no prompts; leave it 0": {
        "role": Role.COMPLETION,
        "stop_preempted": True,
        "step_quota": 1,
    },
    "more than 0.8 of the pool's 4096 tokens": {"num_blocks": 32},
    "slots_percent is 99": {"slots_percent": 99},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_engine_rule_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**BROKEN[message])


def test_chunks_allow_a_budget_below_a_prompt() -> None:
    engine = EngineConfig(max_num_batched_tokens=1536, chunked_prefill=True)
    assert engine.batched_tokens == 1536


def test_reserve_covers_ring_and_keep() -> None:
    model = v41_flash()
    assert layout.prefix_reserve(model, CacheConfig()) == 134
    kept = CacheConfig(truncation="compact", keep=140)
    assert layout.prefix_reserve(model, kept) == 140
    assert layout.prefix_reserve(model, CacheConfig(backtracking=12)) == 140
    check_cache(model, dataclasses.replace(kept, reserve=140))
    gap = dataclasses.replace(kept, reserve=134)
    with pytest.raises(ValueError, match=r"reserve is 134.*= 140 or more"):
        check_cache(model, gap)
    unsafe = dataclasses.replace(gap, unsafe_reserve=True)
    assert layout.prefix_reserve(model, unsafe) == 134
    with pytest.raises(ValueError, match="reserve is 133"):
        check_cache(model, CacheConfig(reserve=133))
