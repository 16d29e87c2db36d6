"""The host noun `Trace`: who arrives when, how long, sharing which prefix; and its changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer_jax.cost.steps import TICKS_PER_SECOND

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
LARGEST_LENGTH = 2**31 - 1
"""Token counts are int32 in the simulator."""


class Rejection(NamedTuple):
    """A row that was left out on request (`on_invalid="reject"`)."""

    row: int  # 1-based line of the file, the header included
    field: str
    value: object
    rule: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Requests by (arrival, row). Letters: `Q` requests, `R` runs of block ids, `I` images.

    Prefix blocks are `block_tokens` tokens each and prefix-chained: two requests that hold the same
    id share everything up to and including that block. A chain is kept as runs of consecutive ids,
    because a session of a thousand blocks is then a handful of numbers: request `q` holds
    `run_first[r], run_first[r] + 1, ..., run_first[r] + run_count[r] - 1` for each run `r` in
    `run_offsets[q]:run_offsets[q + 1]`. The last id may cover a partial block.
    `input_tokens` counts the whole prompt, image tokens included.
    """

    source: str
    arrival: Int64  # [Q] nanoseconds
    input_tokens: Int64  # [Q]
    output_tokens: Int64  # [Q]
    row: Int64  # [Q] row of the source, counted from 0: the original index
    block_tokens: int  # 0 when the trace tells nothing about prefixes
    run_first: Int64  # [R]
    run_count: Int64  # [R]
    run_offsets: Int64  # [Q + 1]
    image_tokens: Int64  # [I]
    image_offsets: Int64  # [Q + 1]
    session: Int64 | None = None  # [Q] dense number, requests without a session have their own
    turn: Int64 | None = None  # [Q] position inside the session
    think_seconds: Float64 | None = (
        None  # [Q] from the previous answer to this arrival, NaN unknown
    )
    answer_seconds: Float64 | None = None  # [Q] how long the answer took where recorded, else NaN
    traffic: Int64 | None = None  # [Q] traffic class, for retention; all in class 0 without it
    rejected: tuple[Rejection, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def arrival_seconds(self) -> Float64:
        return self.arrival / TICKS_PER_SECOND

    @property
    def image_tokens_per_request(self) -> Int64:
        """Tokens of all images of each request, [Q]."""
        total = np.concatenate([[0], np.cumsum(self.image_tokens)])
        return np.diff(total[self.image_offsets])

    def blocks(self, request: int) -> Int64:
        """Block ids of one request, one per `block_tokens` tokens."""
        runs = slice(self.run_offsets[request], self.run_offsets[request + 1])
        pairs = zip(self.run_first[runs], self.run_count[runs], strict=True)
        return np.concatenate([np.zeros(0, np.int64), *(f + np.arange(n) for f, n in pairs)])


def offsets(counts: Iterable[int] | Int64) -> Int64:
    """Ragged offsets [Q + 1] of `counts` [Q]."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))]).astype(np.int64)


def plain(
    source: str, arrival: npt.ArrayLike, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike
) -> Trace:
    """A trace of arrivals (ticks) and lengths (tokens) alone, sorted by (arrival, index)."""
    ticks = np.asarray(arrival, np.int64)
    none, zeros = np.zeros(0, np.int64), np.zeros(len(ticks) + 1, np.int64)
    inputs, outputs = np.asarray(input_tokens, np.int64), np.asarray(output_tokens, np.int64)
    rows = np.arange(len(ticks), dtype=np.int64)
    trace = Trace(source, ticks, inputs, outputs, rows, 0, none, none, zeros, none, zeros)
    return in_arrival_order(trace)


def in_arrival_order(trace: Trace) -> Trace:
    """The same requests, sorted by arrival; ties keep their order."""
    if np.all(trace.arrival[1:] >= trace.arrival[:-1]):
        return trace
    return take(trace, np.argsort(trace.arrival, kind="stable"))


def _ragged_take(values: Int64, starts: Int64, which: npt.NDArray[np.intp]) -> tuple[Int64, Int64]:
    counts = np.diff(starts)[which]
    fresh = offsets(counts)
    index = np.arange(fresh[-1]) + np.repeat(starts[:-1][which] - fresh[:-1], counts)
    return values[index], fresh


def take(trace: Trace, which: npt.ArrayLike) -> Trace:
    """The requests `which` [K] (indices or a mask), in that order.

    Raises:
      ValueError: if nothing is left.
    """
    index = np.arange(len(trace))[np.asarray(which)]
    if not len(index):
        raise ValueError(
            f"{trace.source}: 0 of {len(trace)} requests selected, but a trace needs at least one; "
            "widen the selection"
        )
    first, run_offsets = _ragged_take(trace.run_first, trace.run_offsets, index)
    count, _ = _ragged_take(trace.run_count, trace.run_offsets, index)
    images, image_offsets = _ragged_take(trace.image_tokens, trace.image_offsets, index)
    return dataclasses.replace(
        trace,
        arrival=trace.arrival[index],
        input_tokens=trace.input_tokens[index],
        output_tokens=trace.output_tokens[index],
        row=trace.row[index],
        run_first=first,
        run_count=count,
        run_offsets=run_offsets,
        image_tokens=images,
        image_offsets=image_offsets,
        session=None if trace.session is None else trace.session[index],
        turn=None if trace.turn is None else trace.turn[index],
        think_seconds=None if trace.think_seconds is None else trace.think_seconds[index],
        answer_seconds=None if trace.answer_seconds is None else trace.answer_seconds[index],
        traffic=None if trace.traffic is None else trace.traffic[index],
    )


def head(trace: Trace, requests: int) -> Trace:
    """The first `requests` arrivals."""
    if requests < 1:
        raise ValueError(f"head({requests}): a trace needs at least one request; ask for 1 or more")
    return take(trace, np.arange(min(requests, len(trace))))


def window(trace: Trace, start_seconds: float, end_seconds: float) -> Trace:
    """The arrivals in `[start, end)` seconds; the clock restarts at `start`."""
    start, end = (round(s * TICKS_PER_SECOND) for s in (start_seconds, end_seconds))
    if end <= start:
        raise ValueError(
            f"window({start_seconds}, {end_seconds}): the end must be later than the start; "
            "give seconds in order"
        )
    inside = take(trace, (trace.arrival >= start) & (trace.arrival < end))
    return dataclasses.replace(inside, arrival=inside.arrival - start)


def _check_factor(verb: str, factor: float) -> None:
    if not (0 < factor < float("inf")):
        raise ValueError(f"{verb}({factor}): a factor must be positive and finite; 1.0 keeps it")


def scale_rate(trace: Trace, factor: float) -> Trace:
    """`factor` times as many requests per second: every arrival time is divided by it.

    Think times are a property of the user and stay as they are.
    """
    _check_factor("scale_rate", factor)
    return dataclasses.replace(trace, arrival=np.rint(trace.arrival / factor).astype(np.int64))


def scale_lengths(trace: Trace, inputs: float = 1.0, outputs: float = 1.0) -> Trace:
    """Lengths times a factor, at least one token each; images shrink or grow with the prompt.

    A prefix block scales with the prompt that it is part of, so the shared *fraction* stays. Its
    length is rounded down to whole tokens; what rounding leaves over counts as unshared.

    Raises:
      ValueError: for a factor that is not positive, that leaves a prefix block without a token, or
        that makes a length exceed 2**31 - 1.
    """
    _check_factor("scale_lengths", inputs)
    _check_factor("scale_lengths", outputs)
    block = int(trace.block_tokens * inputs)
    if trace.block_tokens and not block:
        raise ValueError(
            f"scale_lengths(inputs={inputs}): a prefix block of {trace.block_tokens} tokens would "
            "vanish; use a larger factor"
        )
    images = np.maximum(1, (trace.image_tokens * inputs).astype(np.int64))
    scaled = dataclasses.replace(trace, image_tokens=images, block_tokens=block)
    prompt = np.maximum(np.rint(trace.input_tokens * inputs).astype(np.int64), 1)
    prompt = np.maximum(prompt, scaled.image_tokens_per_request)
    answer = np.maximum(np.rint(trace.output_tokens * outputs).astype(np.int64), 1)
    longest = max(int(np.max(prompt, initial=0)), int(np.max(answer, initial=0)))
    if longest > LARGEST_LENGTH:
        raise ValueError(
            f"scale_lengths: {longest} tokens exceed {LARGEST_LENGTH}; use a smaller factor"
        )
    return dataclasses.replace(scaled, input_tokens=prompt, output_tokens=answer)
