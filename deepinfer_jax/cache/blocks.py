"""Blocks of global memory out of one pool and into another: for a hand-over, or a store.

Shapes: N blocks, by id. Both memories are of the same model, cache configuration and format; their
pools may differ in size. Everything is pure and may be jitted with ids traced; donate the memory
that is replaced. To keep N fixed, pad ids with `nowhere`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from deepinfer_jax.cache.paged import PagedMemory
from deepinfer_jax.layout import block_layout
from deepinfer_jax.rules import require


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "keys"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The pages of N blocks, as `PagedMemory` holds them."""

    rows: dict[int, jax.Array]  # per KV source [N, n, C] or [N, bytes of a main page]
    keys: dict[int, jax.Array]  # per KV source [N, n, Di] or [N, bytes of an index page]


def nowhere(memory: PagedMemory) -> int:
    """An id that no block has: what is written there is dropped."""
    return next(iter(memory.rows.values())).shape[0]


def read_blocks(memory: PagedMemory, ids: jax.Array) -> Blocks:
    """The blocks ids int32 [N]; an id beyond the pool gives some block."""

    def pages(pools: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return {source: pool.at[ids].get(mode="clip") for source, pool in pools.items()}

    return Blocks(pages(memory.rows), pages(memory.keys))


def write_blocks(memory: PagedMemory, ids: jax.Array, blocks: Blocks) -> PagedMemory:
    """The memory with the blocks at ids int32 [N], which differ; `nowhere` drops one.

    Raises:
      ValueError: blocks of another configuration, dtype or format.
    """

    def put(pools: dict[int, jax.Array], pages: dict[int, jax.Array]) -> dict[int, jax.Array]:
        for source, pool in pools.items():
            page = pages[source]
            require(
                page.shape[1:] == pool.shape[1:] and page.dtype == pool.dtype,
                f"pages {page.dtype}{page.shape[1:]} for a pool of {pool.dtype}{pool.shape[1:]}; "
                "give both memories the same model, block_tokens, format and dtype",
            )
        return {i: pool.at[ids].set(pages[i], mode="drop") for i, pool in pools.items()}

    rows, keys = put(memory.rows, blocks.rows), put(memory.keys, blocks.keys)
    return dataclasses.replace(memory, rows=rows, keys=keys)


def copy_blocks(
    target: PagedMemory, source: PagedMemory, target_ids: jax.Array, source_ids: jax.Array
) -> PagedMemory:
    """`target` with blocks `target_ids` [N] as blocks `source_ids` [N] of `source` are."""
    return write_blocks(target, target_ids, read_blocks(source, source_ids))


def to_bytes(memory: PagedMemory, blocks: Blocks) -> jax.Array:
    """uint8 [N, bytes of a block]: `layout.block_layout`'s, padding zero (V4.1: 114,048).

    Raises:
      ValueError: format "values".
    """
    require(
        memory.format == "bytes",
        f"format is {memory.format!r}; only blocks of format 'bytes' are bytes, so create it so",
    )
    layout = block_layout(memory.model, memory.cache)
    pages = [
        (blocks.keys if region.kind == "index" else blocks.rows)[region.layer]
        for region in layout.regions
    ]
    flat = jnp.concatenate(pages, axis=1)
    return jnp.pad(flat, ((0, 0), (0, layout.size - flat.shape[1])))


def from_bytes(memory: PagedMemory, data: jax.Array) -> Blocks:
    """The blocks of `to_bytes`, for a memory of format "bytes".

    Raises:
      ValueError: another number of bytes per block.
    """
    layout = block_layout(memory.model, memory.cache)
    require(
        data.ndim == 2 and data.shape[1] == layout.size,
        f"blocks of {data.shape} bytes; each has {layout.size} here, so sender and receiver differ "
        "in model or block_tokens",
    )
    pages = {(r.kind, r.layer): data[:, r.start : r.stop] for r in layout.regions}
    return Blocks(
        {layer: page for (kind, layer), page in pages.items() if kind == "main"},
        {layer: page for (kind, layer), page in pages.items() if kind == "index"},
    )
