"""Arrays of a plan by hand: what rows say, what padding says, and the shapes there are."""

import numpy as np
import pytest

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.pack import Buckets, bucket, pack_decode, pack_prompt
from deepinfer_jax.engine.plan import PlanRow
from deepinfer_jax.engine.sampling_params import SamplingParams
from tests.engine.small_engine import BUCKETS, config, micro


def test_default_buckets_reach_what_the_engine_may_need() -> None:
    found = Buckets.of(EngineConfig())
    assert found.sequences == (4, 16, 64, 256) and found.prompt == (64, 256, 1024, 4096)
    assert found.blocks == (33,)  # 4,112 positions
    assert Buckets.of(EngineConfig(max_num_seqs=3)).sequences == (3,)
    assert (bucket((4, 16), 4), bucket((4, 16), 5)) == (4, 16)
    with pytest.raises(ValueError, match="17 exceeds"):
        bucket((4, 16), 17)


def test_buckets_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascending"):
        Buckets((4, 2), (8,), (1,))


def test_decode_rows_and_their_padding() -> None:
    fresh = PlanRow(7, 4, 24, (50, 51), (47, 48, 49), (3, 9), 2, draft_slot=1, read_slot=1)
    flying = PlanRow(8, 4, 40, (), (), (4, 5, 6), 1, remap=1, draft_slot=2, read_slot=2)
    batch = pack_decode([fresh, flying], BUCKETS, reach=3, width=4)
    none = BUCKETS.rows
    np.testing.assert_array_equal(batch.remap, [none, 1, none, none])
    np.testing.assert_array_equal(batch.tokens, [50, 0, 0, 0])
    np.testing.assert_array_equal(batch.read_slots, [1, 2, 0, 0])
    np.testing.assert_array_equal(batch.rows.start, [20, 36, 0, 0])
    np.testing.assert_array_equal(batch.rows.count, [4, 4, 0, 0])
    np.testing.assert_array_equal(batch.rows.slots, [2, 1, 0, 0])
    np.testing.assert_array_equal(batch.rows.lookback[:2], [[47, 48, 49], [-1, -1, -1]])
    np.testing.assert_array_equal(batch.rows.tables[1], [4, 5, 6, 0, 0, 0, 0, 0])
    assert not batch.rows.tables[2:].any()


def test_a_prompt_near_its_beginning_has_less_to_look_back_at() -> None:
    row = PlanRow(7, 3, 4, (11, 12, 13), (10,), (3,), 2, last_chunk=False, total=30)
    batch = pack_prompt([row], 2, micro(), config(), BUCKETS, reach=3)
    assert batch.tokens.shape == (2, 32) and batch.at == 2
    np.testing.assert_array_equal(batch.tokens[0, :4], [11, 12, 13, 0])
    np.testing.assert_array_equal(batch.rows.lookback[0], [-1, -1, 10])
    np.testing.assert_array_equal(batch.last, [False, False])
    np.testing.assert_array_equal(batch.kept_start, [0, 0])


def test_truncation_keeps_the_last_tokens_of_the_whole_prompt() -> None:
    cache = CacheConfig(block_tokens=16, nextn=3, truncation="mask", keep=14)
    rows = [
        PlanRow(i, 3, 3, (1, 2, 3), (), (3,), 2, total=total) for i, total in enumerate((30, 9))
    ]
    engine = EngineConfig(cache=cache)
    batch = pack_prompt(rows, 0, micro(), engine, BUCKETS, reach=3)
    np.testing.assert_array_equal(batch.kept_start, [16, 0])


def test_forced_tokens_are_counted_from_the_answers_start() -> None:
    answer = Answer(SamplingParams(max_tokens=9, forced_tokens=(4, 5, 6)), seed=0)
    assert answer.forced(0, 4) == [4, 5, 6, -1]
    assert answer.forced(2, 4) == [6, -1, -1, -1] and answer.forced(9, 2) == [-1, -1]
