"""Mixture of experts: a square-root softplus router and gated experts, one of them shared by all.

score_e = sqrt(softplus(router_e . x)); the bias only helps to choose; the weights of the chosen are
their scores, normed to `routed_scaling`. An expert: down(w silu(min(gate, c)) clip(up, -c, c)).
`grouped` costs what the chosen experts cost: tokens are sorted by expert, cut into blocks of one
expert each, and a block multiplies that expert's weights only.
Source: released DeepSeek-V4.1 `inference/model.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import linear

MAX_BLOCK = 64  # rows an expert multiplies at a time


def moe(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    valid: jax.Array,
    is_image: jax.Array,
    active: int,
) -> tuple[jax.Array, jax.Array]:
    """The layer's output [S, Q, D] and how many rows each expert got, int32 [E].

    Args:
      x: normed input [S, Q, D].
      valid: bool [S, Q]; other rows visit no routed expert.
      is_image: bool [S, Q]; they are routed under `bias_image`.
      active: experts per token.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen, weight = route(params, config, flat, is_image.reshape(-1), active)
    count = params["router"].shape[0]
    chosen = jnp.where(valid.reshape(-1, 1), chosen, count)
    routed = grouped(params, config, flat, chosen, weight)
    hidden = _activate(linear(flat, params["shared_gate_up"]), config, None)
    shared = linear(hidden, params["shared_down"], jnp.dtype(jnp.float32))
    visits = jnp.zeros(count, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    return (routed + shared).astype(x.dtype).reshape(x.shape), visits


def route(
    params: dict[str, Any], config: ModelConfig, x: jax.Array, is_image: jax.Array, active: int
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts int32 [T, k] and their float32 weights [T, k]; ties to the lowest id."""
    scores = jnp.sqrt(jax.nn.softplus(linear(x, params["router"], jnp.dtype(jnp.float32))))
    bias = jnp.where(is_image[:, None], params["bias_image"], params["bias"])
    _, chosen = jax.lax.top_k(scores + bias, active)
    weight = jnp.take_along_axis(scores, chosen, axis=-1)
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    return chosen, weight * config.routed_scaling


def grouped(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
) -> jax.Array:
    """float32 [T, D]: each token's experts, weighted and summed; an expert id of E is nobody.

    Args:
      x: [T, D].
      chosen: int32 [T, k].
      weight: float32 [T, k].
    """
    tokens, active = chosen.shape
    experts = params["gate_up"].shape[0]
    size = _block_size(tokens * active, experts)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    ends = jnp.cumsum(sizes)
    last_block = jnp.cumsum(-(-sizes // size))

    def block(_: None, i: jax.Array) -> tuple[None, jax.Array]:
        expert = jnp.searchsorted(last_block, i, side="right")
        own = jnp.minimum(expert, experts - 1)
        before = last_block[own] - -(-sizes[own] // size)
        at = ends[own] - sizes[own] + (i - before) * size + jnp.arange(size)
        live = at < ends[own]
        pair = order[jnp.minimum(at, tokens * active - 1)]

        def compute() -> jax.Array:
            rows = x[pair // active]
            scale = jnp.where(live, weight.reshape(-1)[pair], 0)
            hidden = _activate(linear(rows, params["gate_up"][own]), config, scale)
            return linear(hidden, params["down"][own], jnp.dtype(jnp.float32))

        nothing = jnp.zeros((size, x.shape[1]), jnp.float32)
        return None, jax.lax.cond(expert < experts, compute, lambda: nothing)

    blocks = -(-tokens * active // size) + (experts if size > 1 else 0)
    made = jax.lax.scan(block, None, jnp.arange(blocks))[1].reshape(-1, x.shape[1])
    return _gather(made, chosen, order, ends - sizes, (last_block - -(-sizes // size)) * size)


def _block_size(pairs: int, experts: int) -> int:
    """The power of two nearest below an expert's fair share, at most MAX_BLOCK."""
    fair = max(1, pairs // experts)
    return min(MAX_BLOCK, 1 << (fair.bit_length() - 1))


def _gather(
    made: jax.Array, chosen: jax.Array, order: jax.Array, begins: jax.Array, rows: jax.Array
) -> jax.Array:
    """Sum each token's rows of `made`, where expert e's rows start at rows[e]."""
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(chosen.shape)
    own = jnp.minimum(chosen, begins.size - 1)
    found = made[jnp.minimum(rows[own] + rank - begins[own], made.shape[0] - 1)]
    return jnp.where((chosen < begins.size)[..., None], found, 0).sum(1)


def _activate(gate_up: jax.Array, config: ModelConfig, scale: jax.Array | None) -> jax.Array:
    """scale silu(min(gate, c)) clip(up, -c, c) in float32, back in the dtype of gate_up."""
    limit = config.swiglu_limit
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return (hidden if scale is None else hidden * scale[:, None]).astype(gate_up.dtype)
