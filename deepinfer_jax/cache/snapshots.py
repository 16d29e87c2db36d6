"""State snapshots: one request's rings out of its slot, as of a position, and into another slot.

Two extents. "live" is all a decoding engine needs: every ring, and the raw rows of compression
groups. "stored" is what a cached prefix keeps: the rings of the layers below the boundary; a prompt
that starts from it recomputes the rest (decoder replay). An image has narrow rings of R rows, row
p of which is at p % R; a live ring has R' = R rows or, with `extra_state`, more, at p % R'. So the
image of an older position can be taken out of a wide ring as long as its rows are there.

Shapes: R rows of an image's ring; C' = head_dim in memory format "values", bytes of a row in
"bytes". Positions count the tokens before them. `select` and `load` are pure and may be jitted with
slot and position traced; donate the memory that `load` replaces.
Source: the released DeepInfer 0.1.0 for extents, sizes and guards; the chapter, section 11.3.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from deepinfer_jax.cache.paged import PagedMemory
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.layout import StateLayout, state_layout
from deepinfer_jax.rules import require
from pallas_kernels import formats

EXTENTS = ("live", "stored")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["windows", "raw", "position"],
    meta_fields=["extent"],
)
@dataclasses.dataclass(frozen=True)
class Image:
    """A request's state as of `position`, that is, of the tokens before it."""

    windows: jax.Array  # [N, R, C'], N rings: all, or, if stored, those below the boundary
    raw: dict[int, jax.Array]  # per compressing layer float32 [rows, 2, C]; none if stored
    position: jax.Array  # int32 []
    extent: str


def check_select(
    model: ModelConfig, cache: CacheConfig, extent: str, position: int, end: int
) -> None:
    """The rules of a position to take a snapshot at, where `end` tokens may have been written.

    Rows up to `end`, drafts and steps in flight included, may stand where older ones stood. A
    window before `position` is whole if they are at most R' - window rows ahead (134: 6).

    Raises:
      ValueError: the guard that `position` breaks.
    """
    require(extent in EXTENTS, f"extent is {extent!r}; choose one of {', '.join(EXTENTS)}")
    require(
        extent == "live" or position % cache.block_tokens == 0,
        f"a stored image as of {position}; compression rings are not stored, so choose a multiple "
        f"of block_tokens {cache.block_tokens}",
    )
    require(
        extent == "live" or model.boundary_layer > 0,
        "no layer lies below the boundary, so nothing is stored; take extent 'live'",
    )
    most = state_layout(model, cache).live.ring_rows - model.window
    require(
        0 <= end - position <= most,
        f"an image as of {position} of rings written up to {end}; rows of its window are gone "
        f"more than {most} rows later, so take it earlier or widen the rings (extra_state)",
    )


def check_load(model: ModelConfig, cache: CacheConfig, extent: str) -> None:
    """Whether a slot may start from an image of this extent.

    Raises:
      ValueError: a stored image without truncation, where decoder rings are needed and not there.
    """
    require(extent in EXTENTS, f"extent is {extent!r}; choose one of {', '.join(EXTENTS)}")
    dropped = model.num_rings - model.boundary_layer
    require(
        extent == "live" or cache.truncation != "off" or not dropped,
        f"truncation is 'off' and a stored image lacks {dropped} rings; only a prompt computed "
        "with truncation 'mask' or 'compact' rebuilds them",
    )


def select(memory: PagedMemory, slot: jax.Array, position: jax.Array, extent: str) -> Image:
    """The image of a slot's state as of `position`; see `check_select`, which reads the numbers.

    Args:
      slot, position: int32 scalars.
      extent: "live" or "stored".
    """
    require(extent in EXTENTS, f"extent is {extent!r}; choose one of {', '.join(EXTENTS)}")
    position = jnp.asarray(position, jnp.int32)
    at = _image_positions(memory, position) % _layout(memory).live.ring_rows
    rings = memory.model.boundary_layer if extent == "stored" else memory.model.num_rings
    return Image(
        windows=jnp.stack([_ring(memory, i, slot)[at] for i in range(rings)]),
        raw={} if extent == "stored" else {i: pool[slot] for i, pool in memory.raw.items()},
        position=position,
        extent=extent,
    )


def load(memory: PagedMemory, slot: jax.Array, image: Image) -> PagedMemory:
    """The memory with the image in a slot; nothing else changes, not even its other rings.

    Raises:
      ValueError: see `check_load`.
    """
    check_load(memory.model, memory.cache, image.extent)
    at = _image_positions(memory, image.position) % _layout(memory).live.ring_rows
    windows = list(memory.windows)
    for i, rows in enumerate(image.windows):
        ring = _ring(memory, i, slot).at[at].set(rows)
        flat = ring.reshape(-1) if memory.format == "bytes" else ring
        padding = windows[i].shape[1] - flat.shape[0]
        flat = jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1))
        windows[i] = windows[i].at[slot].set(flat)
    raw = {i: memory.raw[i].at[slot].set(rows) for i, rows in image.raw.items()}
    return dataclasses.replace(memory, windows=tuple(windows), raw={**memory.raw, **raw})


def to_bytes(model: ModelConfig, cache: CacheConfig, image: Image) -> jax.Array:
    """The image as it travels: uint8 [bytes] of `layout.state_layout`, padding zero.

    V4.1: 3,128,928 bytes live, 1,415,040 stored. Rows in format "values" are rounded as
    `pallas_kernels.formats` rounds; rows that were rounded before stay what they are.
    """
    layout = state_layout(model, cache).image
    rows = image.windows
    packed = rows if rows.dtype == jnp.uint8 else formats.pack_row_e4m3(rows)
    rings = packed.reshape(rows.shape[0], -1)
    rings = jnp.pad(rings, ((0, 0), (0, layout.ring(0).size - rings.shape[1])))
    raw = [lax.bitcast_convert_type(image.raw[i], jnp.uint8).reshape(-1) for i in sorted(image.raw)]
    flat = jnp.concatenate([rings.reshape(-1), *raw])
    size = layout.size if image.extent == "live" else layout.stored
    return jnp.pad(flat, (0, size - flat.size))


def from_bytes(
    model: ModelConfig,
    cache: CacheConfig,
    extent: str,
    data: jax.Array,
    position: jax.Array,
    format: str = "bytes",
    dtype: DTypeLike = jnp.bfloat16,
) -> Image:
    """The image that `to_bytes` made bytes of, for a memory of this format and dtype.

    Raises:
      ValueError: another number of bytes than the layout has.
    """
    layout = state_layout(model, cache).image
    size = layout.size if extent == "live" else layout.stored
    require(
        data.shape == (size,),
        f"an image of {data.shape} bytes; extent {extent!r} has {size}, so sender and receiver "
        "differ in model or ring_slack",
    )
    rings, ring = model.num_rings if extent == "live" else model.boundary_layer, layout.ring(0)
    rows = data[: rings * ring.size].reshape(rings, -1)[:, : ring.rows * ring.row_bytes]
    windows = rows.reshape(rings, ring.rows, ring.row_bytes)
    if format != "bytes":
        windows = formats.unpack_row_e4m3(windows, dtype)
    raw = {}
    for layer in model.compression_layer_ids if extent == "live" else ():
        region = layout.compression_ring(layer)
        words = data[region.start : region.stop].reshape(region.rows, 2, model.head_dim, 4)
        raw[layer] = lax.bitcast_convert_type(words, jnp.float32)
    return Image(windows, raw, jnp.asarray(position, jnp.int32), extent)


def _layout(memory: PagedMemory) -> StateLayout:
    return state_layout(memory.model, memory.cache)


def _image_positions(memory: PagedMemory, position: jax.Array) -> jax.Array:
    """int32 [R]: the position before `position` whose row is row i of an image's ring.

    Worked example, R = 134: as of 768, row 98 is position 634 and row 97 is 767.
    """
    rows = _layout(memory).image.ring_rows
    oldest = position - rows
    return oldest + (jnp.arange(rows) - oldest) % rows


def _ring(memory: PagedMemory, ring: int, slot: jax.Array) -> jax.Array:
    """[R', C']: a ring of a slot, row by row."""
    found = memory.windows[ring][slot]
    if memory.format != "bytes":
        return found
    region = _layout(memory).live.ring(ring)
    return found[: region.rows * region.row_bytes].reshape(region.rows, region.row_bytes)
