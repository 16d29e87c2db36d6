"""The hash's constants: the released table lengths, NeMo's numbers, trial division."""

import json

import pytest

from deepinfer_jax import presets
from deepinfer_jax.config import EngramConfig
from deepinfer_jax.model.engram_hash import layer_hashes, multipliers, primes_from
from tests.model.engram_nemo import FIXTURE


def sizes(**changes):
    """A valid configuration of two layers, two orders and one head."""
    return EngramConfig(
        **{
            "layer_ids": (0, 1),
            "num_embeddings": (5 + 7, 11 + 13),
            "max_ngram": 3,
            "num_heads": 1,
            "head_dim": 1,
            "vocab_size": 4,
            "pad_token_id": 0,
            "compressed_vocab_size": 4,
        }
        | changes
    )


def test_released_table_lengths():
    hashes = layer_hashes(presets.v41_flash().engram, pad=2)
    rows = [sum(map(sum, layer.primes)) for layer in hashes]
    assert rows == [384_006_168, 384_016_682]  # the released config.json
    primes = [p for layer in hashes for heads in layer.primes for p in heads]
    assert len(set(primes)) == 48 and min(primes) >= 16_000_000


@pytest.mark.parametrize("preset", [presets.small, presets.tiny])
def test_tables_of_the_presets_hold_exactly_their_primes(preset):
    engram = preset().engram
    rows = tuple(sum(map(sum, layer.primes)) for layer in layer_hashes(engram, pad=2))
    assert rows == engram.num_embeddings


@pytest.mark.parametrize(("start", "count"), [(0, 30), (2, 1), (3, 1), (90, 5), (4096, 40)])
def test_primes_by_trial_division(start, count):
    found = primes_from(start, count)
    wanted = (n for n in range(max(start, 2), 10**6) if all(n % d for d in range(2, n)))
    assert found == tuple(next(wanted) for _ in range(count))


def test_primes_across_a_wide_gap():
    """No prime lies between 2010733 and 2010881 (a maximal gap, of 148)."""
    assert primes_from(2_010_733, 2) == (2_010_733, 2_010_881)


def test_constants_equal_nemos():
    frozen = json.loads(FIXTURE.read_text())
    hashes = layer_hashes(EngramConfig(**frozen["sizes"]), pad=1)
    for i, layer in enumerate(hashes):
        assert list(layer.multipliers) == frozen["multipliers"][i]
        assert [p for heads in layer.primes for p in heads] == frozen["primes"][i]
        assert [o for heads in layer.offsets for o in heads] == frozen["offsets"][i]


def test_products_stay_below_two_to_the_63():
    for vocabulary in (2, 60, 4000, 99_092):
        factors = multipliers(14, 4, vocabulary)
        assert all(m % 2 == 1 for m in factors)
        assert max(factors) * (vocabulary - 1) < 2**63


def test_a_short_table_is_refused():
    assert len(layer_hashes(sizes(), pad=0)) == 2
    with pytest.raises(ValueError, match="layer 1 has 23 table rows and its primes need 24"):
        layer_hashes(sizes(num_embeddings=(12, 23)), pad=0)


def test_large_primes_are_refused():
    below = 2**25 - 39 - 600  # 2**25 - 39 is the largest prime below 2**25
    assert layer_hashes(sizes(vocab_size=below, num_embeddings=(2**27,) * 2), pad=0)
    with pytest.raises(ValueError, match=f"exact below {2**25}"):
        layer_hashes(sizes(vocab_size=2**25 - 38, num_embeddings=(2**27,) * 2), pad=0)
