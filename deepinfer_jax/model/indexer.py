"""Which global rows a token attends to: the top-k of a cheap score, or a part of it, or all.

score_j = sum over index heads of weight_h relu(query_h . key_j), over the visible groups. One layer
also keeps, per token, the blocks of rows with the best maxima; later index layers select among
those. Ties go to the lowest row. While everything fits into the top-k nothing is scored at all.
Source: released DeepSeek-V4.1 `inference/model.py`; the lightning indexer, DeepSeek-V3.2 report.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.blocks import map_rows
from deepinfer_jax.model.numerics import Angles, Numerics, linear, rotate
from deepinfer_jax.model.topology import Layer

HIDDEN = -jnp.inf  # the score of a row that is not visible; never enters a softmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What the layers of one index segment attend to; G groups fit in the memory."""

    index: jax.Array  # int32 [S, Q, K] group ids, in no particular order
    valid: jax.Array  # bool [S, Q, K]
    candidates: jax.Array | None  # bool [S, Q, G] rows that later layers may select; None: all


def select(
    params: dict[str, Any],
    config: ModelConfig,
    layer: Layer,
    x: jax.Array,
    compressed_query: jax.Array,
    positions: jax.Array,
    angles: Angles,
    memory: Memory,
    previous: Selection | None,
    numerics: Numerics,
) -> Selection:
    """The selection of an index layer.

    Args:
      params: the layer's `indexer` weights: wq_b [Hi * Di, q_lora], weights [Hi, D].
      x: normed attention input [S, Q, D].
      compressed_query: the normed query latent [S, Q, q_lora].
      positions: int32 [S, Q].
      previous: the selection before this layer; its candidates limit a layer that uses them.
    """
    assert layer.kv_source is not None
    keys = memory.read_keys(layer.kv_source)
    visible = (positions + 1) // layer.ratio
    if keys.shape[1] <= config.index_topk:
        every = jnp.broadcast_to(
            jnp.arange(keys.shape[1], dtype=jnp.int32), (*x.shape[:2], keys.shape[1])
        )
        return Selection(every, every < visible[..., None], None)
    query, weight = _query(params, config, x, compressed_query, angles, numerics)
    candidates = previous.candidates if previous and layer.uses_candidates else None
    choose = functools.partial(_choose, config, layer.offers_candidates)
    made = map_rows(choose, (query, weight, visible, candidates), keys)
    return dataclasses.replace(made, candidates=candidates) if layer.uses_candidates else made


def _query(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    compressed_query: jax.Array,
    angles: Angles,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:
    """Index queries [S, Q, Hi, Di] and float32 head weights [S, Q, Hi]."""
    heads, width = config.index_num_heads, config.index_head_dim
    query = linear(compressed_query, params["wq_b"]).reshape(*x.shape[:2], heads, width)
    query = numerics.index_row(rotate(query, angles.heads()))
    weight = linear(x, params["weights"]).astype(jnp.float32)
    return query, weight * (width**-0.5 * heads**-0.5)


def _choose(
    config: ModelConfig,
    offers: bool,
    rows: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    keys: jax.Array,
) -> Selection:
    """Select for a block of rows: query [S, Q, Hi, Di], weight, visible [S, Q], candidates."""
    query, weight, visible, candidates = rows
    scores = score(query, weight, keys)
    shown = jnp.arange(keys.shape[1]) < visible[..., None]
    pool = candidate_rows(config, scores, visible) if offers else None
    if candidates is not None:
        shown &= candidates
    best, index = jax.lax.top_k(jnp.where(shown, scores, HIDDEN), config.index_topk)
    return Selection(index, best > HIDDEN, pool)


def score(query: jax.Array, weight: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 [S, Q, G]: sum_h weight [S, Q, Hi] relu(query [S, Q, Hi, Di] . keys [S, G, Di])."""
    dots = jnp.einsum("sqhd,sgd->sqhg", query, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("sqhg,sqh->sqg", jax.nn.relu(dots), weight)


def candidate_rows(config: ModelConfig, scores: jax.Array, visible: jax.Array) -> jax.Array | None:
    """bool [S, Q, G]: rows of the best `candidate_topk_blocks` blocks; None when all would be.

    A block's score is the greatest of its visible rows; the block of the newest row is always in.
    """
    size, groups = config.candidate_block_size, scores.shape[-1]
    count = -(-groups // size)
    if count <= config.candidate_topk_blocks:
        return None
    shown = jnp.where(jnp.arange(groups) < visible[..., None], scores, HIDDEN)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, count * size - groups)]
    blocks = jnp.pad(shown, padding, constant_values=HIDDEN).reshape(
        *scores.shape[:-1], count, size
    )
    newest = (visible[..., None] - 1) // size
    best = jnp.where(jnp.arange(count) == newest, jnp.inf, blocks.max(-1))
    value, index = jax.lax.top_k(best, config.candidate_topk_blocks)
    chosen = jnp.put_along_axis(
        jnp.zeros(best.shape, bool), index, value > HIDDEN, axis=-1, inplace=False
    )
    return jnp.repeat(chosen, size, axis=-1)[..., :groups]
