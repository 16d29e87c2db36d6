"""The mixer of the residual streams with tokens along the last axis, where a vector unit finds them.

The same numbers as `model.streams.mix`; under a gradient this order of axes is many times faster.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import streams


def mix(params: dict[str, Any], config: ModelConfig, state: jax.Array) -> streams.Mix:
    """`streams.mix` of state [S, T, n, D], its Sinkhorn steps over [n, n, S, T]."""
    n = config.hc_mult
    flat = state.reshape(*state.shape[:2], -1)
    scale = jax.lax.rsqrt(jnp.mean(flat**2, axis=-1) + config.norm_eps)
    raw = jnp.einsum("sti,oi->ost", flat, params["fn"]) * scale
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
