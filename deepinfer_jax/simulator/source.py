"""Where requests come from, as a person describes it: a trace file, or synthetic arrivals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

from deepinfer_jax.simulator.agents import Agents
from deepinfer_jax.simulator.conversations import Conversations
from deepinfer_jax.simulator.loading import load
from deepinfer_jax.simulator.plain_config import build, choose
from deepinfer_jax.simulator.synthetic import ARRIVALS, LognormalLengths, PrefixGroups, synthetic
from deepinfer_jax.simulator.traces import Trace, head, scale_lengths, scale_rate, window


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFile:
    """Requests of a file, then the window, the head, and the factors, in this order."""

    kind: str = "trace"
    path: str
    format: str = ""  # "" guesses it from the first line
    on_invalid: str = "error"  # "reject" leaves bad rows out and counts them
    share_system_prefix: bool = False
    closed_loop: bool = False  # a session's requests wait for its answers, not for recorded times
    start_seconds: float = 0.0
    end_seconds: float = math.inf
    requests: int = 0  # the first ones; 0 takes all
    rate_factor: float = 1.0
    input_factor: float = 1.0
    output_factor: float = 1.0

    def trace(self, seed: int) -> Trace:
        """The requests; `seed` changes nothing."""
        del seed
        on_invalid = choose("workload.on_invalid", self.on_invalid, ("error", "reject"))
        made = load(
            self.path,
            self.format or None,
            on_invalid=cast(Any, on_invalid),
            share_system_prefix=self.share_system_prefix,
        )
        if self.start_seconds > 0 or self.end_seconds < math.inf:
            last = float(made.arrival_seconds[-1]) + 1.0
            made = window(made, self.start_seconds, min(self.end_seconds, last))
        if self.requests:
            made = head(made, self.requests)
        if self.rate_factor != 1.0:
            made = scale_rate(made, self.rate_factor)
        if (self.input_factor, self.output_factor) != (1.0, 1.0):
            made = scale_lengths(made, self.input_factor, self.output_factor)
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Arrivals of a process, log-normal lengths, and prompts that share the prefix of a group."""

    kind: str = "synthetic"
    requests: int
    rate: float  # mean requests per second
    arrivals: str = "poisson"
    shape: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the process
    input_median: float = 1000.0
    input_sigma: float = 1.0
    input_limit: int = 131_072
    output_median: float = 200.0
    output_sigma: float = 0.7
    output_limit: int = 8192
    groups: int = 0  # shared prefixes; 0 shares nothing
    group_tokens: int = 0
    group_skew: float = 0.0

    @property
    def closed_loop(self) -> bool:
        """Nobody waits for an answer: there are no sessions."""
        return False

    def trace(self, seed: int) -> Trace:
        """The requests drawn with `seed`."""
        lengths = LognormalLengths(
            self.input_median,
            self.input_sigma,
            self.output_median,
            self.output_sigma,
            self.input_limit,
            self.output_limit,
        )
        prefixes = PrefixGroups(self.groups, self.group_tokens, self.group_skew)
        return synthetic(
            choose("workload.arrivals", self.arrivals, tuple(ARRIVALS)),
            requests=self.requests,
            rate=self.rate,
            lengths=lengths,
            seed=seed,
            prefixes=prefixes if self.groups else None,
            **self.shape,
        )


SOURCES = {
    "trace": TraceFile,
    "synthetic": Synthetic,
    "agents": Agents,
    "conversations": Conversations,
}


def source(values: Mapping[str, Any]) -> TraceFile | Synthetic | Agents | Conversations:
    """The source that plain values describe.

    Raises:
      ValueError: an unknown key or kind (with the nearest name) or a value of another type.
    """
    kind = choose("workload.kind", values.get("kind", "trace"), tuple(SOURCES))
    made: TraceFile | Synthetic | Agents | Conversations = build(SOURCES[kind], values, "workload")
    return made
