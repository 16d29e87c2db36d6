"""Which expert meets which block of rows: a list of visits, made from the experts' sizes.

A block of rows is visited by each expert that has rows in it, in order; rows behind the last
expert's are visited by nobody, expert E, so that every block is visited and written.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """int32 [V] each. Visits behind the last repeat its block and expert, and have no rows."""

    expert: jax.Array  # whose weights to hold; nobody's visit keeps those of the expert before
    block: jax.Array
    begin: jax.Array  # rows begin .. end - 1 of all rows are multiplied
    end: jax.Array
    fresh: jax.Array  # 1 where the block is visited for the first time


def bound(rows: int, block: int, experts: int) -> int:
    """Visits there may be."""
    return -(-rows // block) + experts


def visits(sizes: jax.Array, rows: int, block: int) -> Visits:
    """The visits of `rows` rows in blocks of `block`; sizes int32 [E]."""
    experts = sizes.shape[0]
    ends = jnp.concatenate([jnp.cumsum(sizes), jnp.array([rows])]).astype(jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = begins // block
    count = jnp.where(ends > begins, (ends - 1) // block - first + 1, 0)
    until = jnp.cumsum(count)
    at = jnp.arange(bound(rows, block, experts))
    real = at < until[-1]
    at = jnp.minimum(at, until[-1] - 1)
    group = jnp.searchsorted(until, at, side="right", method="compare_all").astype(jnp.int32)
    tile = (first[group] + at - (until[group] - count[group])).astype(jnp.int32)
    works = real & (group < experts)
    last = jnp.max(jnp.where(sizes > 0, jnp.arange(experts), 0))
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), tile[:-1]])
    return Visits(
        expert=jnp.where(group < experts, group, last).astype(jnp.int32),
        block=tile,
        begin=jnp.where(works, begins[group], 0).astype(jnp.int32),
        end=jnp.where(works, ends[group], 0).astype(jnp.int32),
        fresh=(tile != before).astype(jnp.int32),
    )
