"""Hyper-connections: orientation, start, and the mixer written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model import streams
from deepinfer_jax.presets import tiny

CONFIG = tiny()
N, D = CONFIG.hc_mult, CONFIG.hidden_size


def weights(seed):
    rng = np.random.default_rng(seed)
    rows = N * (N + 2)
    return {
        "fn": rng.standard_normal((rows, N * D)) / 8,
        "base": rng.standard_normal(rows) / 2,
        "scale": 1 + rng.standard_normal(3) / 5,
    }


def written_out(p, s):
    """One token's mixer, plainly."""
    flat = s.reshape(-1)
    u = p["fn"] @ flat / np.sqrt((flat**2).mean() + CONFIG.norm_eps)
    pre = 1 / (1 + np.exp(-(u[:N] * p["scale"][0] + p["base"][:N]))) + CONFIG.hc_eps
    post = 2 / (1 + np.exp(-(u[N : 2 * N] * p["scale"][1] + p["base"][N : 2 * N])))
    comb = (u[2 * N :] * p["scale"][2] + p["base"][2 * N :]).reshape(N, N)
    comb = np.exp(comb) / np.exp(comb).sum(1, keepdims=True) + CONFIG.hc_eps
    comb /= comb.sum(0, keepdims=True) + CONFIG.hc_eps
    for _ in range(CONFIG.hc_sinkhorn_iterations - 1):
        comb /= comb.sum(1, keepdims=True) + CONFIG.hc_eps
        comb /= comb.sum(0, keepdims=True) + CONFIG.hc_eps
    return pre, post, comb


def test_the_mixer():
    p, s = weights(0), np.random.default_rng(1).standard_normal((2, 3, N, D))
    found = streams.mix(jax.tree.map(jnp.float32, p), CONFIG, jnp.float32(s))
    for at in np.ndindex(2, 3):
        for value, expected in zip(
            (found.pre[at], found.post[at], found.comb[at]), written_out(p, s[at]), strict=True
        ):
            np.testing.assert_allclose(value, expected, atol=2e-6)
    np.testing.assert_allclose(found.comb.sum(-2), 1, atol=1e-5)
    np.testing.assert_allclose(found.comb.sum(-1), 1, atol=5e-3)


def test_expand_takes_input_streams_by_the_first_index():
    rng = np.random.default_rng(2)
    s, y = rng.standard_normal((N, D)), rng.standard_normal(D)
    post, comb = rng.standard_normal(N), rng.standard_normal((N, N))
    found = streams.expand(
        jnp.float32(s),
        streams.Mix(jnp.zeros(N), jnp.float32(post), jnp.float32(comb)),
        jnp.float32(y),
    )
    np.testing.assert_allclose(found, post[:, None] * y + comb.T @ s, atol=1e-5)


def test_a_model_starts_with_copies_and_reads_the_first():
    x = jax.random.normal(jax.random.key(0), (2, 3, D))
    state, pre = streams.start(x, CONFIG)
    assert state.shape == (2, 3, N, D)
    np.testing.assert_array_equal(streams.collapse(state, pre), x)
    np.testing.assert_allclose(streams.mean(state), x, atol=1e-6)
    changed = state.at[..., 1:, :].set(7)
    np.testing.assert_array_equal(streams.collapse(changed, pre), x)
