"""From a prompt engine to a completion engine of the same process: state image and blocks move.

A request waits in HANDOVER on the prompt engine, its storage whole, until the completion engine has
storage for it. Then one image and the blocks that hold its computed tokens are copied, and the
prompt engine's storage is free again. An end of the request on either side ends it on the other.
Source: the chapter, sections 11.1 and 11.3.
"""

from __future__ import annotations

import jax
import numpy as np

from deepinfer_jax.cache import snapshots
from deepinfer_jax.cache.blocks import copy_blocks, nowhere
from deepinfer_jax.cache.paged import PagedMemory
from deepinfer_jax.config import ModelConfig, Role
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.layout import block_layout, blocks_needed, state_layout
from deepinfer_jax.rules import require


class HandOff:
    """Two schedulers, and the requests that the first has computed and the second not yet taken."""

    def __init__(
        self, model: ModelConfig, prompt: Scheduler, completion: Scheduler, width: int = 16
    ) -> None:
        """Nothing is on its way.

        Args:
          width: blocks copied by one call of the device; a request may need several.

        Raises:
          ValueError: engines of other roles, or whose images or blocks differ.
        """
        roles = prompt.config.role, completion.config.role
        require(
            roles[0] == Role.PROMPT and roles[1] != Role.PROMPT,
            f"a hand-over from role {roles[0]!r} to {roles[1]!r}; it goes from a prompt engine to "
            "one that completes",
        )
        caches = prompt.config.cache, completion.config.cache
        images = [state_layout(model, cache).image for cache in caches]
        blocks = [block_layout(model, cache) for cache in caches]
        require(
            images[0] == images[1] and blocks[0] == blocks[1],
            f"images have {images[0].ring_rows} and {images[1].ring_rows} ring rows, blocks "
            f"{caches[0].block_tokens} and {caches[1].block_tokens} tokens; give both engines the "
            "same ring_slack and block_tokens (wide rings may differ)",
        )
        self.prompt, self.completion, self.width = prompt, completion, width
        self.waiting: dict[int, Request] = {}  # by id; they hold storage on the prompt engine
        self._state = jax.jit(_move_state, donate_argnums=0)
        self._blocks = jax.jit(copy_blocks, donate_argnums=0)

    def move(
        self, source: PagedMemory, target: PagedMemory
    ) -> tuple[PagedMemory, tuple[Request, ...]]:
        """Pass on what can be; (the target's memory, requests that may decode there from now on).

        Called between two plans of the completion engine, with the newest memory of both. `target`
        is donated.
        """
        self._offer()
        self._reconcile()
        taken = [r for r in self.completion.take_in() if r.request_id in self.waiting]
        for request in taken:
            old = self.waiting.pop(request.request_id)
            target = self._copy(source, target, old, request)
            self.prompt.handed_over(request.request_id)
        return target, tuple(taken)

    def rehearse(self, source: PagedMemory, target: PagedMemory) -> PagedMemory:
        """Compile the two copies, nobody's state and no block being copied; `target` is donated."""
        target = self._state(target, source, *np.zeros(3, np.int32))
        ids = np.zeros((2, self.width), np.int32)
        ids[0] = nowhere(target)
        return self._blocks(target, source, *ids)

    def _offer(self) -> None:
        """What the prompt engine has finished is known to the completion engine."""
        for request in self.prompt.roster.handover:
            if request.request_id not in self.waiting:
                self.completion.add(continued(request))
                self.waiting[request.request_id] = request

    def _reconcile(self) -> None:
        """Aborts on one side reach the other."""
        for number, request in list(self.waiting.items()):
            there = self.completion.roster.requests.get(number)
            if request.status != Status.HANDOVER:
                self.completion.abort(number, request.status)
            elif there is None or there.status.finished:
                self.prompt.handed_over(number)
            else:
                continue
            del self.waiting[number]

    def _copy(
        self, source: PagedMemory, target: PagedMemory, old: Request, new: Request
    ) -> PagedMemory:
        slots = np.array([new.slot, old.slot, old.proc], np.int32)
        target = self._state(target, source, *slots)
        count = blocks_needed(old.proc, self.prompt.config.cache)
        for at in range(0, count, self.width):
            last = min(at + self.width, count)
            ids = np.zeros((2, self.width), np.int32)
            ids[0] = nowhere(target)
            ids[:, : last - at] = new.blocks[at:last], old.blocks[at:last]
            target = self._blocks(target, source, *ids)
        return target


def continued(request: Request) -> Request:
    """The request as another engine takes it up: its prompt is computed, its first token known."""
    cut = request.prompt_length
    new = Request(
        request.request_id,
        request.tokens[:cut],
        request.tokens[cut:],
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
        stop_when=request.stop_when,
        images=request.images,
        pictures=request.pictures,
        sampling=request.sampling,
        grammar=request.grammar,
    )
    new.proc = request.proc
    return new


def _move_state(
    target: PagedMemory,
    source: PagedMemory,
    target_slot: jax.Array,
    source_slot: jax.Array,
    position: jax.Array,
) -> PagedMemory:
    image = snapshots.select(source, source_slot, position, "live")
    return snapshots.load(target, target_slot, image)
