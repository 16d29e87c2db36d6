"""DSpark: a block of draft tokens in one parallel pass, and how likely each is to be accepted.

The block is the sampled token and noise tokens, at the positions that follow. Every block row sees
the whole block and the window of rows the backbone left (`draft_keys`). A rank-r Markov head then
adds, token by token, what the previous draft says about the next; the confidence head reads the
hidden state BEFORE the norm. Nothing is written: the next verify step overwrites these positions.
Source: released DeepSeek-V4.1 `inference/model.py`; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, streams
from deepinfer_jax.model.backbone import embed, feed_forward
from deepinfer_jax.model.numerics import RELEASED, Angles, Numerics, frequencies, linear, rms_norm
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.parallel.mesh import ALONE, Parallel

Choose = Callable[[jax.Array, int], jax.Array]
"""(logits float32 [S, V], index of the draft) -> token int32 [S]: how a draft is picked."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """A block of N drafts per sequence."""

    tokens: jax.Array  # int32 [S, N]
    logits: jax.Array  # float32 [S, N, V] that each was picked from
    confidence: jax.Array  # float32 [S, N] chance of acceptance, given that all before it were


def greedy(logits: jax.Array, index: int) -> jax.Array:
    """The most likely token, the lowest of equals."""
    del index
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def propose(
    params: dict[str, Any],
    config: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    memory: Memory,
    count: int,
    *,
    choose: Choose = greedy,
    numerics: Numerics = RELEASED,
    parallel: Parallel = ALONE,
    kernels: str = "xla",
) -> Drafts:
    """Draft `count` tokens after `token`.

    Args:
      params: the whole tree (the drafter shares embedding and head).
      token: the last sampled token, int32 [S], not yet seen by the backbone.
      position: its position, int32 [S]; the rings hold what lies before it.
      count: block length N.
      choose: how to pick a draft; `greedy` by default.
      parallel, kernels: as for `backbone.forward`; attention stays with XLA.
    """
    hidden = block_hidden(
        params, config, token, position, memory, count, numerics, parallel, kernels
    )
    normed = rms_norm(hidden, params["draft"]["norm"], config.norm_eps)
    base = linear(normed, params["head"], jnp.dtype(jnp.float32))
    return _markov(params["draft"], hidden, base, token, choose)


def block_hidden(
    params: dict[str, Any],
    config: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    memory: Memory,
    count: int,
    numerics: Numerics,
    parallel: Parallel = ALONE,
    kernels: str = "xla",
) -> jax.Array:
    """Collapsed streams [S, N, D] of the block, before the last norm."""
    rows = _block_rows(config, token, position, count)
    state, pre = streams.start(embed(params, rows), config)
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=False)
    angles = Angles.at(rows.positions, freqs)
    assert config.draft is not None
    for stage, weights in enumerate(params["draft"]["layers"]):
        x = rms_norm(streams.collapse(state, pre), weights["attn_norm"], config.norm_eps)
        mixed = streams.mix(weights["attn_mix"], config, state)
        history = memory.read_window(config.num_layers + stage, position)
        y = _attention(weights["attn"], config, x, history, rows, angles, numerics)
        state, pre = streams.expand(state, mixed, y), mixed.pre
        active = config.draft.num_active_experts
        state, pre, _ = feed_forward(weights, config, state, pre, rows, active, parallel, kernels)
    return streams.collapse(state, pre)


def _block_rows(config: ModelConfig, token: jax.Array, position: jax.Array, count: int) -> Rows:
    """The sampled token and noise, as rows."""
    assert config.draft is not None
    noise = jnp.full((token.shape[0], count - 1), config.draft.noise_token_id, jnp.int32)
    tokens = jnp.concatenate([token[:, None].astype(jnp.int32), noise], axis=1)
    none = jnp.zeros_like(position)
    return Rows(
        tokens=tokens,
        start=position,
        count=jnp.full_like(position, count),
        engram=(),
        is_image=jnp.zeros(tokens.shape, bool),
        embeddings=None,
        window_start=none,
        global_start=none,
        kept_start=none,
    )


def _attention(
    params: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    history: jax.Array,
    rows: Rows,
    angles: Angles,
    numerics: Numerics,
) -> jax.Array:
    """Every block row over the W rows before the block and all block rows: [S, N, D]."""
    latent = attention.compressed_query(params, config, x)
    query = attention.queries(params, config, latent, angles)
    keys = attention.window_rows(params, config, x, angles, numerics)
    before = rows.start[:, None] - config.window + jnp.arange(config.window)
    shown = jnp.concatenate([before >= 0, jnp.ones(x.shape[:2], bool)], axis=1)
    shown = jnp.broadcast_to(shown[:, None], (*x.shape[:2], shown.shape[1]))
    keys = jnp.concatenate([history.astype(keys.dtype), keys], axis=1)
    mixed = attention.over_rows(query, keys, shown, params["sink"])
    return attention.project_out(params, config, mixed, angles)


def _markov(
    params: dict[str, Any], hidden: jax.Array, base: jax.Array, token: jax.Array, choose: Choose
) -> Drafts:
    """Pick the block's tokens one after the other."""
    tokens, logits, confidence = [], [], []
    for i in range(hidden.shape[1]):
        previous = params["markov_embed"][token]
        logits.append(base[:, i] + linear(previous, params["markov_head"], base.dtype))
        seen = jnp.concatenate([hidden[:, i], previous], axis=-1).astype(jnp.float32)
        confidence.append(jax.nn.sigmoid(seen @ params["confidence"].astype(jnp.float32)))
        token = choose(logits[-1], i)
        tokens.append(token)
    return Drafts(*(jnp.stack(x, axis=1) for x in (tokens, logits, confidence)))
