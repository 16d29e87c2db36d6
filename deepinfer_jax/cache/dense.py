"""Memory by position: every row of every sequence at its own index, for training and for tests.

Reads and writes carry gradients. A fresh memory is zeros, which cost nothing under jit; for whole
sequences let `capacity` be their length. Shapes as in `cache.memory`, T = capacity in tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.rules import require


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["windows", "raw", "rows", "keys"],
    meta_fields=["model"],
)
@dataclasses.dataclass(frozen=True)
class DenseMemory:
    """A `cache.memory.Memory`."""

    windows: tuple[jax.Array, ...]  # per ring [S, T, C]
    raw: dict[int, jax.Array]  # per compressing layer float32 [S, T, 2, C]
    rows: dict[int, jax.Array]  # per KV source [S, G, C]
    keys: dict[int, jax.Array]  # per KV source [S, G, Di]
    model: ModelConfig

    def read_window(self, ring: int, start: jax.Array) -> jax.Array:
        """See `Memory.read_window`."""
        return _take(self.windows[ring], _before(start, self.model.window))

    def write_window(
        self, ring: int, positions: jax.Array, rows: jax.Array, keep: jax.Array
    ) -> DenseMemory:
        """See `Memory.write_window`."""
        new = _put(self.windows[ring], positions, rows, keep)
        windows = (*self.windows[:ring], new, *self.windows[ring + 1 :])
        return dataclasses.replace(self, windows=windows)

    def read_raw(self, layer: int, start: jax.Array) -> jax.Array:
        """See `Memory.read_raw`."""
        return _take(self.raw[layer], _before(start, self.model.compress_ratios[layer] - 1))

    def write_raw(
        self, layer: int, positions: jax.Array, raw: jax.Array, keep: jax.Array
    ) -> DenseMemory:
        """See `Memory.write_raw`."""
        new = _put(self.raw[layer], positions, raw, keep)
        return dataclasses.replace(self, raw={**self.raw, layer: new})

    def read_keys(self, source: int) -> jax.Array:
        """See `Memory.read_keys`."""
        return self.keys[source]

    def read_global(self, source: int, index: jax.Array) -> jax.Array:
        """See `Memory.read_global`."""
        flat = _take(self.rows[source], index.reshape(index.shape[0], -1))
        return flat.reshape(*index.shape, -1)

    def write_global(
        self, source: int, first: jax.Array, rows: jax.Array, keys: jax.Array, keep: jax.Array
    ) -> DenseMemory:
        """See `Memory.write_global`."""
        index = first[:, None] + jnp.arange(rows.shape[1])
        new_rows = _put(self.rows[source], index, rows, keep)
        new_keys = _put(self.keys[source], index, keys, keep)
        return dataclasses.replace(
            self, rows={**self.rows, source: new_rows}, keys={**self.keys, source: new_keys}
        )


def create_dense(
    model: ModelConfig, sequences: int, capacity: int, dtype: DTypeLike = jnp.float32
) -> DenseMemory:
    """An empty memory of `sequences` sequences of up to `capacity` tokens.

    Raises:
      ValueError: `capacity` has no room for one group.
    """
    widest = max(model.compress_ratios)
    require(
        capacity >= widest,
        f"capacity is {capacity} tokens; one group takes {widest}, so raise it",
    )
    ratios = {i: model.compress_ratios[i] for i in model.kv_source_layer_ids}

    def zeros(length: int, *width: int, dtype: DTypeLike = dtype) -> jax.Array:
        return jnp.zeros((sequences, length, *width), dtype)

    return DenseMemory(
        windows=tuple(zeros(capacity, model.head_dim) for _ in range(model.num_rings)),
        raw={
            i: zeros(capacity, 2, model.head_dim, dtype=jnp.float32)
            for i in model.compression_layer_ids
        },
        rows={i: zeros(capacity // r, model.head_dim) for i, r in ratios.items()},
        keys={i: zeros(capacity // r, model.index_head_dim) for i, r in ratios.items()},
        model=model,
    )


def _before(start: jax.Array, count: int) -> jax.Array:
    """[S, count]: the positions just before start [S]."""
    return start[:, None] - count + jnp.arange(count)


def _take(table: jax.Array, index: jax.Array) -> jax.Array:
    """[S, N, ...]: entries index [S, N] of table [S, T, ...], the nearest one when there is none."""
    sequence = jnp.arange(table.shape[0])[:, None]
    return table[sequence, jnp.clip(index, 0, table.shape[1] - 1)]


def _put(table: jax.Array, index: jax.Array, values: jax.Array, keep: jax.Array) -> jax.Array:
    """table [S, T, ...] with values [S, N, ...] at index [S, N] where keep."""
    sequence = jnp.arange(table.shape[0])[:, None]
    target = jnp.where(keep, index, table.shape[1])
    return table.at[sequence, target].set(values.astype(table.dtype), mode="drop")
