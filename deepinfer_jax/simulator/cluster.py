"""The cluster a simulation runs on: one frozen description in exact integer units.

Ticks are nanoseconds, work is femtoseconds (see `cost.steps`). What each number does is defined in
`SEMANTICS.md` beside this file; the section is named at each field.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from deepinfer_jax.cost.steps import StepCost

FOREVER = 2**62
"""Stands for no limit, in ticks, femtoseconds, tokens, blocks and bytes."""


class Mode(enum.IntEnum):
    """What an engine does (section 2)."""

    PROMPT = 0
    COMPLETION = 1
    NORMAL = 2
    MIXED = 3


class Status(enum.IntEnum):
    """How a request ended (section 9)."""

    COMPLETED = 0
    TOO_LONG = 1
    DOES_NOT_FIT = 2
    STUCK = 3
    CRASHED = 4


class Incident(enum.IntEnum):
    """What may happen to a part of the service, and what its index counts (section 11)."""

    GPU = 0  # ranks of all engines, engine * ranks + rank
    HOST = 1  # engines
    STORAGE = 2  # storage nodes
    DEPART = 3  # engines: a planned departure


FRAGMENTS, NEEDED = 12, 10
"""Fragments of a stored block, and how many of them a read needs."""

CACHE_SCOPES = ("none", "shared", "local")
LINKS = ("unlimited", "fifo")
ANCHORS = ("prompt_end", "every_chunk", "output_end")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """How the engines of one mode follow demand (section 11); counts of engines."""

    initial: int
    maximum: int
    capacity: int  # demand of one engine: new prompt tokens per round, or requests
    minimum: int = 1
    spare: int = 0
    step_up: int = 1  # per round
    step_down: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Everything about the service except its requests. `M` engines of `ranks` DP ranks each."""

    # Engines (section 2)
    modes: tuple[Mode, ...]  # [M]
    ranks: int = 1
    slots: int = 256  # running requests per rank
    kv_blocks: int | None = None  # KV blocks per rank; None compiles the limit out
    block_tokens: int = 128
    max_input_tokens: int = FOREVER
    cost: StepCost

    # Matching and the prefix cache (sections 3 and 4)
    match_ticks: int = 0
    cache_scope: str = "none"
    cache_blocks: int = FOREVER  # of the shared store, or of each engine
    reserve: int = 134
    write_back_ticks: int = 0
    publish_output: bool = False
    swa: bool = False
    swa_ttl_ticks: int = FOREVER
    swa_anchors: str = "prompt_end"
    warm_requests: tuple[int, ...] = ()  # prompts whose blocks are present before time zero
    warm_engine: int = 0  # the engine that holds them where caches are local

    # Retention (section 13)
    retention_sweep_ticks: int = FOREVER  # FOREVER: nothing ever sweeps
    retention_ttl_ticks: tuple[int, ...] = ()  # by traffic class; () lets all live for ever
    retention_high_blocks: int = FOREVER  # of one cache: a sweep that finds more frees down to low
    retention_low_blocks: int = FOREVER
    retention_precedence: str = "age_first"

    # Prefill routing (section 5)
    prefill_policy: str = "pull"
    tier_edges: tuple[int, ...] = ()  # tokens, lower edge inclusive; T = len + 1
    tier_engines: tuple[int, ...] = ()  # engines per tier at time zero; () deals them evenly
    tier_quota: tuple[int, ...] = (FOREVER,)  # [T] cap in predicted ticks
    tier_round_ticks: int = FOREVER

    # Fetch (section 5)
    fetch_link: str = "unlimited"
    fetch_ticks: int = 0
    fetch_femtoseconds_per_byte: int = 0
    swa_femtoseconds_per_byte: int = 0
    block_bytes: int = 0
    swa_bytes: int = 0

    # Storage reads (section 15)
    storage_read_ticks: int = 0  # mean access time of a node, exponential
    storage_femtoseconds_per_byte: int = 0  # of a node's link
    storage_asked: int = 11  # holders of a stripe that a read asks

    # Prefill steps (section 6)
    step_quota: int = FOREVER  # femtoseconds
    batch_tokens: int = FOREVER  # tokens per rank and step; MIXED counts decode rows too
    batch_requests: int = FOREVER
    chunk_multiple: int = (
        128  # chunks that do not finish a prompt are multiples of this; FOREVER: never cut
    )

    # Hand-off and decode (sections 7 and 8)
    decode_policy: str = "two_load"
    handoff_link: str = "unlimited"
    handoff_ticks: int = 0
    handoff_femtoseconds_per_byte: int = 0
    live_bytes: int = 0
    nextn: int = 0
    acceptance: tuple[float, ...] = ()  # [nextn] conditional acceptance per position
    prompt_interval: int = 70  # NORMAL: all ranks must want a prompt step
    prompt_any_interval: int = 100  # NORMAL: one rank is enough
    prompt_usage_limit: tuple[int, int] = (9, 10)  # NORMAL: no prompt above this share of KV blocks

    # Dynamics (section 11)
    incidents: tuple[tuple[int, int, int], ...] = ()  # (tick, Incident, index), ticks ascending
    restart_ticks: int = 0
    repair_ticks: int = FOREVER  # a failed GPU serves from the next start of its engine after this
    retry_limit: int = 3
    storage_nodes: int = 0  # 0: the shared store does not fail
    stripe_blocks: int = 1  # blocks that are coded together
    storage_repair_ticks: int = FOREVER
    scale_round_ticks: int = FOREVER
    scale_prompt: Pool | None = None
    scale_decode: Pool | None = None
    hold_above: float = 0.8  # no pool shrinks above this utilisation
    start_ticks: int = 0
    grace_ticks: int = 60 * 10**9

    token_times: bool = False  # records what `tokens.token_times` needs (section 10)
    seed: int = 0
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)  # PolicyParameters by name

    @property
    def engines(self) -> int:
        return len(self.modes)

    @property
    def crashes(self) -> bool:
        """Whether engines may crash."""
        return any(kind in (Incident.GPU, Incident.HOST) for _, kind, _ in self.incidents)

    @property
    def scaling(self) -> bool:
        return self.scale_prompt is not None or self.scale_decode is not None

    @property
    def departures(self) -> bool:
        """Whether engines may leave as planned."""
        return self.scaling or any(kind == Incident.DEPART for _, kind, _ in self.incidents)

    @property
    def serving_at_first(self) -> tuple[bool, ...]:
        """[M]: engines that serve at time zero."""
        pools = {Mode.PROMPT: self.scale_prompt, Mode.COMPLETION: self.scale_decode}
        return tuple(
            (pool := pools.get(mode)) is None or self.modes[:m].count(mode) < pool.initial
            for m, mode in enumerate(self.modes)
        )

    @property
    def retention(self) -> bool:
        """Whether a garbage collector sweeps the caches."""
        return self.retention_sweep_ticks < FOREVER

    @property
    def storage_reads(self) -> bool:
        """Whether fetches wait for storage nodes."""
        takes_time = self.storage_read_ticks + self.storage_femtoseconds_per_byte > 0
        stored = self.cache_scope == "shared" and self.storage_nodes > 0
        return stored and self.block_bytes > 0 and takes_time

    @property
    def tiers(self) -> int:
        return len(self.tier_edges) + 1
