"""Engram: table rows named by n-grams, added to every residual stream through a gate of its own.

Sources: the released DeepSeek-V4.1-Flash model; the technical report, arXiv 2609.19969.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import linear
from deepinfer_jax.parallel.exchange import look_up
from deepinfer_jax.parallel.mesh import ALONE, Parallel

_MIN_DOT = 1e-6  # the gate's root is taken no closer to zero


def apply(
    params: dict[str, Any],
    config: ModelConfig,
    streams: jax.Array,
    rows: jax.Array,
    is_image: jax.Array,
    parallel: Parallel = ALONE,
) -> jax.Array:
    """The streams with one Engram layer's memory added; image tokens keep theirs unchanged.

    Args:
      params: `table` [rows, head_dim], `wkv` [(n + 1) * D, rows_per_token * head_dim] (n keys, then
        the value), `q_weight` and `k_weight` [n, D].
      config: the model; its `norm_eps` is used.
      streams: residual streams [S, Q, n, D].
      rows: table rows of each token, int32 [S, Q, rows_per_token], from `engram_rows.row_ids`; what
        stands at image tokens is not used.
      is_image: bool [S, Q].
      parallel: the ranks that share the table.

    Returns:
      [S, Q, n, D] in the dtype of `streams`.
    """
    keys, value = _look_up(params, streams, rows, parallel)
    hidden = streams.astype(jnp.float32)
    gate = _gate(params, config, hidden, keys)
    gate = jnp.where(is_image[..., None], 0, gate)
    return (hidden + gate[..., None] * value).astype(streams.dtype)


def _look_up(
    params: dict[str, Any], streams: jax.Array, rows: jax.Array, parallel: Parallel
) -> tuple[jax.Array, jax.Array]:
    """Keys [S, Q, n, D] and value [S, Q, 1, D], float32 but rounded to the streams' dtype."""
    *batch, n, width = streams.shape
    if parallel.engram:
        memory = look_up(params["table"], rows, parallel.engram)
    else:
        memory = jnp.take(params["table"], rows, axis=0, mode="clip")
    memory = memory.reshape(*batch, -1)
    projected = linear(memory.astype(streams.dtype), params["wkv"]).astype(jnp.float32)
    projected = projected.reshape(*batch, n + 1, width)
    return projected[..., :n, :], projected[..., n:, :]


def _gate(
    params: dict[str, Any], config: ModelConfig, hidden: jax.Array, keys: jax.Array
) -> jax.Array:
    """Share of the value that each stream takes, float32 [S, Q, n] in (0, 1).

    The sigmoid of the signed root of a dot product of the normalised stream and key.
    """
    weight = params["q_weight"].astype(jnp.float32) * params["k_weight"].astype(jnp.float32)
    scale = _inverse_rms(hidden, config.norm_eps) * _inverse_rms(keys, config.norm_eps)
    dot = jnp.sum(hidden * weight * keys, axis=-1) * scale * config.hidden_size**-0.5
    return jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), _MIN_DOT)), dot))


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + eps)
