"""Every byte of a block and of a state slot, from the configuration alone.

A block is the global memory of `block_tokens` tokens: per owning layer a page of index keys, then a
page of main rows. A slot is the per-request rest: sliding-window rings (stored layers, then dropped
ones), rings of raw rows of unfinished compression groups, and padding. Sizes and orders are those
of the released DeepInfer 0.1.0, so exported bytes are compatible. Offsets and lengths are bytes.
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.rules import check_cache

PAGE_ALIGNMENT = 32
BLOCK_ALIGNMENT = 128  # stride the index kernel reads pages with
FLOAT32_BYTES = 4


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Region:
    """A named byte range `[start, start + size)`; `rows` rows of `row_bytes` begin it."""

    kind: str  # "index", "main", "ring" or "compression"
    layer: int
    start: int
    size: int
    rows: int
    row_bytes: int

    @property
    def stop(self) -> int:
        """First byte behind the range."""
        return self.start + self.size


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """One block. `payload` bytes are written; `size` is the stride of the pool."""

    regions: tuple[Region, ...]  # layers ascending, index page before main page
    payload: int
    size: int

    @property
    def by_layer(self) -> tuple[tuple[int, int, int], ...]:
        """One (layer, start, length) per owning layer: what a storage driver moves."""
        layers = dict.fromkeys(r.layer for r in self.regions)
        spans = ([r for r in self.regions if r.layer == layer] for layer in layers)
        return tuple((s[0].layer, s[0].start, s[-1].stop - s[0].start) for s in spans)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """One request's state with rings of `ring_rows` rows. The stored part is a prefix of it."""

    regions: tuple[Region, ...]  # rings in layer order, then compression rings in layer order
    ring_rows: int
    stored: int  # ring bytes of layers below the boundary: the image of a stored prefix
    dropped: int  # ring bytes of decoder layers and draft stages
    compression: int
    payload: int
    size: int  # stride of the pool: a whole number of ring rows

    def ring(self, layer: int) -> Region:
        """The sliding-window ring of a backbone layer or draft stage."""
        return self.regions[layer]

    def compression_ring(self, layer: int) -> Region:
        """float32 [rows, 2 (gate score, latent), head_dim] of one compressing layer."""
        return next(r for r in self.regions if r.kind == "compression" and r.layer == layer)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """A slot as it lives, and as it travels.

    `live` has wide rings (`pos % live.ring_rows`); the image handed to a decode engine is `image`,
    with narrow rings (`pos % image.ring_rows`); a stored prefix is its first `image.stored` bytes.
    """

    live: SlotLayout
    image: SlotLayout

    @property
    def stored_bytes(self) -> int:
        """Bytes of a stored image."""
        return self.image.stored

    @property
    def handoff_bytes(self) -> int:
        """Bytes of the image a prefill engine hands to a decode engine."""
        return self.image.size

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the image that a stored prefix does not keep, padding apart."""
        return self.image.dropped + self.image.compression


def _fp4_row(channels: int, group: int) -> int:
    return channels // 2 + channels // group


def _fp8_row(channels: int) -> int:
    return channels + channels // 32


def main_row_bytes(model: ModelConfig) -> int:
    """A global row: FP4 with an E4M3 scale per 16 channels, or MXFP8 (V4.1: 288, or 528)."""
    return _fp4_row(model.head_dim, 16) if model.use_fp4_sparse_kv else _fp8_row(model.head_dim)


def index_row_bytes(model: ModelConfig) -> int:
    """An index key: FP4 with an E8M0 scale per 32 channels (V4.1: 68)."""
    return _fp4_row(model.index_head_dim, 32)


def ring_row_bytes(model: ModelConfig) -> int:
    """A sliding-window row: E4M3 with an E8M0 scale per 32 channels (V4.1: 528)."""
    return _fp8_row(model.head_dim)


def global_bytes_per_token(model: ModelConfig) -> int:
    """Global memory per token, rounded up to a whole byte (V4.1: 890 = 720 main + 170 index)."""
    row = main_row_bytes(model) + index_row_bytes(model)
    halves = sum(2 * row // model.compress_ratios[i] for i in model.kv_source_layer_ids)
    return -(-halves // 2)


def ring_rows(model: ModelConfig, cache: CacheConfig) -> tuple[int, int]:
    """(rows of an image's ring, rows of a live ring): the released "inference" and "kvstore" sizes.

    window + nextn is the least that lets a verify step and its drafts spare the window; one row
    more lets a stored image be rewound by a whole step (V4.1: 134; 262 with extra state).
    """
    rows = model.window + cache.ring_slack
    return rows, rows + cache.extra_rows


def prefix_reserve(model: ModelConfig, cache: CacheConfig) -> int:
    """Last prompt tokens that no cache hit may cover (V4.1: 134; with keep 140: 140).

    Raises:
      ValueError: an asked reserve that is not safe (see `rules.check_cache`).
    """
    check_cache(model, cache)
    keep = cache.keep if cache.truncation != "off" else 0
    return cache.reserve or max(ring_rows(model, cache)[0], keep)


def compression_rows(ratio: int, cache: CacheConfig) -> int:
    """Raw rows kept of a layer that pools `ratio` tokens, tight for one verify step (V4.1: 7)."""
    return ratio + max(0, cache.ring_slack - 1)


def block_layout(model: ModelConfig, cache: CacheConfig) -> BlockLayout:
    """Pages of one block (V4.1: 113,920 bytes of payload in 114,048).

    Within a main page each row is followed by its scales; within an index page all rows come
    first, then all scales.

    Raises:
      ValueError: `cache` does not fit `model` (see `rules.check_cache`).
    """
    check_cache(model, cache)
    regions, start = [], 0
    for layer in model.kv_source_layer_ids:
        rows = cache.block_tokens // model.compress_ratios[layer]
        for kind, width in (("index", index_row_bytes(model)), ("main", main_row_bytes(model))):
            size = round_up(rows * width, PAGE_ALIGNMENT)
            regions.append(Region(kind, layer, start, size, rows, width))
            start += size
    stride = math.lcm(BLOCK_ALIGNMENT, main_row_bytes(model))
    return BlockLayout(tuple(regions), start, round_up(start, stride))


def slot_layout(model: ModelConfig, cache: CacheConfig, rows: int) -> SlotLayout:
    """State of one request with `rows` rows per ring; see `state_layout` for which to use."""
    width = ring_row_bytes(model)
    ring = round_up(rows * width, PAGE_ALIGNMENT)
    regions = [Region("ring", i, i * ring, ring, rows, width) for i in range(model.num_rings)]
    stored, start = model.boundary_layer * ring, model.num_rings * ring
    for layer in model.compression_layer_ids:
        group = compression_rows(model.compress_ratios[layer], cache)
        raw = 2 * model.head_dim * FLOAT32_BYTES
        regions.append(Region("compression", layer, start, group * raw, group, raw))
        start += group * raw
    return SlotLayout(
        regions=tuple(regions),
        ring_rows=rows,
        stored=stored,
        dropped=model.num_rings * ring - stored,
        compression=start - model.num_rings * ring,
        payload=start,
        size=round_up(start, math.lcm(PAGE_ALIGNMENT, width)),
    )


def state_layout(model: ModelConfig, cache: CacheConfig) -> StateLayout:
    """Live slot and travelling image (V4.1: both 3,128,928 bytes, of which 1,415,040 are stored).

    The split into stored and dropped rings depends on the model alone: decoder layers and draft
    stages are rebuilt by recomputing the last `keep` tokens, whatever the truncation mode.

    Raises:
      ValueError: `cache` does not fit `model` (see `rules.check_cache`).
    """
    check_cache(model, cache)
    narrow, wide = ring_rows(model, cache)
    return StateLayout(
        live=slot_layout(model, cache, wide), image=slot_layout(model, cache, narrow)
    )


def state_slots(max_requests: int) -> int:
    """Slots of a pool: a fifth more than requests, plus slot 0, where padding rows are written."""
    return max_requests * 6 // 5 + 1


def blocks_needed(tokens: int, cache: CacheConfig) -> int:
    """Blocks that hold `tokens` tokens, the last one possibly in part."""
    return -(-tokens // cache.block_tokens)
