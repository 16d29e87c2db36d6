"""The interface between the model and what it remembers, whatever holds it.

A memory is an immutable pytree; each write returns a new one. Shapes: S sequences, Q rows of a
sequence in a step, J groups in a step, W window, r compression ratio, C head_dim, Di
index_head_dim, G groups that fit. Positions are absolute token positions and consecutive within a
sequence; group j of a source of ratio r covers tokens [j r, j r + r).

Three kinds of row: sliding-window rows, one ring per backbone layer and then per draft stage; raw
rows of a compressing layer, whose last group may be unfinished; and the global rows and index keys
of a KV source, named by its layer number. A step reads the history first and then writes its own
rows, for a write may take the place of what was just read.

What a read may ask for is what a ring surely holds: with `e` the highest position ever written plus
one, a start in [e - ring_slack, e]. Rows that were never written, or that lie before position 0,
are finite but meaningless; the caller masks them. Rows with `keep` false leave the memory as it is.
"""

from __future__ import annotations

from typing import Protocol, Self

import jax


class Memory(Protocol):
    """See the module; `dense.DenseMemory` and `paged.PagedMemory` are the implementations."""

    def read_window(self, ring: int, start: jax.Array) -> jax.Array:
        """[S, W, C]: rows at positions start - W .. start - 1 of a ring; start int32 [S]."""
        ...

    def write_window(
        self, ring: int, positions: jax.Array, rows: jax.Array, keep: jax.Array
    ) -> Self:
        """Store rows [S, Q, C] at positions [S, Q] where keep [S, Q].

        When more rows are kept than the ring holds, the last ones stay.
        """
        ...

    def read_raw(self, layer: int, start: jax.Array) -> jax.Array:
        """float32 [S, r - 1, 2, C]: (gate score, latent) at positions start - r + 1 .. start - 1."""
        ...

    def write_raw(self, layer: int, positions: jax.Array, raw: jax.Array, keep: jax.Array) -> Self:
        """Store raw rows [S, Q, 2, C], as `write_window` does."""
        ...

    def read_keys(self, source: int) -> jax.Array:
        """[S, G, Di]: every index key of a source up to the capacity."""
        ...

    def read_global(self, source: int, index: jax.Array) -> jax.Array:
        """[S, ..., C]: global rows by group index int32 [S, ...]; beyond G it is some finite row."""
        ...

    def write_global(
        self, source: int, first: jax.Array, rows: jax.Array, keys: jax.Array, keep: jax.Array
    ) -> Self:
        """Store rows [S, J, C] and keys [S, J, Di] of groups first [S] + 0 .. J - 1 where keep."""
        ...
