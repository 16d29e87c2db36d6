"""What requests own of the device's memory: blocks, a state slot, a place for proposals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from deepinfer_jax.cache.allocator import BlockPool, SlotPool
from deepinfer_jax.config import EngineConfig
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.layout import blocks_needed


class Storage:
    """The three pools of one engine and the moves between them and a request."""

    def __init__(self, config: EngineConfig, reclaim: Callable[[int], None] | None = None) -> None:
        """Empty pools of the configured sizes; `reclaim` as in `prefix.PrefixSource`."""
        self.config = config
        self.blocks = BlockPool(config.num_blocks)
        self.slots = SlotPool(config.num_slots)
        self.draft_slots = SlotPool(config.max_num_seqs + 1, "draft slot")
        self._reclaim = reclaim

    def crowded(self) -> bool:
        """Whether the block pool, the reserved block counted as used, admits no more prompts.

        Cached blocks that no request uses make way first.
        """
        allowed = self.config.prefill_usage_percent * self.blocks.size // 100
        return not self.room(self.blocks.size - allowed)

    def room(self, count: int) -> bool:
        """Whether `count` blocks are free, once a prefix cache has let go of what it must."""
        short = count - self.blocks.free_count
        if short > 0 and self._reclaim is not None:
            self._reclaim(short)
        return self.blocks.free_count >= count

    def admit(self, request: Request, hit: Hit | None = None) -> bool:
        """Blocks for all tokens known and a slot, or nothing at all.

        The blocks of a hit are shared: they come first in the table and get one more owner. They
        get it before room is made, lest the cache let go of them.
        """
        shared = hit.blocks if hit else ()
        count = blocks_needed(request.length, self.config.cache) - len(shared)
        if self.slots.free_count == 0:
            return False
        self.blocks.pin(shared)
        if not self.room(count):
            self.blocks.free(shared)
            return False
        slot, fresh = self.slots.allocate(), self.blocks.allocate(count)
        assert slot is not None and fresh is not None
        request.slot, request.blocks = slot, (*shared, *fresh)
        return True

    def missing(self, request: Request, bound: int) -> int:
        """Blocks that positions below `bound` need beyond the table; negative: surplus."""
        return blocks_needed(bound, self.config.cache) - len(request.blocks)

    def fit(self, request: Request, bound: int) -> bool:
        """Make the table exactly as long as `bound` positions need; False if blocks are short.

        A bound shrinks only after a step in flight was drained, so surplus blocks at the table's
        end hold nothing but rejected drafts.
        """
        count = self.missing(request, bound)
        if count < 0:
            self.blocks.free(request.blocks[count:])
            request.blocks = request.blocks[:count]
        elif count > 0:
            fresh = self.blocks.allocate(count) if self.room(count) else None
            if fresh is None:
                return False
            request.blocks += fresh
        return True

    def seat(self, request: Request) -> None:
        """A place for the request's proposals; there are as many as requests may decode."""
        if self.config.cache.nextn:
            slot = self.draft_slots.allocate()
            assert slot is not None, f"request {request.request_id} decodes without a seat"
            request.draft_slot = slot

    def unseat(self, request: Request) -> None:
        """Give the place for proposals back, if there is one."""
        if request.draft_slot:
            self.draft_slots.free(request.draft_slot)
            request.draft_slot = 0

    def release(self, request: Request) -> None:
        """Give everything back that the request owns."""
        self.unseat(request)
        if request.has_storage:
            self.blocks.free(request.blocks)
            self.slots.free(request.slot)
            request.blocks, request.slot = (), 0

    def check_integrity(self, requests: Iterable[Request], cached: Iterable[int] = ()) -> None:
        """The pools agree with the tables of all requests and the blocks a prefix cache holds."""
        for pool in (self.blocks, self.slots, self.draft_slots):
            pool.check_integrity()
        requests = list(requests)
        owners = Counter(block for request in requests for block in request.blocks)
        owners.update(cached)
        for block in range(1, self.blocks.size):
            expected, found = owners[block], self.blocks.references(block)
            assert expected == found, f"block {block} has {found} owners, {expected} tables"
        slots = sorted(r.slot for r in requests if r.slot)
        assert len(set(slots)) == len(slots) == self.slots.used_count, f"slots {slots}"
        seats = sorted(r.draft_slot for r in requests if r.draft_slot)
        assert len(set(seats)) == len(seats) == self.draft_slots.used_count, f"seats {seats}"
