"""Prefix reuse inside one engine: blocks found by their hash chain, and images of states.

A block is kept while nobody needs its place, shared by any number of tables; an image of the state
at a block's end is kept while there is room for it. A hit with an image at its end computes on from
there. Without one it steps back by a block and refills the encoder's rings (encoder replay): rows
see no window before the restart, and the global rows of that block are not stored again. In both
cases the decoder's rings are rebuilt from the last `keep` tokens (decoder replay), so `reserve`
must not be less than `keep`: else kept rows would look back to rows that nobody restored.
Rows computed behind a replay saw windows cut at the restart; their blocks are published like any
other, as the released engine does.
Source: the chapter, sections 11.2 and 11.4; the released DeepInfer 0.1.0 for the restart's rules.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.cache.allocator import BlockPool
from deepinfer_jax.cache.snapshots import check_load
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.layout import prefix_reserve, ring_rows
from deepinfer_jax.policy.prefix import Image, chain, hit_lengths, outside_image
from deepinfer_jax.rules import require

Snapshot = Callable[[int, int], Any]
"""(slot, position) -> stored image of the newest memory (`cache.snapshots.select`)."""


@dataclasses.dataclass
class _Block:
    number: int  # id in the pool
    parent: bytes  # key of the block before; empty for a first one
    successors: set[bytes] = dataclasses.field(default_factory=set)


class PrefixCache:
    """A `prefix.PrefixSource`. `attach` it to the engine before the first request.

    The oldest used go first. A block is used when it is matched or published, its successors a
    little before it, so that a chain shrinks from its end. The predecessor of a kept block is kept.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        images: int = 64,
        extra_keys: Sequence[bytes] = (),
    ) -> None:
        """An empty cache.

        Args:
          images: states kept at most; each takes `layout.state_layout(...).stored_bytes`.
          extra_keys: what else rows depend on: weights, adapter, tenant.

        Raises:
          ValueError: a cache whose prompts cannot restart from a stored prefix.
        """
        check_load(model, cache, "stored")
        require(
            cache.block_tokens >= model.window,
            f"block_tokens is {cache.block_tokens}, below window {model.window}; one replayed "
            "block must fill a window, so raise it",
        )
        self.block_tokens, self.nextn = cache.block_tokens, cache.nextn
        self.reserve = prefix_reserve(model, cache)
        self.slack = ring_rows(model, cache)[1] - model.window
        self.most_images, self.extra_keys = images, extra_keys
        self.blocks: OrderedDict[bytes, _Block] = OrderedDict()  # by key, oldest used first
        self.images: OrderedDict[bytes, Any] = OrderedDict()  # by key of the block they end with
        self.pool: BlockPool
        self.snapshot: Snapshot
        self._chains: weakref.WeakKeyDictionary[Request, list[bytes]] = weakref.WeakKeyDictionary()

    def attach(self, pool: BlockPool, snapshot: Snapshot) -> None:
        """The engine's block pool, and how to take an image of its memory."""
        self.pool, self.snapshot = pool, snapshot

    def anchor(self, length: int) -> int:
        """Where the same prompt would start again if it finds an image there; 0: nowhere."""
        return max(0, length - self.reserve) // self.block_tokens * self.block_tokens

    def checkpoints(self, length: int, images: Sequence[Image] = ()) -> tuple[int, ...]:
        """`Request.checkpoints` of a prompt, so that its anchor's image can be taken.

        None where rings are wide enough to give it later, or an image is in the way.
        """
        at = self.anchor(length)
        inside = any(image.start < at < image.end for image in images)
        return () if at == 0 or inside or length - at <= self.slack else (at,)

    def match(self, request: Request) -> Hit | None:
        """See `PrefixSource.match`."""
        size = self.block_tokens
        keys = self._chain(request, request.length // size)
        keys = keys[: next((i for i, key in enumerate(keys) if key not in self.blocks), None)]
        cached, length = np.int64(len(keys) * size), np.int64(request.length)
        end = int(hit_lengths(length, cached, False, size, self.reserve)[0])
        if end == 0:
            return None
        keys = keys[: end // size]
        self._touch(keys)
        start = int(hit_lengths(length, cached, keys[-1] in self.images, size, self.reserve)[1])
        starts, ends = (np.array([getattr(i, n) for i in request.images]) for n in ("start", "end"))
        start = int(outside_image(np.int64(start), starts, ends, size))
        image = None
        if start and keys[start // size - 1] in self.images:
            self.images.move_to_end(keys[start // size - 1])
            image = self.images[keys[start // size - 1]]
        return Hit(
            block_hit=end,
            compute_hit=start,
            swa_valid_start=0 if image is not None else start,
            store_from=end,
            blocks=tuple(self.blocks[key].number for key in keys),
            image=image,
        )

    def publish(self, request: Request, count: int) -> None:
        """See `PrefixSource.publish`; takes images where the rings still hold a whole window."""
        keys, parent = self._chain(request, count), b""
        for key, number in zip(keys, request.blocks, strict=False):
            if key not in self.blocks:
                self.pool.pin((number,))
                self.blocks[key] = _Block(number, parent)
                if parent:
                    self.blocks[parent].successors.add(key)
            parent = key
        self._touch(keys)
        for position in {count * self.block_tokens, self.anchor(request.prompt_length)}:
            if 0 < position <= count * self.block_tokens:
                self._keep_image(request, position, keys[position // self.block_tokens - 1])

    def reclaim(self, count: int) -> None:
        """See `PrefixSource.reclaim`."""
        for key in tuple(self.blocks):
            if count <= 0:
                break
            if key in self.blocks and self.pool.references(self.blocks[key].number) == 1:
                count -= self._drop(key)

    def held(self) -> Iterable[int]:
        """See `PrefixSource.held`."""
        return tuple(block.number for block in self.blocks.values())

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    def _drop(self, key: bytes) -> int:
        """Forget a block and its successors; how many of them are free now."""
        before, pending = self.pool.free_count, [key]
        if parent := self.blocks[key].parent:
            self.blocks[parent].successors.discard(key)
        while pending:
            gone = pending.pop()
            block = self.blocks.pop(gone)
            self.images.pop(gone, None)
            self.pool.free((block.number,))
            pending.extend(block.successors)
        return self.pool.free_count - before

    def _chain(self, request: Request, count: int) -> list[bytes]:
        """Keys of the request's first `count` blocks; each block is hashed once."""
        known = self._chains.setdefault(request, [])
        if count > len(known):
            start, size = len(known) * self.block_tokens, self.block_tokens
            tokens = request.tokens[start : count * size]
            images = [Image(i.start - start, i.end - start, i.digest) for i in request.images]
            parent = known[-1] if known else b""
            known += chain(tokens, self.extra_keys, size, parent, images)
        return known[:count]

    def _keep_image(self, request: Request, position: int, key: bytes) -> None:
        """Take an image as of `position`, unless rows ahead of it may have destroyed its window.

        Rings may be written as far as the steps in flight reach, or the drafts that the newest
        committed step rejected.
        """
        rejected = self.nextn if request.output_length else 0
        end = request.proc + max(request.inflight, rejected)
        if key in self.images or end - position > self.slack or not self.most_images:
            return
        self.images[key] = self.snapshot(request.slot, position)
        if len(self.images) > self.most_images:
            self.images.popitem(last=False)
