"""Model and cache configurations: derived topology, and every rule broken once."""

import dataclasses

import pytest

from deepinfer_jax.config import CacheConfig, EngramConfig, ModelConfig
from deepinfer_jax.presets import small, tiny, v41_flash
from deepinfer_jax.rules import check_cache


def test_v41_roles_follow_the_released_table() -> None:
    model = v41_flash()
    full, reindex = (2, 8, 14, 20), (24, 28, 32, 36)
    for layer in range(40):
        kv, index = model.kv_sources[layer], model.index_sources[layer]
        if layer < 2:
            assert (kv, index) == (None, None)
        else:
            assert kv == max(s for s in full if s <= layer)
            assert index == max(s for s in full + reindex if s <= layer)
    assert model.boundary_layer == 20
    assert model.candidate_user_layer_ids == reindex
    assert model.compression_layer_ids == (2, 8, 14)
    assert (model.num_rings, model.num_draft_layers) == (43, 3)


def _primes(start: int, count: int) -> list[int]:
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate += 1
    return found


@pytest.mark.parametrize("preset", [v41_flash, small, tiny])
def test_engram_tables_are_sums_of_unused_primes(preset) -> None:
    engram = preset().engram
    per_layer = engram.rows_per_token
    primes = _primes(engram.vocab_size, per_layer * len(engram.layer_ids))
    sums = tuple(sum(primes[i : i + per_layer]) for i in range(0, len(primes), per_layer))
    assert engram.num_embeddings == sums


@pytest.mark.parametrize("preset", [v41_flash, small, tiny])
def test_presets_keep_every_mechanism(preset) -> None:
    model = preset()
    assert set(model.compress_ratios) == {0, 1, 2}
    assert model.candidate_user_layer_ids and model.compression_layer_ids
    assert model.engram and model.draft
    reuse = [i for i, s in enumerate(model.index_sources) if s not in (None, i)]
    assert any(i < model.boundary_layer for i in reuse)
    assert any(i > model.boundary_layer for i in reuse)
    window = model.window
    check_cache(model, CacheConfig(truncation="compact", keep=window + 6))


BROKEN = {
    "compress_ratios has 3 entries": {"compress_ratios": (0, 2, 1)},
    r"holds \[4\]": {"compress_ratios": (0, 0, 2, 4, 1, 1, 1, 1, 0, 0)},
    "no 1": {"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 0, 0)},
    "draft stages are": {"compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 1)},
    "kv_source_layer_ids is": {"kv_source_layer_ids": (4, 2)},
    "index_source_layer_ids is": {"index_source_layer_ids": (2, 4, 8)},
    "contain every KV source": {"index_source_layer_ids": (4, 6)},
    "must own its global rows": {"kv_source_layer_ids": (2, 6)},
    "ratio 0 and cannot be a source": {"index_source_layer_ids": (1, 2, 4, 6)},
    "layer 2 has ratio 2": {
        "kv_source_layer_ids": (3, 4),
        "index_source_layer_ids": (3, 4, 6),
    },
    "layer 5 has ratio 2": {"compress_ratios": (0, 0, 2, 2, 1, 2, 1, 1, 0, 0)},
    "candidate_source_layer_id 5": {"candidate_source_layer_id": 5},
    "pool holds 4 rows": {"candidate_topk_blocks": 1},
    "candidates are rows of one source": {"candidate_source_layer_id": 2},
    "rope_head_dim is 7": {"rope_head_dim": 7},
    "multiples of 32": {"head_dim": 48},
    "o_groups 3": {"o_groups": 3},
    "9 of 8": {"num_active_experts": 9},
    "hidden_size is 0": {"hidden_size": 0},
    "draft target_layer_ids": {"draft": dataclasses.replace(tiny().draft, target_layer_ids=(7, 8))},
    "noise_token_id 64": {"draft": dataclasses.replace(tiny().draft, noise_token_id=64)},
    "engram layer_ids": {"engram": dataclasses.replace(tiny().engram, layer_ids=(3, 1))},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_model_rule_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny(), **BROKEN[message])


def test_a_model_without_optional_parts_is_valid() -> None:
    model: ModelConfig = dataclasses.replace(
        tiny(),
        engram=None,
        draft=None,
        compress_ratios=tiny().compress_ratios[:8],
        candidate_source_layer_id=None,
    )
    assert model.num_rings == 8 and model.candidate_user_layer_ids == ()


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("block_tokens is 0", {"block_tokens": 0}),
        ("nextn is -1", {"nextn": -1}),
        ("truncation is 'on'", {"truncation": "on"}),
        ("keep is 0", {"truncation": "mask"}),
    ],
)
def test_a_broken_cache_rule_is_named(message: str, change: dict) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**change)


def test_keep_covers_window_and_backtracking() -> None:
    model = v41_flash()
    check_cache(model, CacheConfig(truncation="compact", keep=134))
    with pytest.raises(ValueError, match="keep is 133"):
        check_cache(model, CacheConfig(truncation="compact", keep=133))
    with pytest.raises(ValueError, match="= 140 rows"):
        check_cache(model, CacheConfig(truncation="mask", keep=139, backtracking=12))


@pytest.mark.parametrize("block_tokens, message", [(129, "129"), (12, "candidate block of 8")])
def test_a_block_holds_whole_rows_and_candidate_blocks(block_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cache(v41_flash(), CacheConfig(block_tokens=block_tokens))


def test_compact_truncation_splits_no_side_input() -> None:
    cache = CacheConfig(truncation="compact", keep=14)
    late = dataclasses.replace(tiny().engram, layer_ids=(1, 5))
    with pytest.raises(ValueError, match="below layer 4"):
        check_cache(dataclasses.replace(tiny(), engram=late), cache)
    straddling = dataclasses.replace(tiny().draft, target_layer_ids=(3, 7))
    with pytest.raises(ValueError, match="straddle"):
        check_cache(dataclasses.replace(tiny(), draft=straddling), cache)
    mask = CacheConfig(truncation="mask", keep=14)
    check_cache(dataclasses.replace(tiny(), draft=straddling, engram=late), mask)


def test_engram_parts_are_checked() -> None:
    engram = tiny().engram
    assert isinstance(engram, EngramConfig)
    with pytest.raises(ValueError, match="n-grams start at 2"):
        dataclasses.replace(engram, max_ngram=1)
    with pytest.raises(ValueError, match="one per layer"):
        dataclasses.replace(engram, num_embeddings=(462,))
