"""Experts in the form that trains: every expert computes every token, weighted (by zero, mostly).

The model's own experts skip what was not chosen, which has no gradient. Tests hold both equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import experts
from deepinfer_jax.model.numerics import linear


def every_expert(
    params: dict[str, Any], config: ModelConfig, x: jax.Array, active: int
) -> tuple[jax.Array, jax.Array]:
    """`experts.moe` for text: output [S, T, D] and visits int32 [E]; each expert sees all tokens."""
    flat = x.reshape(-1, x.shape[-1])
    count, double, width = params["gate_up"].shape
    is_image = jnp.zeros(flat.shape[0], bool)
    chosen, weight = experts.route(params, config, flat, is_image, active)
    picked = jax.nn.one_hot(chosen, count, dtype=jnp.float32)
    scale = jnp.einsum("tke,tk->te", picked, weight)
    hidden = linear(flat, params["gate_up"].reshape(-1, width)).reshape(-1, count, double)
    hidden = _gated(hidden, config) * scale[..., None]
    down = params["down"].transpose(1, 0, 2).reshape(width, -1)
    routed = linear(hidden.reshape(flat.shape[0], -1), down)
    shared = linear(_gated(linear(flat, params["shared_gate_up"]), config), params["shared_down"])
    return (routed + shared).reshape(x.shape), picked.sum((0, 1)).astype(jnp.int32)


def _gated(gate_up: jax.Array, config: ModelConfig) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    limit = config.swiglu_limit
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
