"""Work on many rows in blocks, so that what a row needs for itself alone stays small.

Scores against the whole memory, and the rows a token has selected, are large per row and used once.
A step of few rows (decode) is one block and has no loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

BLOCK = 32  # rows: what they gather stays in a core's cache
T = TypeVar("T")


def map_rows(function: Callable[..., T], rows: Any, *shared: Any) -> T:
    """function(rows, *shared), applied to blocks of rows.

    Args:
      function: takes a tree of [S, b, ...] and `shared`; returns a tree of [S, b, ...].
      rows: a tree of arrays [S, Q, ...].

    Returns:
      What `function` makes of all rows: a tree of [S, Q, ...]. Rows that pad the last block to its
      size are copies of row Q - 1 and are dropped.
    """
    count = jax.tree.leaves(rows)[0].shape[1]
    if count <= BLOCK:
        return function(rows, *shared)
    blocks = -(-count // BLOCK)
    index = jnp.minimum(jnp.arange(blocks * BLOCK), count - 1).reshape(blocks, BLOCK)

    def cut(x: jax.Array) -> jax.Array:  # [S, Q, ...] to [blocks, S, b, ...]
        return jnp.moveaxis(x[:, index], 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], blocks * BLOCK, *x.shape[3:])[:, :count]

    made = jax.lax.map(lambda block: function(block, *shared), jax.tree.map(cut, rows))
    return jax.tree.map(join, made)
