"""The hash against Python's integers, on the host and on the device, and against NeMo's rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.config import EngramConfig
from deepinfer_jax.model.engram_hash import layer_hashes
from deepinfer_jax.model.engram_rows import BLOCKED, row_ids
from tests.model import engram_nemo

RELEASED = presets.v41_flash().engram
PAD = 7


def by_integers(layer, history, position):
    """Rows of one position of one whole sequence, by the definition."""
    if history[position] < 0:
        return [BLOCKED] * sum(map(len, layer.primes))
    roll, rows, offset, blocked = history[position] * layer.multipliers[0], [], 0, False
    for back, heads in enumerate(layer.primes, start=1):
        blocked = blocked or position < back or history[position - back] < 0
        roll ^= (layer.pad if blocked else history[position - back]) * layer.multipliers[back]
        for prime in heads:
            rows.append(roll % prime + offset)
            offset += prime
    return rows


def on_host(layer, tokens, lookback):
    return row_ids(layer, np.asarray(tokens, np.int32), np.asarray(lookback, np.int32))


def on_device(layer, tokens, lookback):
    rows = jax.jit(row_ids, static_argnums=0)
    return np.asarray(rows(layer, jnp.asarray(tokens, np.int32), jnp.asarray(lookback, np.int32)))


both = pytest.mark.parametrize("compute", [on_host, on_device])
engrams = pytest.mark.parametrize("engram", [RELEASED, presets.tiny().engram])


@both
@engrams
def test_equal_to_python_integers(compute, engram):
    layer = layer_hashes(engram, PAD)[1]
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, engram.compressed_vocab_size, (3, 40))
    tokens[generator.random(tokens.shape) < 0.1] = BLOCKED
    rows = compute(layer, tokens, np.full((3, 3), BLOCKED))
    assert rows.dtype == np.int32
    wanted = [[by_integers(layer, t, p) for p in range(40)] for t in tokens.tolist()]
    np.testing.assert_array_equal(rows, wanted)


@both
def test_extreme_ids(compute):
    layer = layer_hashes(RELEASED, 0)[0]
    last = RELEASED.compressed_vocab_size - 1
    tokens = [[0, 0, last, last, last, last, 0, 1, 0xFFFF, 0x10000, 2**16 + 1]]
    rows = compute(layer, tokens, [[0, last, 0]])
    history = [0, last, 0, *tokens[0]]
    wanted = [by_integers(layer, history, 3 + p) for p in range(11)]
    np.testing.assert_array_equal(rows[0], wanted)
    assert rows.min() >= 0 and rows.max() < RELEASED.num_embeddings[0]


def test_any_cut_into_steps_reads_the_same_rows():
    layer = layer_hashes(RELEASED, PAD)[0]
    generator = np.random.default_rng(1)
    tokens = generator.integers(-5_000, RELEASED.compressed_vocab_size, 30).clip(BLOCKED)
    wanted = [by_integers(layer, tokens.tolist(), p) for p in range(30)]
    before = np.concatenate([np.full(3, BLOCKED), tokens])
    for step in (1, 2, 5, 30):
        rows = [on_host(layer, tokens[i : i + step], before[i : i + 3]) for i in range(0, 30, step)]
        np.testing.assert_array_equal(np.concatenate(rows), wanted)


@both
def test_rows_of_the_fixture(compute):
    frozen = json.loads(engram_nemo.FIXTURE.read_text())
    is_text = np.array(frozen["is_text"])
    compressed = np.array(frozen["token_map"])[frozen["tokens"]]
    tokens = np.where(is_text, compressed, BLOCKED)[None]
    engram = EngramConfig(**frozen["sizes"])
    hashes = layer_hashes(engram, pad=frozen["token_map"][engram.pad_token_id])
    for layer, wanted in zip(hashes, frozen["rows"], strict=True):
        rows = compute(layer, tokens, np.full((1, 3), BLOCKED))[0]
        np.testing.assert_array_equal(rows[is_text], wanted)
        assert (rows[~is_text] == BLOCKED).all()


@pytest.mark.oracle
def test_nemo_still_gives_the_fixture():
    pytest.importorskip("nemo_automodel")
    assert engram_nemo.fixture() == json.loads(engram_nemo.FIXTURE.read_text())
