"""What window attention is. S sequences, Q query rows, N window rows, H heads, C channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.softmax import FLOOR, Attended


def window_attention(
    query: jax.Array,
    rows: jax.Array,
    first: jax.Array,
    last: jax.Array,
    sink: jax.Array,
) -> Attended:
    """Row q attends to window rows first .. last, both included; none if last < first.

    Args:
      query: [S, Q, H, C].
      rows: [S, N, C] values, or uint8 [S, N, C + C / 32] as `formats.pack_row_e4m3` makes them. Rows
        that nobody sees may hold anything.
      first, last: int32 [S, Q].
      sink: float32 [H]; -inf for none.
    """
    if rows.dtype == jnp.uint8:
        rows = formats.unpack_row_e4m3(rows, query.dtype)
    at = jnp.arange(rows.shape[1])
    shown = (at >= first[..., None]) & (at <= last[..., None])
    rows = jnp.where(shown.any(1)[..., None], rows, 0)
    scores = jnp.einsum("sqhc,snc->sqhn", query, rows, preferred_element_type=jnp.float32)
    shown = shown[:, :, None]
    scores = jnp.where(shown, scores * query.shape[-1] ** -0.5, FLOOR)
    top = jnp.maximum(scores.max(-1), jnp.maximum(sink, FLOOR))
    weight = jnp.where(shown, jnp.exp(scores - top[..., None]), 0)
    total = weight.sum(-1) + jnp.exp(sink - top)
    mixed = jnp.einsum(
        "sqhn,snc->sqhc", weight.astype(query.dtype), rows, preferred_element_type=jnp.float32
    )
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
    return Attended(mixed.astype(query.dtype), top, total)
