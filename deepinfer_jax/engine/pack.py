"""From a plan to arrays of few shapes, so that steps are compiled once per bucket.

Rows that fill a bucket have slot 0, draft slot 0 and block 0, which belong to nobody, and count 0.
All arrays are made anew for each step: the device may still read those of the step before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import EngineConfig, ModelConfig
from deepinfer_jax.engine import sampling
from deepinfer_jax.engine.answer import answer_of
from deepinfer_jax.engine.grammar import Constraint, batch_masks
from deepinfer_jax.engine.picture_rows import PictureRows
from deepinfer_jax.engine.plan import PlanRow, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling import PackedSampling
from deepinfer_jax.engine.sampling_params import SamplingLimits
from deepinfer_jax.layout import blocks_needed
from deepinfer_jax.rules import require

Array = Any


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Shapes that steps are padded to, ascending. Each combination is a program of its own."""

    sequences: tuple[int, ...]  # rows of a decode step
    prompt: tuple[int, ...]  # tokens of a prompt's chunk
    blocks: tuple[int, ...]  # width of block tables
    prompts: int = 1  # chunks computed side by side; a prompt step runs as many such groups
    widths: tuple[int, ...] = ()  # query rows of a request in a decode step, for verification
    # "confidence"; (): all its drafts and one more
    flight_rows: int = 0  # of a flight, where it must hold larger steps; 0: as many as these need

    def __post_init__(self) -> None:
        for name in ("sequences", "prompt", "blocks", "widths"):
            sizes = getattr(self, name) or (1,) * (name == "widths")
            require(
                bool(sizes) and sizes[0] > 0 and sizes == tuple(sorted(set(sizes))),
                f"buckets of {name} are {sizes}; give ascending positive sizes",
            )
        require(self.prompts > 0, f"prompts is {self.prompts}; give at least 1")

    @classmethod
    def of(cls, config: EngineConfig, step: int = 4) -> Buckets:
        """The largest shapes the engine can need, and each smaller one by `step`."""
        longest = min(config.batched_tokens, config.max_model_len)
        return cls(
            sequences=_geometric(config.max_num_seqs, 4, step),
            prompt=_geometric(longest, 64, step),
            blocks=(blocks_needed(config.runtime_max_len, config.cache),),
            widths=_geometric(config.step_rows, 1, 2) if config.verification != "fixed" else (),
        )

    def check(self, config: EngineConfig) -> None:
        """Whether every step of an engine finds its bucket.

        Raises:
          ValueError: the first kind of bucket that ends too early.
        """
        longest = min(config.batched_tokens, config.max_model_len)
        needed = {
            "sequences": config.max_num_seqs,
            "prompt": longest,
            "blocks": blocks_needed(config.runtime_max_len, config.cache),
            "widths": config.step_rows,
        }
        for name, least in needed.items():
            most = (getattr(self, name) or (least,))[-1]
            require(
                most >= least,
                f"buckets of {name} end at {most}; this engine may need {least}, so add that size",
            )

    def narrowed(self, plans: Sequence[StepPlan]) -> Buckets:
        """The one bucket of each kind that holds the steps of all ranks, which share a program."""
        rows = [row for plan in plans for row in plan.rows]
        return dataclasses.replace(
            self,
            sequences=(bucket(self.sequences, max(len(plan.rows) for plan in plans)),),
            prompt=(bucket(self.prompt, min(self.prompt[-1], max(row.q for row in rows))),),
            blocks=(bucket(self.blocks, max(len(row.blocks) for row in rows)),),
            flight_rows=self.rows,
        )

    @property
    def rows(self) -> int:
        """Rows of a flight that hold any step."""
        return self.flight_rows or -(-self.sequences[-1] // self.prompts) * self.prompts


def _geometric(most: int, least: int, step: int) -> tuple[int, ...]:
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(least, -(-sizes[-1] // step)))
    return tuple(reversed(sizes))


def bucket(sizes: tuple[int, ...], count: int) -> int:
    """The smallest size that holds `count`."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} exceeds the largest bucket of {sizes}; add one for it")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rowwise:
    """What prompt and decode steps share; S sequences, P blocks, L ids before a row."""

    start: Array  # int32 [S] position of row 0; remapped: the host's upper bound
    count: Array  # int32 [S] query rows; 0: padding
    lookback: Array  # int32 [S, L] ids before row 0, negative for none
    slots: Array  # int32 [S]
    tables: Array  # int32 [S, P]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Chunks of some prompts."""

    rows: Rowwise
    tokens: Array  # int32 [S, Q]
    at: Array  # int32 [] row of the flight where these begin
    last: Array  # bool [S] the chunk is its prompt's last
    window_start: Array  # int32 [S], this and the next two as in `model.rows.Rows`
    global_start: Array  # int32 [S]
    kept_start: Array  # int32 [S]
    pictures: PictureRows | None = None  # None: text only


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "tokens", "remap", "read_slots", "drafts"],
    meta_fields=["width"],
)
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """One token, and drafts that the device knows, of each sequence."""

    rows: Rowwise
    tokens: Array  # int32 [S] of row 0; ignored if remapped
    remap: Array  # int32 [S] row in the flight before; the flight's size for none
    read_slots: Array  # int32 [S] draft slots of the proposals to verify; 0: none
    drafts: Array | None  # int32 [] verified in all, likeliest first; None: all of each row
    width: int  # query rows of a sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleBatch:
    """What sampling needs of the host besides the state. Exact: the step before is committed."""

    live: Array  # bool [S] rows that sample
    slots: Array  # int32 [S]
    read_slots: Array  # int32 [S] draft slots of the proposals verified here; 0: none
    draft_slots: Array  # int32 [S] where the new ones go
    packed: PackedSampling
    forced: Array  # int32 [S, width], `verify.verify`; a step's width is this one's
    processed: Array  # bool [S] report the processed distribution
    report: Array  # bool [] somebody wants log-probabilities
    mask: Array | None = None  # `RowContext.mask`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftBatch:
    """Sequences that need proposals before their first decode step here."""

    tokens: Array  # int32 [S] the newest token of each
    position: Array  # int32 [S] where it stands
    slots: Array  # int32 [S]
    draft_slots: Array  # int32 [S]
    packed: PackedSampling


def pack_prompt(
    rows: Sequence[PlanRow],
    at: int,
    model: ModelConfig,
    config: EngineConfig,
    buckets: Buckets,
    reach: int,
) -> PromptBatch:
    """At most `buckets.prompts` chunks, the first of them in row `at` of the flight."""
    count = buckets.prompts
    cache = config.cache
    width = bucket(buckets.prompt, max((row.q for row in rows), default=0))
    kept = [r.total - cache.keep if cache.truncation != "off" else 0 for r in rows]
    tokens = np.zeros((count, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : row.q] = row.tokens
    return PromptBatch(
        rows=_rowwise(rows, count, buckets, reach),
        tokens=tokens,
        at=np.int32(at),
        last=column([row.last_chunk for row in rows], count).astype(bool),
        window_start=column([row.swa_valid_start for row in rows], count),
        global_start=column([row.store_from for row in rows], count),
        kept_start=column([max(0, k) for k in kept], count),
    )


def pack_decode(
    rows: Sequence[PlanRow], buckets: Buckets, reach: int, width: int, drafts: int | None = None
) -> DecodeBatch:
    """All rows of a decode step, of at most `width` query rows each; `drafts` as in `StepPlan`."""
    count = bucket(buckets.sequences, len(rows))
    none = buckets.rows
    remap = [none if row.remap is None else row.remap for row in rows]
    return DecodeBatch(
        rows=_rowwise(rows, count, buckets, reach),
        tokens=column([row.tokens[0] if row.tokens else 0 for row in rows], count),
        remap=column(remap, count, none),
        read_slots=column([row.read_slot for row in rows], count),
        drafts=None if drafts is None else np.int32(drafts),
        width=width,
    )


def pack_drafts(rows: Sequence[PlanRow], packed: PackedSampling) -> DraftBatch:
    """Rows of a decode step that were handed over, padded to the sequences of `packed`."""
    count = len(packed.temperature)
    return DraftBatch(
        tokens=column([row.tokens[0] for row in rows], count),
        position=column([row.start for row in rows], count),
        slots=column([row.slot for row in rows], count),
        draft_slots=column([row.draft_slot for row in rows], count),
        packed=packed,
    )


def _rowwise(rows: Sequence[PlanRow], count: int, buckets: Buckets, reach: int) -> Rowwise:
    width = bucket(buckets.blocks, max((len(row.blocks) for row in rows), default=0))
    tables = np.zeros((count, width), np.int32)
    lookback = np.full((count, reach), -1, np.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row.blocks)] = row.blocks
        if row.lookback:
            lookback[i, reach - len(row.lookback) :] = row.lookback
    return Rowwise(
        start=column([row.start for row in rows], count),
        count=column([row.q for row in rows], count),
        lookback=lookback,
        slots=column([row.slot for row in rows], count),
        tables=tables,
    )


def column(values: Sequence[int], count: int, fill: int = 0) -> np.ndarray:
    """int32 [count], the values first."""
    out = np.full(count, fill, np.int32)
    out[: len(values)] = values
    return out


def pack_sample(
    rows: Sequence[PlanRow],
    requests: Sequence[Request],
    packed: PackedSampling,
    width: int,
    mask: np.ndarray | None,
) -> SampleBatch:
    """All rows of a step, padded to the sequences of `packed`; `width` query rows a sequence."""
    count = len(packed.temperature)
    answers = [answer_of(r) for r in requests]
    forced = np.full((count, width), -1, np.int32)
    for i, (answer, request) in enumerate(zip(answers, requests, strict=True)):
        if answer.params.forced_tokens:
            forced[i] = answer.forced(request.output_length, width)
    return SampleBatch(
        live=column([row.last_chunk for row in rows], count).astype(bool),
        slots=column([row.slot for row in rows], count),
        read_slots=column([row.read_slot for row in rows], count),
        draft_slots=column([row.draft_slot for row in rows], count),
        packed=packed,
        forced=forced,
        processed=column([a.params.processed_logprobs for a in answers], count).astype(bool),
        report=np.bool_(any(a.params.logprobs is not None for a in answers)),
        mask=mask,
    )


def pack_params(
    requests: Sequence[Request], count: int, model: ModelConfig, limits: SamplingLimits
) -> PackedSampling:
    """What the requests wish of sampling, padded to `count` sequences."""
    answers = [answer_of(r) for r in requests]
    return sampling.pack(
        [a.params for a in answers],
        [a.seed for a in answers],
        [r.prompt_length for r in requests],
        sequences=count,
        vocab_size=model.vocab_size,
        eos_id=model.eos_token_id,
        limits=limits,
    )


def pack_masks(
    rows: Sequence[PlanRow], requests: Sequence[Request], count: int, nextn: int, vocabulary: int
) -> np.ndarray | None:
    """Grammar masks along the first `nextn` drafts, int32; None without a grammar."""
    if all(r.grammar is None for r in requests):
        return None
    drafts = np.full((count, nextn), vocabulary, np.int32)
    constraints: list[Constraint | None] = [None] * count
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        if row.read_slot and request.drafts:
            drafts[i] = request.drafts[:nextn]
        if row.last_chunk and not request.status.finished:
            constraints[i] = request.grammar
    return batch_masks(constraints, drafts, vocabulary)
