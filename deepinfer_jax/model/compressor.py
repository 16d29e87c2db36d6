"""The global memory's rows: r tokens pooled into one latent, from which row and index key are made.

Group j covers tokens [j r, j r + r) and is turned at position j r. With r = 1 the latent is the
projection itself; with r = 2 each channel is a softmax-weighted mean over the group's tokens, whose
first half may lie in an earlier step: raw (gate score, latent) rows are remembered for that.
Source: released DeepSeek-V4.1 `inference/model.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import Angles, Numerics, frequencies, linear, rms_norm, rotate
from deepinfer_jax.model.shares import Shares
from deepinfer_jax.model.topology import Layer

M = TypeVar("M", bound=Memory)


def remember(
    params: dict[str, Any],
    config: ModelConfig,
    layer: Layer,
    x: jax.Array,
    shares: Shares,
    memory: M,
    numerics: Numerics,
) -> M:
    """Store the global rows and index keys of every group that these rows complete.

    Args:
      params: a FULL layer's weights (`compressor` and `indexer`).
      x: the layer's normed attention input [S, Q, D], of this rank's rows.

    Groups of tokens before `rows.global_start` are already stored and stay untouched.
    """
    rows = shares.whole
    latent, first, memory = _latents(params["compressor"], layer, x, shares, memory)
    latent = rms_norm(latent.astype(x.dtype), params["compressor"]["norm"], config.norm_eps)
    group = first[:, None] + jnp.arange(latent.shape[1])
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=True)
    angles = Angles.at(group * layer.ratio, freqs)
    row = numerics.main_row(rotate(latent, angles), config)
    key = linear(latent, params["indexer"]["wk"])
    key = rms_norm(key, params["indexer"]["k_norm"], config.norm_eps)
    key = numerics.index_row(rotate(key, angles))
    complete = (group + 1) * layer.ratio <= (rows.start + rows.count)[:, None]
    new = group >= rows.global_start[:, None] // layer.ratio
    return memory.write_global(layer.id, first, row, key, complete & new)


def _latents(
    params: dict[str, Any], layer: Layer, x: jax.Array, shares: Shares, memory: M
) -> tuple[jax.Array, jax.Array, M]:
    """Latents float32 [S, J, C] of the groups from `first` [S] on, before their norm."""
    rows = shares.whole
    latent = linear(x, params["wkv"], jnp.dtype(jnp.float32))
    if layer.ratio == 1:
        return shares.join(latent), rows.start, memory
    raw = jnp.stack([linear(x, params["wgate"], jnp.dtype(jnp.float32)), latent], axis=2)
    raw = shares.join(raw)
    history = memory.read_raw(layer.id, rows.start)
    memory = memory.write_raw(layer.id, rows.positions, raw, rows.valid)
    groups, first = _groups(jnp.concatenate([history, raw], axis=1), layer.ratio, rows.start)
    weight = jax.nn.softmax(groups[..., 0, :], axis=2)
    return (weight * groups[..., 1, :]).sum(2), first, memory


def _groups(raw: jax.Array, ratio: int, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """raw [S, r - 1 + Q, 2, C] from position start - r + 1 on, cut into groups [S, J, r, 2, C].

    Worked example, r = 2: start 5 begins with group 2 (positions 4, 5), raw rows 0 and 1; start 6
    begins with group 3 (positions 6, 7), raw rows 1 and 2.
    """
    first = start // ratio
    count = (raw.shape[1]) // ratio
    offset = first * ratio - start + ratio - 1
    index = offset[:, None, None] + jnp.arange(count)[:, None] * ratio + jnp.arange(ratio)
    index = jnp.minimum(index, raw.shape[1] - 1)  # of groups that are not complete
    return jax.vmap(lambda row, at: row[at])(raw, index), first
