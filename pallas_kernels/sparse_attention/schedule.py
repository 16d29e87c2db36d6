"""Which rows of the pool a query fetches, and in what order: a list in whole blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Fetches(NamedTuple):
    """N is K in whole blocks."""

    address: jax.Array  # int32 [S, Q, N] rows of the pool
    selected: jax.Array  # int32 [S, Q] so many first ones are; the rest repeats one of them


def block_of(selected: int) -> int:
    """Rows fetched together: 128, or as many as there are."""
    return min(128, -(-selected // 8) * 8)


def fetches(
    tables: jax.Array, index: jax.Array, valid: jax.Array, page_rows: int, block: int
) -> Fetches:
    """The valid rows of `index` [S, Q, K] in order, then copies of the last one.

    Args:
      tables: int32 [S, T] pages of each sequence.
      valid: bool [S, Q, K]; other entries of `index` may be any number.
      page_rows: rows of a page.
    """
    size = index.shape[-1]
    count = valid.sum(-1, dtype=jnp.int32)
    order = jnp.argsort(~valid, axis=-1, stable=True)
    last = jnp.maximum(count - 1, 0)[..., None]
    at = jnp.minimum(jnp.arange(-(-size // block) * block), last)
    chosen = jnp.take_along_axis(index, jnp.take_along_axis(order, at, axis=-1), axis=-1)
    chosen = jnp.where(count[..., None] > 0, chosen, 0)
    pages = jnp.take_along_axis(tables[:, None], chosen // page_rows, axis=-1)
    return Fetches((pages * page_rows + chosen % page_rows).astype(jnp.int32), count)
