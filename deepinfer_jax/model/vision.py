"""The image encoder: a transformer over patches, and the projector that merges them into tokens.

Pre-norm blocks with full attention inside each image, rotary angles from a patch's row and column,
and a gated feed-forward part. Sources: the released DeepSeek-V4.1-Flash model and DeepInfer 0.1.0.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import VisionConfig
from deepinfer_jax.model.numerics import rms_norm

_EPS = 1e-6
_THETA = 10_000.0
_QUERIES = 512  # query patches scored at a time: bounds the score matrix of a large image


def encode(
    params: dict[str, Any], config: VisionConfig, patches: jax.Array, grids: jax.Array, cells: int
) -> jax.Array:
    """Features of the cells of several images.

    Args:
      params: the tree of `vision_parameters.vision_shapes`.
      config: sizes of the encoder.
      patches: uint8 [B, P, 3, p, p]; the patches of image b, row by row, come first in its row.
      grids: rows and columns of patches of each image, int32 [B, 2].
      cells: M, at least the number of cells of every image.

    Returns:
      [B, M, D] in the dtype of the parameters. What stands behind an image's cells is finite and
      means nothing.
    """
    x = _linear(params["patch_embed"], _scaled(patches, params["norm"].dtype))
    rows, columns, valid = _places(grids, patches.shape[1])
    angles = _angles(rows, columns, config.hidden_size // config.num_heads)
    for block in params["blocks"]:
        x = x + _attention(block["attn"], config, rms_norm(x, block["norm1"], _EPS), angles, valid)
        x = x + _feed_forward(block["mlp"], rms_norm(x, block["norm2"], _EPS))
    merged = _merge(rms_norm(x, params["norm"], _EPS), grids, cells, config.downsample_ratio)
    hidden = jax.nn.gelu(_linear(params["aligner"]["w1"], merged), approximate=False)
    return _linear(params["aligner"]["w2"], hidden)


def _scaled(patches: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Bytes as numbers in [-1, 1], one flat row per patch."""
    flat = patches.reshape(*patches.shape[:2], -1).astype(jnp.float32)
    return ((flat / 255 - 0.5) / 0.5).astype(dtype)


def _linear(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x @ weight.T + bias, summed in float32."""
    product = _matmul(x, weights["weight"]) + weights["bias"].astype(jnp.float32)
    return product.astype(x.dtype)


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("bpi,oi->bpo", x, weight, preferred_element_type=jnp.float32)


def _places(grids: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, column and existence of each patch, all [B, P]."""
    height, width = grids[:, :1], grids[:, 1:]
    index = jnp.arange(count)
    across = jnp.maximum(width, 1)
    return index // across, index % across, index < height * width


def _angles(rows: jax.Array, columns: jax.Array, head_dim: int) -> jax.Array:
    """Rotary angles, float32 [B, P, 1, head_dim / 2]: a quarter from the row, one from the column."""
    half = head_dim // 2
    frequencies = _THETA ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    places = jnp.stack([rows, columns], axis=-1).astype(jnp.float32)
    angles = places[..., None] * frequencies
    return angles.reshape(*rows.shape, 1, half)


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Channel j turned against channel j + head_dim / 2. x: [B, P, H, head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _attention(
    params: dict[str, Any], config: VisionConfig, x: jax.Array, angles: jax.Array, valid: jax.Array
) -> jax.Array:
    """Every patch attends to all patches of its image. x: [B, P, width]."""
    heads = _linear(params["wqkv"], x).reshape(*x.shape[:2], 3, config.num_heads, -1)
    queries, keys, values = (heads[:, :, i] for i in range(3))
    queries, keys = _rotate(queries, angles), _rotate(keys, angles)
    attend = functools.partial(_attend, keys, values, valid)
    by_patch = jnp.moveaxis(queries, 1, 0)
    mixed = jax.lax.map(attend, by_patch, batch_size=min(_QUERIES, len(by_patch)))
    return _linear(params["wo"], jnp.moveaxis(mixed, 0, 1).reshape(x.shape))


def _attend(keys: jax.Array, values: jax.Array, valid: jax.Array, query: jax.Array) -> jax.Array:
    """One patch of each image against all: [B, H, head_dim]."""
    scores = jnp.einsum("bhd,bkhd->bhk", query, keys, preferred_element_type=jnp.float32)
    scores = scores * query.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bhk,bkhd->bhd", weights, values, preferred_element_type=jnp.float32)
    return mixed.astype(values.dtype)


def _feed_forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    gate, up = jnp.split(_matmul(x, params["w1"]), 2, axis=-1)
    return _matmul((jax.nn.silu(gate) * up).astype(x.dtype), params["w2"]).astype(x.dtype)


def _merge(x: jax.Array, grids: jax.Array, cells: int, ratio: int) -> jax.Array:
    """Patches of each cell side by side, [B, M, width * ratio**2]: channel, then row, then column.

    Zeros stand for the patches that a cell at the right or bottom edge lacks.
    """
    height, width = (grids[:, i, None, None, None] for i in range(2))
    across = jnp.maximum(-(-width // ratio), 1)
    cell = jnp.arange(cells)[:, None, None]
    row = cell // across * ratio + jnp.arange(ratio)[:, None]
    column = cell % across * ratio + jnp.arange(ratio)
    inside = (row < height) & (column < width)
    source = jnp.where(inside, row * width + column, x.shape[1]).reshape(len(x), -1, 1)
    parts = jnp.take_along_axis(x, source, axis=1, mode="fill", fill_value=0)
    parts = parts.reshape(len(x), cells, ratio**2, -1)
    return jnp.swapaxes(parts, 2, 3).reshape(len(x), cells, -1)
