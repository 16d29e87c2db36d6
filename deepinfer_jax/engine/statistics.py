"""What a run did, per step and per request, each number by one definition.

Useful tokens are counted from commits: what requests kept, ends of sequence and caps applied.
Acceptance is counted as the device verified it, tokens behind a stop included, so the two differ
at the end of a request. Times in seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One committed step."""

    is_prompt: bool
    start: float  # when it was queued
    end: float  # when its results were there
    requests: int
    rows: int  # query rows
    useful: int  # tokens committed to requests
    verified: tuple[int, ...] = ()  # drafts verified, by draft position
    accepted: tuple[int, ...] = ()  # of them, accepted with all before them
    confidence_error: float = 0.0  # sum over verified drafts of |chance of acceptance - confidence|
    running: int = 0  # requests that decode
    pending: int = 0  # requests that wait for their prompt or a seat
    blocks_used: int = 0
    blocks: int = 0  # of the pool, the reserved one not counted


@dataclasses.dataclass(frozen=True)
class Summary:
    """Numbers of a run of steps; None where there is nothing to divide by."""

    steps: int
    useful_tokens: int
    useful_per_second: float | None  # useful tokens / (last end - first start)
    steps_per_second: float | None  # steps / (last end - first start), prompts included
    accept_rate: float | None  # accepted drafts / verified drafts
    survival: tuple[
        float | None, ...
    ]  # accepted / verified at each draft position: not conditional
    tau: float | None  # 1 + accepted drafts / requests of decode steps: device's tokens per step
    useful_tau: float | None  # tokens committed in decode steps / requests of decode steps
    verified_length: float | None  # drafts verified / requests of decode steps
    confidence_error: float | None  # mean |chance of acceptance - confidence| over verified drafts
    prompt_seconds: float  # sum of end - start over prompt steps
    decode_seconds: float  # the same over decode steps; overlapping steps count twice
    block_usage: float | None  # greatest used / pool


def verified_counts(
    rows: Sequence[int], accepted: Sequence[int], count: int
) -> tuple[tuple[int, ...], ...]:
    """(verified, accepted) by draft position 1..count, from query rows and accepted drafts.

    Example: rows (6, 6), accepted (1, 3), count 5: (2, 2, 2, 2, 2), (2, 1, 1, 0, 0).
    """
    return tuple(
        tuple(sum(n > i for n in numbers) for i in range(count))
        for numbers in ([q - 1 for q in rows], accepted)
    )


def summarise(steps: Sequence[StepRecord]) -> Summary:
    """The definitions of `Summary`, applied.

    With fixed verification of n drafts, tau = 1 + n x accept_rate exactly.
    """
    decode = [s for s in steps if not s.is_prompt]
    requests = sum(s.requests for s in decode)
    width = max((len(s.verified) for s in decode), default=0)
    verified, accepted = (
        [sum(n[i] for n in numbers if i < len(n)) for i in range(width)]
        for numbers in ([s.verified for s in decode], [s.accepted for s in decode])
    )
    useful = sum(s.useful for s in steps)
    span = max(s.end for s in steps) - min(s.start for s in steps) if steps else 0.0
    return Summary(
        steps=len(steps),
        useful_tokens=useful,
        useful_per_second=_ratio(useful, span),
        steps_per_second=_ratio(len(steps), span),
        accept_rate=_ratio(sum(accepted), sum(verified)),
        survival=tuple(_ratio(a, v) for a, v in zip(accepted, verified, strict=True)),
        tau=_ratio(requests + sum(accepted), requests),
        useful_tau=_ratio(sum(s.useful for s in decode), requests),
        verified_length=_ratio(sum(verified), requests),
        confidence_error=_ratio(sum(s.confidence_error for s in decode), sum(verified)),
        prompt_seconds=sum(s.end - s.start for s in steps if s.is_prompt),
        decode_seconds=sum(s.end - s.start for s in decode),
        block_usage=max((s.blocks_used / s.blocks for s in steps if s.blocks), default=None),
    )


@dataclasses.dataclass
class RequestRecord:
    """One request's life; `commit` is called once per commit that gave it tokens."""

    arrival: float  # handed to the engine; queueing counts
    prompt_tokens: int
    token_times: list[float] = dataclasses.field(default_factory=list)
    decode_steps: int = 0  # commits behind the first

    def commit(self, time: float, tokens: int) -> None:
        """`tokens` useful tokens became known at `time`."""
        self.decode_steps += bool(self.token_times)
        self.token_times += [time] * tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token: its commit less the arrival."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between successive tokens, 0 inside one commit."""
        times = self.token_times
        return [b - a for a, b in itertools.pairwise(times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token: (last - first) / (tokens - 1)."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def tau(self) -> float | None:
        """Useful tokens per decode step, cut ends included; the prompt's token is not one."""
        return _ratio(len(self.token_times) - 1, self.decode_steps)


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None
