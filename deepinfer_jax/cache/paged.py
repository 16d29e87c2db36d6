"""Memory for service: rings in per-request slots, global rows and index keys in pages of blocks.

Shapes as in `cache.memory`; R live ring rows, n rows of a source in a block, P blocks a sequence
may hold. A pool has an entry per slot or block: an array of rows in the memory's dtype (format
"values"), or the bytes of a region of `layout.state_layout(...).live` and `layout.block_layout`
(format "bytes"; padding behind a slot or block apart). Row p of a ring is at p % R; row j of a
source is row j % n of block tables[s, j // n]. Slot 0 and block 0 belong to nobody: padding
sequences and unfilled table entries point there, so what they write harms no one.

Bytes hold rows that were rounded to the cache's formats exactly; other rows are rounded on the way.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.layout import Region, block_layout, state_layout
from deepinfer_jax.rules import require
from pallas_kernels import formats

FORMATS = ("values", "bytes")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["windows", "raw", "rows", "keys", "slots", "tables"],
    meta_fields=["model", "cache", "format", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class PagedMemory:
    """A `cache.memory.Memory`. In format "bytes" all pools but `raw` are uint8."""

    windows: tuple[jax.Array, ...]  # per ring [slots, R, C] or [slots, bytes of a ring]
    raw: dict[int, jax.Array]  # per compressing layer float32 [slots, compression rows, 2, C]
    rows: dict[int, jax.Array]  # per KV source [blocks, n, C] or [blocks, bytes of a main page]
    keys: dict[int, jax.Array]  # per KV source [blocks, n, Di] or [blocks, bytes of an index page]
    slots: jax.Array  # int32 [S]
    tables: jax.Array  # int32 [S, P]
    model: ModelConfig
    cache: CacheConfig
    format: str
    dtype: np.dtype

    def read_window(self, ring: int, start: jax.Array) -> jax.Array:
        """See `Memory.read_window`."""
        at = _before(start, self.model.window) % self._ring.rows
        pool, slot = self.windows[ring], self.slots[:, None]
        if self.format == "bytes":
            found = _read_bytes(pool, slot, at, self._ring.row_bytes)
            return formats.unpack_row_e4m3(found, self.dtype)
        return pool[slot, at]

    def write_window(
        self, ring: int, positions: jax.Array, rows: jax.Array, keep: jax.Array
    ) -> PagedMemory:
        """See `Memory.write_window`."""
        packed = formats.pack_row_e4m3(rows) if self.format == "bytes" else rows
        new = self._write_ring(self.windows[ring], positions, packed, keep, self._ring.rows)
        windows = (*self.windows[:ring], new, *self.windows[ring + 1 :])
        return dataclasses.replace(self, windows=windows)

    def read_raw(self, layer: int, start: jax.Array) -> jax.Array:
        """See `Memory.read_raw`."""
        at = _before(start, self.model.compress_ratios[layer] - 1) % self._raw_rows(layer)
        return self.raw[layer][self.slots[:, None], at]

    def write_raw(
        self, layer: int, positions: jax.Array, raw: jax.Array, keep: jax.Array
    ) -> PagedMemory:
        """See `Memory.write_raw`."""
        rows = self._raw_rows(layer)
        new = self._write_ring(self.raw[layer], positions, raw, keep, rows)
        return dataclasses.replace(self, raw={**self.raw, layer: new})

    def read_keys(self, source: int) -> jax.Array:
        """See `Memory.read_keys`."""
        pages, page = self.keys[source][self.tables], self._page(source, "index")
        if self.format == "bytes":
            width = self.model.index_head_dim // 32
            used = pages[..., : page.rows * page.row_bytes]
            pages = formats.decode_mxfp4(*formats.unpack_page(used, page.rows, width), self.dtype)
        return pages.reshape(self.tables.shape[0], -1, self.model.index_head_dim)

    def read_global(self, source: int, index: jax.Array) -> jax.Array:
        """See `Memory.read_global`."""
        page = self._page(source, "main")
        flat = jnp.clip(index.reshape(index.shape[0], -1), 0, self.tables.shape[1] * page.rows - 1)
        block = jnp.take_along_axis(self.tables, flat // page.rows, axis=1)
        pool, row = self.rows[source], flat % page.rows
        if self.format == "bytes":
            found = self._main_row(_read_bytes(pool, block, row, page.row_bytes))
        else:
            found = pool[block, row]
        return found.reshape(*index.shape, -1)

    def write_global(
        self, source: int, first: jax.Array, rows: jax.Array, keys: jax.Array, keep: jax.Array
    ) -> PagedMemory:
        """See `Memory.write_global`."""
        count = self._page(source, "main").rows
        index = first[:, None] + jnp.arange(rows.shape[1])
        inside = keep & (index < self.tables.shape[1] * count)
        entry = jnp.clip(index // count, 0, self.tables.shape[1] - 1)
        block = jnp.take_along_axis(self.tables, entry, axis=1)
        block = jnp.where(inside, block, self.rows[source].shape[0])
        row = index % count
        new_rows, new_keys = self.rows[source], self.keys[source]
        if self.format == "bytes":
            codes, scales = formats.encode_mxfp4(keys)
            new_rows = _write(new_rows, block, row, self._packed_main_row(rows))
            new_keys = _write(new_keys, block, row, codes)
            new_keys = _write_bytes(new_keys, block, row, scales, base=count * codes.shape[-1])
        else:
            new_rows = _write(new_rows, block, row, rows)
            new_keys = _write(new_keys, block, row, keys)
        return dataclasses.replace(
            self, rows={**self.rows, source: new_rows}, keys={**self.keys, source: new_keys}
        )

    @property
    def _ring(self) -> Region:
        return state_layout(self.model, self.cache).live.ring(0)

    def _raw_rows(self, layer: int) -> int:
        return state_layout(self.model, self.cache).live.compression_ring(layer).rows

    def _page(self, source: int, kind: str) -> Region:
        regions = block_layout(self.model, self.cache).regions
        return next(r for r in regions if r.layer == source and r.kind == kind)

    def _write_ring(
        self, pool: jax.Array, positions: jax.Array, values: jax.Array, keep: jax.Array, rows: int
    ) -> jax.Array:
        """Rings of `rows` rows with values [S, Q, ...] at positions [S, Q]; the last ones stay."""
        last = jnp.max(jnp.where(keep, positions, -1), axis=1, keepdims=True)
        stays = keep & (positions > last - rows)
        slot = jnp.where(stays, self.slots[:, None], pool.shape[0])
        return _write(pool, slot, positions % rows, values)

    def _packed_main_row(self, rows: jax.Array) -> jax.Array:
        if self.model.use_fp4_sparse_kv:
            return formats.pack_row_fp4_e4m3(rows)
        return formats.pack_row_e4m3(rows)

    def _main_row(self, packed: jax.Array) -> jax.Array:
        if self.model.use_fp4_sparse_kv:
            return formats.unpack_row_fp4_e4m3(packed, self.dtype)
        return formats.unpack_row_e4m3(packed, self.dtype)


def create_paged(
    model: ModelConfig,
    cache: CacheConfig,
    *,
    blocks: int,
    slots: int,
    format: str = "values",
    dtype: DTypeLike = jnp.bfloat16,
) -> PagedMemory:
    """Empty pools of `blocks` blocks and `slots` slots, the reserved ones included; `bind` it next.

    `dtype` is that of the rows read, and of the pools in format "values".

    Raises:
      ValueError: `cache` does not fit `model`, an unknown format, or no room beside the reserved.
    """
    require(format in FORMATS, f"format is {format!r}; choose one of {', '.join(FORMATS)}")
    require(
        blocks > 1 and slots > 1,
        f"blocks {blocks}, slots {slots}; number 0 of each is reserved, so give at least 2",
    )
    live = state_layout(model, cache).live
    pages = block_layout(model, cache).regions

    def pool(count: int, region: Region, width: int) -> jax.Array:
        if format == "bytes":
            return jnp.zeros((count, region.size), jnp.uint8)
        return jnp.zeros((count, region.rows, width), dtype)

    main = {r.layer: pool(blocks, r, model.head_dim) for r in pages if r.kind == "main"}
    index = {r.layer: pool(blocks, r, model.index_head_dim) for r in pages if r.kind == "index"}
    raw = {i: live.compression_ring(i).rows for i in model.compression_layer_ids}
    return PagedMemory(
        windows=tuple(pool(slots, live.ring(i), model.head_dim) for i in range(model.num_rings)),
        raw={i: jnp.zeros((slots, n, 2, model.head_dim), jnp.float32) for i, n in raw.items()},
        rows=main,
        keys=index,
        slots=jnp.zeros(1, jnp.int32),
        tables=jnp.zeros((1, 1), jnp.int32),
        model=model,
        cache=cache,
        format=format,
        dtype=np.dtype(dtype),
    )


def bind(memory: PagedMemory, slots: jax.Array, tables: jax.Array) -> PagedMemory:
    """The same pools seen by the S sequences of a step: slots int32 [S], tables int32 [S, P].

    Sequences that pad the step have slot 0; table entries that pad a row are 0.

    Raises:
      ValueError: shapes that are not [S] and [S, P].
    """
    require(
        slots.ndim == 1 and tables.ndim == 2 and tables.shape[0] == slots.shape[0],
        f"slots {slots.shape} and tables {tables.shape} must be [S] and [S, P] of the same S",
    )
    return dataclasses.replace(memory, slots=slots, tables=tables)


def _before(start: jax.Array, count: int) -> jax.Array:
    """[S, count]: the positions just before start [S]."""
    return start[:, None] - count + jnp.arange(count)


def _read_bytes(pool: jax.Array, page: jax.Array, row: jax.Array, width: int) -> jax.Array:
    """uint8 [S, N, width]: rows `row` [S, N] of pages `page` [S, N or 1]."""
    at = jnp.stack([jnp.broadcast_to(page, row.shape), row * width], axis=-1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(pool, at, numbers, (1, width), mode=lax.GatherScatterMode.CLIP)


def _write_bytes(
    pool: jax.Array, page: jax.Array, row: jax.Array, values: jax.Array, base: int = 0
) -> jax.Array:
    """The pool with values uint8 [S, N, width] at rows `row` [S, N] of pages, from `base` on."""
    at = jnp.stack([page, base + row * values.shape[-1]], axis=-1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(pool, at, values, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _write(pool: jax.Array, page: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """The pool with values [S, N, ...] at rows `row` [S, N] of pages `page` [S, N].

    A page that does not exist drops its row.
    """
    if pool.ndim == 2:
        return _write_bytes(pool, page, row, values)
    return pool.at[page, row].set(values.astype(pool.dtype), mode="drop")
