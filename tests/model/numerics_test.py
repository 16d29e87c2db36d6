"""Norm, rotary angles and their inverse, against float64 written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import RopeConfig
from deepinfer_jax.model.numerics import (
    EXACT,
    RELEASED,
    Angles,
    frequencies,
    linear,
    rms_norm,
    rotate,
)
from deepinfer_jax.presets import tiny


def test_norm_against_float64():
    x = np.random.default_rng(0).standard_normal((3, 64))
    w = np.random.default_rng(1).standard_normal(64)
    expected = w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-20)
    found = rms_norm(jnp.float32(x), jnp.float32(w), 1e-20)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    halves = rms_norm(jnp.bfloat16(x), jnp.bfloat16(w), 1e-20)
    assert halves.dtype == jnp.bfloat16  # rounded once: half a unit of eight bits
    exact = np.asarray(jnp.bfloat16(w), np.float64) * np.asarray(jnp.bfloat16(x), np.float64)
    exact /= np.sqrt((np.asarray(jnp.bfloat16(x), np.float64) ** 2).mean(-1, keepdims=True))
    np.testing.assert_allclose(np.float64(halves), exact, rtol=2**-8)


def test_linear_sums_in_float32():
    x, w = jnp.full((1, 4096), 1, jnp.bfloat16), jnp.full((1, 4096), 1, jnp.bfloat16)
    assert linear(x, w, jnp.dtype(jnp.float32))[0, 0] == 4096  # bfloat16 sums stall at 256


def test_plain_frequencies():
    found = frequencies(RopeConfig(), 64, compressed=False)
    assert found[0] == 1 and found[16] == pytest.approx(0.01) and len(found) == 32
    assert found[31] == pytest.approx(10_000 ** (-62 / 64))


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    rope = RopeConfig()
    found = frequencies(rope, 64, compressed=True)
    plain = rope.compress_theta ** (-np.arange(0, 64, 2) / 64)
    turns = rope.original_max_positions * plain / (2 * np.pi)  # within the original context
    fast, slow = turns > 32 * 1.5, turns < 1 / 1.5
    assert fast.sum() > 10 and slow.sum() > 3
    np.testing.assert_allclose(found[fast], plain[fast], rtol=1e-6)
    np.testing.assert_allclose(found[slow], plain[slow] / 16, rtol=1e-6)
    between = found[~fast & ~slow] / plain[~fast & ~slow]
    assert (np.diff(between) <= 1e-7).all() and (between >= 1 / 16 - 1e-7).all()


def test_rotation_is_a_complex_product_of_adjacent_pairs():
    rng = np.random.default_rng(2)
    x, positions = rng.standard_normal((5, 32)).astype(np.float32), np.array([0, 1, 7, 100, 4095])
    freqs = frequencies(RopeConfig(), 8, compressed=False)
    found = np.asarray(rotate(x, Angles.at(jnp.asarray(positions), freqs)))
    assert np.array_equal(found[:, :24], x[:, :24])
    turned = x[:, 24::2] + 1j * x[:, 25::2]
    turned = turned * np.exp(1j * positions[:, None] * freqs.astype(np.float64))
    np.testing.assert_allclose(found[:, 24::2], turned.real, atol=2e-5)
    np.testing.assert_allclose(found[:, 25::2], turned.imag, atol=2e-5)


def test_the_inverse_undoes_and_products_see_distance_only():
    rng = np.random.default_rng(3)
    q, k = (jnp.float32(rng.standard_normal(32)) for _ in range(2))
    freqs = frequencies(RopeConfig(), 8, compressed=True)

    def at(p):
        return Angles.at(jnp.asarray(p), freqs)

    np.testing.assert_allclose(rotate(rotate(q, at(77)), at(77).inverse), q, atol=1e-6)
    products = [rotate(q, at(p + 13)) @ rotate(k, at(p)) for p in (0, 5, 300)]
    np.testing.assert_allclose(products, products[0], rtol=1e-4)


def test_heads_share_angles():
    freqs = frequencies(RopeConfig(), 8, compressed=False)
    angles = Angles.at(jnp.arange(3), freqs)
    x = jax.random.normal(jax.random.key(0), (3, 4, 32))
    found = rotate(x, angles.heads())
    for h in range(4):
        np.testing.assert_array_equal(found[:, h], rotate(x[:, h], angles))


def test_switches():
    x = jax.random.normal(jax.random.key(0), (2, 32))
    assert EXACT.window_row(x) is x and EXACT.main_row(x, tiny()) is x and EXACT.index_row(x) is x
    fp4 = RELEASED.main_row(x, tiny())
    fp8 = RELEASED.main_row(x, dataclasses.replace(tiny(), use_fp4_sparse_kv=False))
    assert np.array_equal(fp8, RELEASED.window_row(x)) and not np.array_equal(fp4, fp8)
    assert len(np.unique(np.abs(RELEASED.index_row(x[:1])))) <= 8  # e2m1 has eight magnitudes
