"""Synthetic traces: seeded arrival processes, lengths and shared prefixes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.traces import LARGEST_LENGTH, Float64, Int64, Trace, plain


class Lengths(Protocol):
    def draw(self, generator: np.random.Generator, requests: int) -> tuple[Int64, Int64]:
        """(input, output) tokens, [Q] each, at least 1."""


@dataclasses.dataclass(frozen=True)
class ConstantLengths:
    """Every request alike."""

    input_tokens: int
    output_tokens: int

    def draw(self, generator: np.random.Generator, requests: int) -> tuple[Int64, Int64]:
        del generator
        return np.full(requests, self.input_tokens), np.full(requests, self.output_tokens)


@dataclasses.dataclass(frozen=True)
class LognormalLengths:
    """`median * exp(sigma * N(0, 1))`, rounded and clipped to [1, limit]."""

    input_median: float
    input_sigma: float
    output_median: float
    output_sigma: float
    input_limit: int = LARGEST_LENGTH
    output_limit: int = LARGEST_LENGTH

    def draw(self, generator: np.random.Generator, requests: int) -> tuple[Int64, Int64]:
        prompt = generator.lognormal(math.log(self.input_median), self.input_sigma, requests)
        answer = generator.lognormal(math.log(self.output_median), self.output_sigma, requests)
        pairs = ((prompt, self.input_limit), (answer, self.output_limit))
        first, second = (np.clip(np.rint(x), 1, top).astype(np.int64) for x, top in pairs)
        return first, second


@dataclasses.dataclass(frozen=True)
class TraceLengths:
    """(input, output) pairs of a trace's requests, drawn with replacement."""

    trace: Trace

    def draw(self, generator: np.random.Generator, requests: int) -> tuple[Int64, Int64]:
        which = generator.integers(len(self.trace), size=requests)
        return self.trace.input_tokens[which], self.trace.output_tokens[which]


@dataclasses.dataclass(frozen=True)
class PrefixGroups:
    """Each request starts with the `tokens` of one of `groups` prompts, before its own input.

    Group `g` (from 1) is chosen with probability proportional to `g ** -skew`.
    """

    groups: int
    tokens: int
    skew: float = 0.0
    block_tokens: int = 128


def _deterministic(gen: np.random.Generator, requests: int, rate: float) -> Float64:
    del gen
    return np.arange(requests) / rate


def _gamma(gen: np.random.Generator, requests: int, rate: float, cv: float = 1.0) -> Float64:
    shape = cv**-2
    return np.cumsum(gen.gamma(shape, 1 / (shape * rate), requests))


def _poisson(gen: np.random.Generator, requests: int, rate: float) -> Float64:
    return np.cumsum(gen.exponential(1 / rate, requests))


def _bursty(
    gen: np.random.Generator,
    requests: int,
    rate: float,
    on_seconds: float = 10.0,
    off_seconds: float = 10.0,
) -> Float64:
    """Poisson while on, silent while off; `rate` is the mean over both."""
    cycle = on_seconds + off_seconds
    active = _poisson(gen, requests, rate * cycle / on_seconds)
    return active + np.floor(active / on_seconds) * off_seconds


def _diurnal(
    gen: np.random.Generator,
    requests: int,
    rate: float,
    amplitude: float = 0.5,
    period_seconds: float = 86_400.0,
) -> Float64:
    """Poisson at `rate * (1 + amplitude * sin(2 pi t / period))`, by inverting its integral."""
    turn = 2 * math.pi / period_seconds

    def expected(t: Float64) -> Float64:
        return rate * (t + amplitude / turn * (1 - np.cos(turn * t)))

    wanted = np.cumsum(gen.exponential(1.0, requests))
    days = np.floor(wanted / (rate * period_seconds))
    grid = np.linspace(0, period_seconds, 4097)
    time = np.interp(wanted - days * rate * period_seconds, expected(grid), grid)
    time += days * period_seconds
    return time - (expected(time) - wanted) / (rate * (1 + amplitude * np.sin(turn * time)))


ARRIVALS: Mapping[str, Callable[..., Float64]] = {
    "deterministic": _deterministic,
    "poisson": _poisson,
    "gamma": _gamma,
    "bursty": _bursty,
    "diurnal": _diurnal,
}


def synthetic(
    kind: str,
    *,
    requests: int,
    rate: float,
    lengths: Lengths,
    seed: int = 0,
    prefixes: PrefixGroups | None = None,
    **shape: float,
) -> Trace:
    """A synthetic trace.

    Args:
      kind: "deterministic", "poisson", "gamma" (cv), "bursty" (on_seconds, off_seconds) or
        "diurnal" (amplitude below 1, period_seconds).
      requests: how many.
      rate: mean requests per second.
      lengths: `ConstantLengths`, `LognormalLengths`, `TraceLengths` or another `Lengths`.
      seed: of `numpy.random.default_rng`; arrivals, lengths and groups use streams of their own,
        so that changing one leaves the others as they were.
      prefixes: shared prompts, added in front of the drawn input; None shares nothing.
      **shape: the numbers in brackets above.

    Raises:
      ValueError: for an unknown kind or a number out of range.
    """
    if kind not in ARRIVALS:
        raise ValueError(f"arrival kind {kind!r} is unknown; choose one of {', '.join(ARRIVALS)}")
    numbers: dict[str, float] = {"requests": requests, "rate": rate, **shape}
    for name, value in numbers.items():
        least = 0 if name in ("amplitude", "off_seconds") else None
        positive = value >= 0 if least == 0 else value > 0
        if not positive or not math.isfinite(value) or (name == "amplitude" and value >= 1):
            raise ValueError(
                f"{kind}: {name} = {value}, but it must be positive and finite, an "
                "amplitude in [0, 1); give another value"
            )
    arrivals, sizes, groups = (
        np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3)
    )
    try:
        seconds = ARRIVALS[kind](arrivals, requests, rate, **shape)
    except TypeError:
        raise ValueError(
            f"{kind}: {sorted(shape)} are not all parameters of it; see synthetic's docstring"
        ) from None
    prompt, answer = lengths.draw(sizes, requests)
    if prompt.min() < 1 or answer.min() < 1:
        raise ValueError(
            f"{lengths}: a request needs at least 1 input and 1 output token; use larger lengths"
        )
    trace = plain(kind, np.rint(seconds * TICKS_PER_SECOND).astype(np.int64), prompt, answer)
    return trace if prefixes is None else _with_groups(trace, prefixes, groups)


def _with_groups(trace: Trace, prefixes: PrefixGroups, generator: np.random.Generator) -> Trace:
    blocks = prefixes.tokens // prefixes.block_tokens
    if prefixes.groups < 1 or blocks < 1:
        raise ValueError(
            f"{prefixes}: needs at least one group and one full block of tokens; enlarge them"
        )
    weight = np.arange(1, prefixes.groups + 1, dtype=np.float64) ** -prefixes.skew
    group = generator.choice(prefixes.groups, len(trace), p=weight / weight.sum())
    return dataclasses.replace(
        trace,
        input_tokens=trace.input_tokens + prefixes.tokens,
        block_tokens=prefixes.block_tokens,
        run_first=group * blocks,
        run_count=np.full(len(trace), blocks),
        run_offsets=np.arange(len(trace) + 1),
    )
