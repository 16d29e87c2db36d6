"""Selecting global rows of whole sequences, and the loss from which selecting is learnt.

Selecting is not differentiable, so the indexer learns from a loss of its own: the divergence of its
scores from the attention's weights on the visible global rows, averaged over heads, as in the
DeepSeek-V3.2 report's sparse attention. The target is that of the selecting layer itself, although
later layers use the selection too. Index queries see detached inputs; through the keys a little of
this loss reaches the latents.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, indexer
from deepinfer_jax.model.numerics import Angles, Numerics, linear, rotate
from deepinfer_jax.model.topology import Layer


@dataclasses.dataclass(frozen=True)
class Selected:
    """Of one index segment: rows attended to and rows that later layers may select."""

    shown: jax.Array  # bool [S, T, G]
    pool: jax.Array | None  # bool [S, T, G]


def index_scores(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    latent: jax.Array,
    at: tuple[jax.Array, Angles, jax.Array],
    numerics: Numerics,
) -> jax.Array:
    """float32 [S, T, G]; gradients reach the indexer's weights and the keys."""
    x, latent = jax.lax.stop_gradient((x, latent))
    positions, angles, keys = at
    heads, width = config.index_num_heads, config.index_head_dim
    query = linear(latent, params["wq_b"]).reshape(*positions.shape, heads, width)
    query = numerics.index_row(rotate(query, angles.heads()))
    weight = linear(x, params["weights"]).astype(jnp.float32) * (width**-0.5 * heads**-0.5)
    dots = jax.nn.relu(jnp.einsum("sqhd,sgd->sqhg", query, keys))
    return (dots * weight[..., None]).sum(2)


def _visible(positions: jax.Array, ratio: int, groups: int) -> jax.Array:
    """bool [S, T, G]: groups that are complete at positions [S, T]."""
    return jnp.arange(groups) < ((positions + 1) // ratio)[..., None]


def select(
    config: ModelConfig,
    layer: Layer,
    scores: jax.Array,
    positions: jax.Array,
    previous: Selected | None,
) -> Selected:
    """The top-k of the visible rows, or of the candidates among them."""
    scores = jax.lax.stop_gradient(scores)
    groups = scores.shape[-1]
    shown = _visible(positions, layer.ratio, groups)
    if groups <= config.index_topk:
        return Selected(shown, None)
    pool = previous.pool if previous and layer.uses_candidates else None
    if pool is not None:
        shown &= pool
    if layer.offers_candidates:
        pool = indexer.candidate_rows(config, scores, (positions + 1) // layer.ratio)
    best, index = jax.lax.top_k(jnp.where(shown, scores, indexer.HIDDEN), config.index_topk)
    chosen = jnp.put_along_axis(
        jnp.zeros(scores.shape, bool), index, best > indexer.HIDDEN, axis=-1, inplace=False
    )
    return Selected(chosen, pool)


def divergence(
    attended: jax.Array, scores: jax.Array, positions: jax.Array, ratio: int
) -> jax.Array:
    """Mean over rows of KL(attention's weights over visible rows | softmax of index scores).

    Args:
      attended: the attention's scores [S, T, H, G]; no gradient passes.
      scores: the indexer's [S, T, G].
    """
    shown = _visible(positions, ratio, scores.shape[-1])
    attended = jnp.where(shown[:, :, None], jax.lax.stop_gradient(attended), attention.FLOOR)
    target = jnp.where(shown, jax.nn.softmax(attended, axis=-1).mean(2), 0)
    guess = jax.nn.log_softmax(jnp.where(shown, scores, attention.FLOOR), axis=-1)
    terms = jnp.where(target > 0, target * (jnp.log(jnp.where(target > 0, target, 1)) - guess), 0)
    return terms.sum(-1).mean()
