"""What the host hands to a device step, and what comes back. Plain ints, frozen.

A plan names requests, lengths, tables and places; where one step is in flight, its lengths are
upper bounds, and the device corrects them (`engine.correction`). Positions are absolute token
positions; ids of blocks, slots and draft slots are those of `cache.allocator`, 0 standing for none.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from deepinfer_jax.engine.request import Hit
from deepinfer_jax.policy.prefix import Image


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One request's share of a step: q consecutive query rows. Lengths in tokens.

    Rows stand at positions k - q .. k - 1 and see k keys; if `remap` is given, k is an upper bound
    and the device's `device_k` of the previous step's acceptance replaces it. Rings are written at
    position % ring rows, the last ring-full of a chunk staying.
    """

    request_id: int
    q: int  # query rows; at most, where the device splits the step's drafts
    k: int  # key length, these rows included; host's upper bound
    tokens: tuple[int, ...]  # ids the host knows, from row 0 on: () if remapped; a fresh decode
    # row gives the last token and the drafts it knows, and placeholders fill the other draft rows
    lookback: tuple[int, ...]  # ids before row 0, oldest first, for n-grams; () if remapped
    blocks: tuple[int, ...]  # block table of positions 0 .. k - 1 at least
    slot: int  # state slot
    remap: int | None = None  # row of this request in the step in flight; None: nothing in flight
    draft_slot: int = 0  # where this step's new proposals go
    read_slot: int = 0  # where the proposals verified here are; 0: placeholders, point mass
    draft_first: bool = False  # they are to be made before the step: the request was handed over
    last_chunk: bool = True  # the sampled token counts; false for the earlier chunks of a prompt
    total: int = 0  # prompt rows: tokens of the whole prompt (the truncation rectangle ends there)
    first: bool = False  # prompt rows: nothing of this request is in its slot yet
    swa_valid_start: int = 0  # rings hold nothing before this position
    store_from: int = 0  # global rows of tokens before this position are not stored
    hit: Hit | None = None  # first prompt row of a request with a cached prefix: what to load
    images: tuple[Image, ...] = ()  # those that overlap these rows; never cut by a chunk's end

    @property
    def start(self) -> int:
        """Position of row 0 if k is exact, else an upper bound of it (the device's k0)."""
        return self.k - self.q

    @property
    def positions(self) -> range:
        """Positions of the rows, exact unless remapped."""
        return range(self.start, self.k)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step. Prompt and decode rows never share one; without rows it is a placeholder."""

    number: int  # counts the engine's steps from 0
    is_prompt: bool
    rows: tuple[PlanRow, ...]
    drafts: int | None = None  # verified in all, split by the device; None: q - 1 of each row
    finished: tuple[int, ...] = ()  # requests whose storage `release` of this plan gives back
    preempted: tuple[int, ...] = ()  # requests that lost their storage when this was planned
    news: tuple[RequestOutput, ...] = ()  # of them, those that ended (`stop_preempted`)

    @property
    def total_q(self) -> int:
        """Query rows of the step, always the host's decision."""
        if self.drafts is not None:
            return len(self.rows) + self.drafts
        return sum(row.q for row in self.rows)

    @cached_property
    def index(self) -> dict[int, int]:
        """Request id to row number."""
        return {row.request_id: i for i, row in enumerate(self.rows)}


@dataclasses.dataclass(frozen=True)
class RowOutcome:
    """What the device says of one row of a plan; chunks that are not the last may say nothing."""

    tokens: tuple[int, ...] = ()  # accepted drafts, then the sampled token
    drafts: tuple[int, ...] = ()  # new proposals
    confidences: tuple[float, ...] = ()  # one per proposal; () without a confidence head
    q: int = 0  # query rows as the device split them; 0: those of the plan
    details: Any = None  # passed through: log-probabilities and the like

    @property
    def accepted(self) -> int:
        """Drafts accepted, whether or not the request ended among them."""
        return len(self.tokens) - 1


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """A committed step's results, one per row of its plan, in the plan's order."""

    rows: tuple[RowOutcome, ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """News of one request: tokens that count, and why it ended if it did."""

    request_id: int
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    verified: int = 0  # drafts verified by the step
    accepted: int = 0  # of them, drafts accepted; `tokens` may hold fewer behind a stop
    details: Any = None
