"""The drafter's blocks in the form that trains: `model.draft` with every expert on every row.

The model's own experts skip what was not chosen, which has no gradient. Tests hold both equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import attention, streams
from deepinfer_jax.model.numerics import RELEASED, Angles, Numerics, frequencies, rms_norm
from experiments.training import whole_experts, whole_streams


def hidden(
    params: dict[str, Any],
    config: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    histories: tuple[jax.Array, ...],
    count: int,
    numerics: Numerics = RELEASED,
) -> jax.Array:
    """Collapsed streams [S, count, D] of blocks, before the last norm, as `draft.block_hidden`.

    Args:
      params: the whole tree.
      token: int32 [S], the first of each block; noise follows.
      position: its position, int32 [S].
      histories: per draft stage [S, W, C], the rows before `position`.
    """
    assert config.draft is not None
    noise = jnp.full((token.shape[0], count - 1), config.draft.noise_token_id, jnp.int32)
    tokens = jnp.concatenate([token[:, None], noise], axis=1)
    state, pre = streams.start(params["embed"][tokens], config)
    positions = position[:, None] + jnp.arange(count)
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=False)
    angles = Angles.at(positions, freqs)
    before = position[:, None] - config.window + jnp.arange(config.window)
    shown = jnp.concatenate([before >= 0, jnp.ones(tokens.shape, bool)], axis=1)
    shown = jnp.broadcast_to(shown[:, None], (*tokens.shape, shown.shape[1]))
    for weights, history in zip(params["draft"]["layers"], histories, strict=True):
        own = weights["attn"]
        x = rms_norm(whole_streams.collapse(state, pre), weights["attn_norm"], config.norm_eps)
        mixed = whole_streams.mix(weights["attn_mix"], config, state)
        latent = attention.compressed_query(own, config, x)
        rows = attention.window_rows(own, config, x, angles, numerics)
        keys = jnp.concatenate([history, rows], axis=1)
        query = attention.queries(own, config, latent, angles)
        seen = attention.over_rows(query, keys, shown, own["sink"])
        y = attention.project_out(own, config, seen, angles)
        state, pre = whole_streams.expand(state, mixed, y), mixed.pre
        mixed = whole_streams.mix(weights["ffn_mix"], config, state)
        x = rms_norm(whole_streams.collapse(state, pre), weights["ffn_norm"], config.norm_eps)
        y, _ = whole_experts.every_expert(
            weights["moe"], config, x, config.draft.num_active_experts
        )
        state, pre = whole_streams.expand(state, mixed, y), mixed.pre
    return whole_streams.collapse(state, pre)
