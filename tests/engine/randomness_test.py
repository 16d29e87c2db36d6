"""The counter-based generator against threefry written out, and its independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from deepinfer_jax.engine.randomness import Use, seed_words, uniforms

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
drawn = jax.jit(uniforms)


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32, 20 rounds (Salmon et al., SC 2011), on Python integers."""
    word = 0xFFFFFFFF
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counter[0] + keys[0]) & word, (counter[1] + keys[1]) & word
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            a = (a + b) & word
            b = ((b << turn | b >> (32 - turn)) & word) ^ a
        a = (a + keys[(block + 1) % 3]) & word
        b = (b + keys[(block + 2) % 3] + block + 1) & word
    return a, b


def test_threefry_known_answers() -> None:
    """Random123's `kat_vectors`."""
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    ones = (0xFFFFFFFF, 0xFFFFFFFF)
    assert threefry(ones, ones) == (0x1CB996FC, 0xBB002BE7)


def test_equals_threefry_of_seed_position_and_use() -> None:
    seeds = [0, 1, (1 << 64) - 1, 0x0123456789ABCDEF]
    positions = np.array([[0, 1], [5, 1_048_575], [7, 7], [2, 3]], np.int32)
    found = drawn(seed_words(seeds), positions, jnp.uint32(Use.ACCEPT))
    for i, seed in enumerate(seeds):
        for j in range(2):
            key = threefry((seed >> 32, seed & 0xFFFFFFFF), (0, int(positions[i, j])))
            bits = threefry(key, (0, 2))[0]
            assert float(found[i, j]) == (bits >> 8) / 2**24


def test_depends_on_seed_position_and_use_only() -> None:
    random = np.random.default_rng(0)
    seeds = [int(s) for s in random.integers(0, 2**63, 6)]
    positions = random.integers(0, 1 << 20, (6, 2)).astype(np.int32)
    whole = np.asarray(uniforms(seed_words(seeds), positions, Use.FRESH))
    order = [4, 2, 5]
    some = uniforms(seed_words([seeds[i] for i in order]), positions[order], Use.FRESH)
    np.testing.assert_array_equal(some, whole[order])
    uses = np.array([[u] for u in Use], np.uint32)
    same = np.full((4, 1), 9, np.int32)
    assert len(np.unique(uniforms(seed_words([3] * 4), same, uses))) == 4


@pytest.mark.slow
def test_is_uniform_over_positions_and_seeds() -> None:
    count = 20_000
    steady = np.zeros((count, 2), np.uint32)
    moving = np.arange(count, dtype=np.int32)[:, None]
    by_position = np.asarray(drawn(steady, moving, jnp.uint32(0)))[:, 0]
    by_seed = np.asarray(drawn(seed_words(range(count)), moving * 0, jnp.uint32(0)))[:, 0]
    for sample in (by_position, by_seed):
        assert stats.kstest(sample, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(by_position[1:], by_position[:-1])[0, 1]) < 0.03
