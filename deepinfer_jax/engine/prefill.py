"""Prompts of a step: first come, first served, in chunks that a budget of rows and time allows.

The batch is a prefix of the queue: it ends at the first prompt that cannot go. The time of a chunk
is `cost.steps.StepCost`'s and its size `cost.quota.largest_chunk`'s, as in the simulator. Source:
the released DeepInfer 0.1.0 for the rules; the chapter, section 11.5, for the quota.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.cost.quota import largest_chunk
from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.engine.plan import PlanRow
from deepinfer_jax.engine.prefix import check_hit
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.engine.roster import Roster
from deepinfer_jax.policy.prefix import Image


@dataclasses.dataclass
class Budget:
    """What is left of a step. `time` in femtoseconds; None: unlimited."""

    tokens: int
    context: int
    seats: int
    rows: int
    time: int | None = None
    cost: StepCost | None = None

    @classmethod
    def of(cls, roster: Roster, cost: StepCost | None) -> Budget:
        """The whole budget of an engine's next step."""
        config = roster.config
        time = None
        if config.step_quota:
            assert cost is not None, "step_quota needs a StepCost"
            time = config.step_quota - int(cost.prefill_base)
        seats = config.max_num_seqs - len(roster.running)
        rows, context = config.max_num_seqs, config.max_prefill_context
        return cls(config.batched_tokens, context, seats, rows, time, cost)

    def most(self, remaining: int, start: int) -> int:
        """Rows of a prompt that fit, `remaining` of it being left behind `start` tokens."""
        space = min(remaining, self.tokens)
        if self.time is None:
            return space
        if self.time < 0:
            return 0
        return int(largest_chunk(self.cost, space, start, self.time))  # type: ignore[arg-type]

    def take(self, request: Request, start: int, end: int) -> None:
        """Subtract a chunk [start, end)."""
        self.tokens -= end - start
        self.context -= request.length
        self.rows -= 1
        self.seats -= end == request.length
        if self.time is not None and self.cost is not None:
            self.time -= int(self.cost.prefill_work(end - start, start))


def prompt_rows(roster: Roster, cost: StepCost | None, lookback: int) -> list[PlanRow]:
    """Rows of the next prompt step; storage is given to prompts that start.

    Args:
      cost: step times; needed if the configuration has a `step_quota`.
      lookback: ids before a row that n-grams reach back to.
    """
    budget = Budget.of(roster, cost)
    rows: list[PlanRow] = []
    for request in tuple(roster.waiting):
        row = _row(roster, request, budget, first=not rows, lookback=lookback)
        if row is None:
            break
        rows.append(row)
        budget.take(request, row.start, row.k)
        if not row.last_chunk and roster.config.role != Role.PROMPT:
            break
    return rows


def _row(
    roster: Roster, request: Request, budget: Budget, first: bool, lookback: int
) -> PlanRow | None:
    """The next chunk of the request if it can go; otherwise nothing has changed."""
    fits = budget.seats > 0 and budget.rows > 0 and budget.context >= request.length
    if not (request.schedulable and fits):
        return None
    hit = request.hit
    start = request.proc
    if begins := not request.has_storage:
        hit = _match(roster, request)
        start = hit.compute_hit if hit else 0
    end = chunk_end(request, start, budget, roster.config, first)
    if end == start or (begins and not roster.admit(request, hit)):
        return None
    last = end == request.length
    if last:
        roster.storage.seat(request)
    return PlanRow(
        request_id=request.request_id,
        q=end - start,
        k=end,
        tokens=tuple(request.tokens[start:end]),
        lookback=tuple(request.tokens[max(0, start - lookback) : start]),
        blocks=request.blocks,
        slot=request.slot,
        draft_slot=request.draft_slot,
        last_chunk=last,
        total=request.length,
        first=begins,
        swa_valid_start=hit.swa_valid_start if hit else 0,
        store_from=hit.store_from if hit else 0,
        hit=hit if begins else None,
        images=tuple(i for i in request.images if i.start < end and start < i.end),
    )


def _match(roster: Roster, request: Request) -> Hit | None:
    """The cached prefix of a prompt about to start; asked again after a preemption."""
    hit = roster.source.match(request) if roster.source else None
    if hit is not None:
        check_hit(hit, request, roster.config.cache.block_tokens)
    return hit


def chunk_end(
    request: Request, start: int, budget: Budget, config: EngineConfig, first: bool
) -> int:
    """Where the chunk that starts at `start` ends; `start` itself if none fits.

    The first of a step takes a least chunk whatever the time, or a prompt would wait for ever. A
    checkpoint is never passed; an image is never cut, see `uncut`.
    """
    remaining = request.length - start
    q = budget.most(remaining, start)
    if not config.chunked_prefill:
        whole = q == remaining or (first and budget.tokens >= remaining)
        return request.length if whole else start
    if q < remaining:
        q = q // config.chunk_multiple * config.chunk_multiple
        if q < config.least_chunk:
            q = min(remaining, config.least_chunk) if first else 0
    end = min([start + q, *(c for c in request.checkpoints if c > start)])
    limit = start + (budget.tokens if first else q)
    return uncut(request.images, start, end, limit)


def uncut(images: tuple[Image, ...], start: int, end: int, limit: int) -> int:
    """`end`, moved out of the image it cuts: behind it if that is within `limit`, else before it.

    A chunk [start, end) may so become empty: end = start.
    """
    for image in images:
        if image.start < end < image.end:
            return image.end if image.end <= limit else max(start, image.start)
    return end
