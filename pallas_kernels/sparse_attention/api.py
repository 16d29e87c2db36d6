"""Sparse attention by the implementation of one's choice."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.softmax import Attended
from pallas_kernels.sparse_attention import reference, tpu


def sparse_attention(
    query: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    index: jax.Array,
    valid: jax.Array,
    *,
    page_rows: int,
    kernels: str = "xla",
) -> Attended:
    """See `reference.sparse_attention`; `kernels` is one of `choice.KERNELS`.

    Raises:
      ValueError: `kernels` is unknown.
    """
    choice.check("sparse_attention", kernels)
    if kernels == "xla":
        return reference.sparse_attention(query, pool, tables, index, valid, page_rows=page_rows)
    mode = choice.interpretation(kernels)
    return tpu.sparse_attention(
        query, pool, tables, index, valid, page_rows=page_rows, interpret=mode
    )
