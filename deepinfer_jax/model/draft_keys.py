"""What the backbone leaves for the drafter: sliding-window rows of every draft stage.

The stream means at the target layers' inputs are projected once; each stage makes its own row of
that, at the token's position, as its own attention would. The drafter itself reads only these.
Source: released DeepSeek-V4.1 `inference/model.py`; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.attention import window_rows
from deepinfer_jax.model.numerics import Angles, Numerics, frequencies, linear, rms_norm
from deepinfer_jax.model.shares import Shares

M = TypeVar("M", bound=Memory)


def remember(
    params: dict[str, Any],
    config: ModelConfig,
    features: list[jax.Array],
    shares: Shares,
    memory: M,
    numerics: Numerics,
) -> M:
    """Store each stage's rows from `kept_start` on; features [S, Q, D] per target, this rank's."""
    projected = linear(jnp.concatenate(features, axis=-1), params["main_proj"])
    main = rms_norm(projected, params["main_norm"], config.norm_eps)
    freqs = frequencies(config.rope, config.rope_head_dim, compressed=False)
    angles, whole = Angles.at(shares.own.positions, freqs), shares.whole
    keep = whole.valid & (whole.positions >= whole.kept_start[:, None])
    for stage, weights in enumerate(params["layers"]):
        row = shares.join(window_rows(weights["attn"], config, main, angles, numerics))
        memory = memory.write_window(config.num_layers + stage, whole.positions, row, keep)
    return memory
