"""A request on the host: its tokens, three lengths, its storage, and where it stands.

Lengths in tokens: `length`, what is known (prompt and committed output); `proc`, positions whose
rows are in the cache for good; `inflight`, an upper bound of query rows that were launched and are
not committed. A decoding request at rest has proc = length - 1: its last token is no input yet.
Source: the chapter, sections 11.1 and 11.8.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.policy.prefix import Image


class Status(enum.StrEnum):
    """Where a request stands; the value of a finished one is its finish reason."""

    WAITING = "waiting"  # for its prompt, or the rest of it, to be computed
    PREFILLED = "prefilled"  # computed by another engine; waits for a seat here
    RUNNING = "running"  # decodes
    HANDOVER = "handover"  # computed here (prompt engine); its storage is being read out
    STOPPED = "stop"
    LENGTH_CAPPED = "length"
    ABORTED = "abort"
    PREEMPTED = "insufficient_system_resource"
    GRAMMAR_FAILED = "grammar_error"
    IMAGE_FAILED = "image_error"

    @property
    def finished(self) -> bool:
        """No further token will come."""
        return self not in (Status.WAITING, Status.PREFILLED, Status.RUNNING, Status.HANDOVER)


@dataclasses.dataclass(frozen=True)
class Hit:
    """A cached prefix: what of a prompt need not be computed. Lengths in tokens.

    The engine reuses the global rows of `block_hit` tokens and computes from `compute_hit` on. Where
    that is less, encoder layers refill their rings (encoder replay): rings hold nothing before
    `swa_valid_start`, and global rows of tokens before `store_from` are there and stay as they are.
    Source: the chapter, section 11.4.
    """

    block_hit: int  # a multiple of block_tokens
    compute_hit: int
    swa_valid_start: int = 0
    store_from: int = 0
    blocks: tuple[int, ...] = ()  # ids of the blocks that hold block_hit tokens, one by one
    image: Any = None  # state as of compute_hit, to be loaded into the slot; None: nothing to load


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence. What the caller gives comes first; the rest belongs to the scheduler.

    `request_id` is unique among the requests an engine has not released. `proc` is given only with
    a request that another engine prefilled (length - 1).
    """

    request_id: int
    prompt: Sequence[int]  # token ids
    output: Sequence[int] = ()  # token ids produced elsewhere, the first one at least
    max_tokens: int = 16  # of output
    stop_ids: frozenset[int] = frozenset()  # end of sequence among them, unless to be ignored
    stop_when: Callable[[Request], bool] | None = None  # after each token: stop strings
    images: tuple[Image, ...] = ()  # runs of placeholder tokens, ascending
    pictures: Sequence[Any] = ()  # what stands there, read by the device step only: one per image
    checkpoints: tuple[int, ...] = ()  # ascending positions at which a chunk must end
    schedulable: bool = True  # false while something outside (an image, a hand-over) is awaited
    sampling: Any = None  # read by the device step only
    grammar: Any = None  # state of structured output, advanced by its owner

    tokens: list[int] = dataclasses.field(init=False)
    prompt_length: int = dataclasses.field(init=False)
    status: Status = Status.WAITING
    proc: int = 0
    inflight: int = 0
    planned: int = 0  # decode or prompt steps that held this request
    committed: int = 0  # of those, how many were committed
    arrival: int = 0  # order of admission

    blocks: tuple[int, ...] = ()  # block table
    slot: int = 0  # state slot; 0: none
    draft_slot: int = 0  # where its proposals are kept; 0: none
    hit: Hit | None = None

    published: int = 0  # leading blocks that the prefix source was told of
    drafts: tuple[int, ...] = ()  # proposed ids, as the host knows them; () after a prompt
    has_proposals: bool = False  # draft_slot holds proposals that no step has read
    rates: tuple[float, ...] = ()  # running products of the newest confidences
    previous_rates: tuple[float, ...] = ()  # and of those one step older
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.output]
        self.prompt_length = len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens known: prompt and committed output."""
        return len(self.tokens)

    @property
    def output_length(self) -> int:
        """Tokens committed behind the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def outstanding(self) -> int:
        """Steps that hold this request and are not committed."""
        return self.planned - self.committed

    @property
    def has_storage(self) -> bool:
        """Whether it owns blocks and a slot."""
        return self.slot != 0

    def forget_drafts(self) -> None:
        """No proposals: the next decode step verifies placeholders."""
        self.drafts, self.rates, self.previous_rates = (), (), ()
        self.has_proposals = False

    def check(self, config: EngineConfig) -> None:
        """Invariants between two calls of the scheduler; AssertionError names the request."""
        name = f"request {self.request_id} ({self.status})"
        assert 0 <= self.outstanding <= 2, f"{name} is in {self.outstanding} steps"  # I3
        assert (self.inflight > 0) == (self.outstanding > 0), f"{name}: {self.inflight} in flight"
        assert 0 <= self.proc <= self.length, f"{name}: proc {self.proc} of {self.length}"  # I1
        assert bool(self.blocks) == self.has_storage, f"{name}: blocks without a slot, or reverse"
        covered = len(self.blocks) * config.cache.block_tokens
        assert self.proc + self.inflight <= covered or not self.has_storage, (
            f"{name}: {self.proc} + {self.inflight} rows in {covered} tokens of blocks"
        )
        if self.status.finished:
            assert not self.draft_slot, f"{name} keeps draft slot {self.draft_slot}"
            return
        assert self.length <= config.max_model_len, f"{name}: {self.length} tokens"
        if self.status == Status.RUNNING:
            assert self.proc == self.length - 1, f"{name}: proc {self.proc} of {self.length}"
            assert self.has_storage, f"{name} has no storage"
            seated = config.cache.nextn > 0
            assert bool(self.draft_slot) == seated, f"{name} has draft slot {self.draft_slot}"
        elif self.status != Status.WAITING:  # the last chunk of a prompt takes its seat early
            assert not self.draft_slot, f"{name} keeps draft slot {self.draft_slot}"
