"""`model.streams` in the form that trains: sums over streams as small products.

The same numbers. Products have gradients that are products; sums written out have gradients that
a CPU adds one by one. The mixer's Sinkhorn steps have tokens along the last axis, where a vector
unit finds them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import streams
from deepinfer_jax.model.numerics import linear


def mix(params: dict[str, Any], config: ModelConfig, state: jax.Array) -> streams.Mix:
    """`streams.mix` of state [S, T, n, D], its Sinkhorn steps over [n, n, S, T]."""
    n = config.hc_mult
    flat = state.reshape(*state.shape[:2], -1)
    square = jnp.einsum("sti,sti->st", flat, flat) / flat.shape[-1]
    raw = jnp.moveaxis(linear(flat, params["fn"]), -1, 0) * jax.lax.rsqrt(square + config.norm_eps)
    gain = jnp.repeat(params["scale"], jnp.array([n, n, n * n]), total_repeat_length=n * (n + 2))
    raw = raw * gain[:, None, None] + params["base"][:, None, None]
    pre, post, comb = jnp.split(raw, [n, 2 * n])
    comb = _sinkhorn(comb.reshape(n, n, *raw.shape[1:]), config)
    return streams.Mix(
        pre=jnp.moveaxis(jax.nn.sigmoid(pre) + config.hc_eps, 0, -1),
        post=jnp.moveaxis(2 * jax.nn.sigmoid(post), 0, -1),
        comb=jnp.moveaxis(comb, (0, 1), (-2, -1)),
    )


def _sinkhorn(comb: jax.Array, config: ModelConfig) -> jax.Array:
    """Nearly doubly stochastic [n in, n out, S, T]."""
    eps = config.hc_eps
    comb = jnp.exp(comb - jax.lax.stop_gradient(comb.max(1, keepdims=True)))
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)

    def both(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        return comb / (comb.sum(0, keepdims=True) + eps), None

    return jax.lax.scan(both, comb, None, length=config.hc_sinkhorn_iterations - 1)[0]


def collapse(state: jax.Array, weights: jax.Array) -> jax.Array:
    """`streams.collapse`: [S, T, D] of streams [S, T, n, D] and weights [S, T, n]."""
    return jnp.einsum("stn,stnd->std", weights, state)


def expand(state: jax.Array, mixed: streams.Mix, output: jax.Array) -> jax.Array:
    """`streams.expand`: streams [S, T, n, D] after a sublayer whose output is [S, T, D]."""
    weights = jnp.concatenate([mixed.comb, mixed.post[..., None, :]], axis=-2)
    return jnp.einsum(
        "stij,stid->stjd", weights, jnp.concatenate([state, output[:, :, None]], axis=2)
    )
