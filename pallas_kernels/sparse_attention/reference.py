"""What sparse attention is. S sequences, Q query rows, H heads, C channels, K selected rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.softmax import FLOOR, Attended
from pallas_kernels.sparse_attention.rows import gather_rows


def sparse_attention(
    query: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    index: jax.Array,
    valid: jax.Array,
    *,
    page_rows: int,
) -> Attended:
    """Each query over its own selected rows; without a sink, to be merged with the window part.

    Args:
      query: [S, Q, H, C].
      pool: uint32 [pages * page_rows, 1, C / 4] of `rows.spread_rows`; rows that nobody selects may
        hold anything.
      tables: int32 [S, T]: row j of a sequence is row j % page_rows of page tables[s, j // page_rows].
      index: int32 [S, Q, K] rows of the sequence.
      valid: bool [S, Q, K].
    """
    safe = jnp.where(valid, index, 0)
    page = jnp.take_along_axis(tables[:, None], safe // page_rows, axis=-1)
    packed = gather_rows(pool[page * page_rows + safe % page_rows])
    rows = formats.unpack_row_fp4_e4m3(packed, query.dtype)
    rows = jnp.where(valid[..., None], rows, 0)
    scores = jnp.einsum("sqhc,sqkc->sqhk", query, rows, preferred_element_type=jnp.float32)
    shown = valid[:, :, None]
    scores = jnp.where(shown, scores * query.shape[-1] ** -0.5, FLOOR)
    top = scores.max(-1)
    weight = jnp.where(shown, jnp.exp(scores - top[..., None]), 0)
    total = weight.sum(-1)
    mixed = jnp.einsum(
        "sqhk,sqkc->sqhc", weight.astype(query.dtype), rows, preferred_element_type=jnp.float32
    )
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]
    return Attended(mixed.astype(query.dtype), top, total)
