"""One attention layer: a sliding window and selected global rows under one softmax with a sink.

Keys are values: one vector per token (or group) for all heads. Rotary angles that entered through
the keys are undone on the output, head by head. The output projection is grouped and of low rank.
Source: released DeepSeek-V4.1 `inference/model.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.memory import Memory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.blocks import map_rows
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.model.numerics import Angles, Numerics, linear, rms_norm, rotate
from pallas_kernels.softmax import Attended, merge
from pallas_kernels.window_attention.api import window_attention

FLOOR = jnp.finfo(jnp.float32).min  # a masked score; finite, so that no row is all NaN
M = TypeVar("M", bound=Memory)


def compressed_query(params: dict[str, Any], config: ModelConfig, x: jax.Array) -> jax.Array:
    """The normed query latent [..., q_lora] of x [..., D]."""
    return rms_norm(linear(x, params["wq_a"]), params["q_norm"], config.norm_eps)


def queries(
    params: dict[str, Any], config: ModelConfig, latent: jax.Array, angles: Angles
) -> jax.Array:
    """Turned queries [..., H, C] from the latent [..., q_lora]."""
    flat = linear(latent, params["wq_b"])
    return rotate(
        flat.reshape(*latent.shape[:-1], config.num_heads, config.head_dim), angles.heads()
    )


def window_rows(
    params: dict[str, Any], config: ModelConfig, x: jax.Array, angles: Angles, numerics: Numerics
) -> jax.Array:
    """Sliding-window rows [..., C] of x [..., D], as every reader sees them."""
    row = rms_norm(linear(x, params["wkv"]), params["kv_norm"], config.norm_eps)
    return numerics.window_row(rotate(row, angles))


def project_out(
    params: dict[str, Any], config: ModelConfig, mixed: jax.Array, angles: Angles
) -> jax.Array:
    """The layer's output [..., D] from attended values [..., H, C]."""
    straight = rotate(mixed, angles.inverse.heads())
    grouped = straight.reshape(*mixed.shape[:-2], config.o_groups, -1)
    latent = jnp.einsum(  # groups in front: XLA:CPU does that transpose better than its own
        "g...i,gri->g...r",
        jnp.moveaxis(grouped, -2, 0),
        params["wo_a"],
        preferred_element_type=jnp.float32,
    )
    latent = jnp.moveaxis(latent.astype(mixed.dtype), 0, -2)
    return linear(latent.reshape(*mixed.shape[:-2], -1), params["wo_b"])


def attend(
    query: jax.Array,
    window: jax.Array,
    seen_from: jax.Array,
    positions: jax.Array,
    sink: jax.Array,
    memory: Memory,
    source: int | None,
    selection: Selection | None,
    kernels: str = "xla",
) -> jax.Array:
    """Attention of Q consecutive rows per sequence.

    Args:
      query: [S, Q, H, C].
      window: [S, W + Q, C], the rows at positions start - W .. start + Q - 1.
      seen_from: int32 [S, Q], the first window position each row may see; past its own: none.
      positions: int32 [S, Q] = start + 0 .. Q - 1.
      sink: float32 [H].
      source, selection: the KV source and what is attended of it; None for a window-only layer.
      kernels: who computes it, one of `pallas_kernels.choice.KERNELS`.

    Returns:
      [S, Q, H, C] in query's dtype; zero where nothing is visible and the sink takes all.
    """
    count = query.shape[1]
    width = window.shape[1] - count
    row = jnp.broadcast_to(jnp.arange(count), positions.shape)
    if kernels != "xla":
        first = seen_from - (positions - row) + width
        near = window_attention(
            query, window, first, row + width, sink, window=width, kernels=kernels
        )
        if selection is None or source is None:
            return near.mixed
        return merge(near, _far(query, memory, source, selection))
    index = None if selection is None else (selection.index, selection.valid)

    def block(rows: tuple[Any, ...], window: jax.Array) -> jax.Array:
        query, seen_from, positions, row, index = rows
        size = min(query.shape[1] + width, window.shape[1])
        begin = jnp.minimum(row[0, 0], window.shape[1] - size)
        keys = jax.lax.dynamic_slice_in_dim(window, begin, size, axis=1)
        at = (positions - row)[:, :1] - width + begin + jnp.arange(size)  # position of each key
        shown = (at[:, None] >= seen_from[..., None]) & (at[:, None] <= positions[..., None])
        parts = [_window_part(query, keys, shown)]
        if index is not None and source is not None:
            parts.append(_global_part(query, memory.read_global(source, index[0]), index[1]))
        return _merge(parts, sink, query.dtype)

    return map_rows(block, (query, seen_from, positions, row, index), window)


def _far(query: jax.Array, memory: Memory, source: int, selection: Selection) -> Attended:
    """Attention to the selected global rows alone."""

    def block(rows: tuple[Any, ...]) -> Attended:
        query, index, valid = rows
        scores, values, product = _global_part(query, memory.read_global(source, index), valid)
        top = scores.max(-1)
        weight = jnp.where(scores > FLOOR, jnp.exp(scores - top[..., None]), 0)
        total = weight.sum(-1)
        mixed = jnp.einsum(
            product, weight.astype(query.dtype), values, preferred_element_type=jnp.float32
        )
        mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
        return Attended(mixed, top, total)

    return map_rows(block, (query, selection.index, selection.valid))


def over_rows(query: jax.Array, keys: jax.Array, shown: jax.Array, sink: jax.Array) -> jax.Array:
    """[S, Q, H, C]: query [S, Q, H, C] over the keys [S, N, C] that are shown, bool [S, Q, N]."""
    return _merge([_window_part(query, keys, shown)], sink, query.dtype)


def _window_part(
    query: jax.Array, keys: jax.Array, shown: jax.Array
) -> tuple[jax.Array, jax.Array, str]:
    scores = jnp.einsum("sqhc,skc->sqhk", query, keys, preferred_element_type=jnp.float32)
    seen = shown.any(1)[..., None]  # rows that nobody sees may hold anything: 0 * NaN is NaN
    return _masked(scores, shown, query), jnp.where(seen, keys, 0), "sqhk,skc->sqhc"


def _global_part(
    query: jax.Array, rows: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, str]:
    scores = jnp.einsum("sqhc,sqkc->sqhk", query, rows, preferred_element_type=jnp.float32)
    return _masked(scores, valid, query), jnp.where(valid[..., None], rows, 0), "sqhk,sqkc->sqhc"


def _masked(scores: jax.Array, shown: jax.Array, query: jax.Array) -> jax.Array:
    return jnp.where(shown[:, :, None], scores * query.shape[-1] ** -0.5, FLOOR)


def _merge(
    parts: list[tuple[jax.Array, jax.Array, str]], sink: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """One softmax over all parts' scores and the sink, applied to their values."""
    tops = [scores.max(-1, keepdims=True) for scores, _, _ in parts]
    top = jnp.maximum(jnp.max(jnp.stack(tops), axis=0), sink[:, None])
    total, mixed = jnp.exp(sink[:, None] - top), jnp.float32(0)
    for scores, values, product in parts:
        weight = jnp.where(scores > FLOOR, jnp.exp(scores - top), 0)
        total = total + weight.sum(-1, keepdims=True)
        mixed = mixed + jnp.einsum(
            product, weight.astype(dtype), values, preferred_element_type=jnp.float32
        )
    return (mixed / total).astype(dtype)
