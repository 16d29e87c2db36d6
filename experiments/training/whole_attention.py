"""Attention over whole sequences: the window in bands, all global rows under a mask.

`model.attention` gathers a token's selected rows, which is right for service and slow under a
gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention
from deepinfer_jax.model.numerics import Angles, Numerics, frequencies
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.topology import Layer, Mode
from experiments.training import whole_index


@dataclasses.dataclass(frozen=True)
class Global:
    """The latest global rows: the part of a `Memory` that `remember` uses, from position 0 on."""

    rows: jax.Array | None = None  # [S, G, C]
    keys: jax.Array | None = None  # [S, G, Di]

    def read_raw(self, layer: int, start: jax.Array) -> jax.Array:
        """[S, 1, 2, C], of which nothing is used: the first group begins with the first row."""
        assert self.rows is not None
        return jnp.zeros((start.shape[0], 1, 2, self.rows.shape[-1]), jnp.float32)

    def write_raw(
        self, layer: int, positions: jax.Array, raw: jax.Array, keep: jax.Array
    ) -> Global:
        """Nothing: no later step will complete a group."""
        return self

    def write_global(
        self, source: int, first: jax.Array, rows: jax.Array, keys: jax.Array, keep: jax.Array
    ) -> Global:
        """All groups of the sequences; that of an unfinished one is never visible."""
        return Global(rows, keys)


def layer_attention(
    weights: dict[str, Any],
    config: ModelConfig,
    layer: Layer,
    x: jax.Array,
    rows: Rows,
    memory: Global,
    selected: whole_index.Selected | None,
    numerics: Numerics,
) -> tuple[jax.Array, whole_index.Selected | None, jax.Array | None]:
    """The layer's output [S, T, D], the selection after it, and the indexer's loss if it has one."""
    params = weights["attn"]
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=layer.ratio > 0)
    angles = Angles.at(rows.positions, freqs)
    latent = attention.compressed_query(params, config, x)
    query = attention.queries(params, config, latent, angles) * config.head_dim**-0.5
    window = attention.window_rows(params, config, x, angles, numerics)
    divergence, far = None, None
    if layer.kv_source is not None:
        assert memory.rows is not None and memory.keys is not None
        scores = jnp.einsum("sqhc,skc->sqhk", query, memory.rows)
        if layer.mode in (Mode.FULL, Mode.REINDEX):
            at = (rows.positions, angles, memory.keys)
            index = whole_index.index_scores(weights["indexer"], config, x, latent, at, numerics)
            selected = whole_index.select(config, layer, index, rows.positions, selected)
            divergence = whole_index.divergence(scores, index, rows.positions, layer.ratio)
        assert selected is not None
        far = (jnp.where(selected.shown[:, :, None], scores, attention.FLOOR), memory.rows)
    mixed = _attend(query, window, config.window, far, params["sink"])
    return attention.project_out(params, config, mixed, angles), selected, divergence


def _attend(
    query: jax.Array,
    rows: jax.Array,
    width: int,
    far: tuple[jax.Array, jax.Array] | None,
    sink: jax.Array,
) -> jax.Array:
    """Attention [S, T, H, C] over the last `width` of rows [S, T, C] and what `far` scores.

    Tokens are cut into bands of `width`: a band sees itself and the band before.

    Args:
      query: scaled, [S, T, H, C].
      far: masked scores [S, T, H, G] of global rows [S, G, C].
      sink: [H].
    """
    count, length = query.shape[:2]
    bands = -(-length // width)
    padding = ((0, 0), (0, bands * width - length), (0, 0))
    own = jnp.pad(rows, padding).reshape(count, bands, width, -1)
    before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    near = jnp.concatenate([before, own], axis=2)
    banded = jnp.pad(query, (*padding, (0, 0))).reshape(count, bands, width, *query.shape[2:])
    scores = jnp.einsum("snqhc,snkc->snqhk", banded, near)
    row, key = jnp.arange(width)[:, None], jnp.arange(2 * width)
    shown = (key > row) & (key <= row + width)
    first = (jnp.arange(bands) == 0)[:, None, None] & (key < width)
    scores = jnp.where((shown & ~first)[:, :, None], scores, attention.FLOOR)
    scores = scores.reshape(count, -1, *scores.shape[3:])[:, :length]
    top = jnp.maximum(scores.max(-1), sink)
    if far is not None:
        top = jnp.maximum(top, far[0].max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    weight = jnp.exp(scores - top)
    total = weight.sum(-1, keepdims=True) + jnp.exp(sink[:, None] - top)
    weight = jnp.pad(weight, (*padding, (0, 0))).reshape(count, bands, width, *weight.shape[2:])
    mixed = jnp.einsum("snqhk,snkc->snqhc", weight, near)
    mixed = mixed.reshape(count, -1, *mixed.shape[3:])[:, :length]
    if far is not None:
        weight = jnp.exp(far[0] - top)
        total = total + weight.sum(-1, keepdims=True)
        mixed = mixed + jnp.einsum("sqhk,skc->sqhc", weight, far[1])
    return mixed / total
