"""Synthetic agent sessions: rounds that each repeat the whole context and append to it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.traces import LARGEST_LENGTH, Int64, Trace, in_arrival_order, plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents:
    """Sessions of an agent. The defaults are the means of DualPath's trace (arXiv 2602.21548,
    section 3): 157 rounds that append 429 tokens each to a context of 32.7k on average.

    Appended tokens are the previous round's output and the tool's answer to it, together.
    """

    kind: str = "agents"
    sessions: int
    rate: float  # sessions that start per second, Poisson
    rounds: int = 157
    first_tokens: int = 429  # prompt of a session's first round
    append_mean: float = 429.0  # tokens that a round adds, exponential beyond the output
    output_mean: float = 100.0  # of which the model writes, geometric
    tool_seconds: float = 1.0  # mean from an answer to the next round, exponential
    block_tokens: int = 64
    closed_loop: bool = True  # False: rounds arrive as if answers took no time

    def trace(self, seed: int) -> Trace:
        """The requests drawn with `seed`, sessions and think times included.

        Arrivals are those of answers that take no time; a closed loop replaces them.

        Raises:
          ValueError: a number out of range, or a context beyond 2**31 - 1 tokens.
        """
        self._check()
        streams = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(4)]
        shape = (self.sessions, self.rounds)
        answer = streams[0].geometric(1 / self.output_mean, shape).astype(np.int64)
        tool = streams[1].exponential(max(self.append_mean - self.output_mean, 0.0), shape)
        think = streams[2].exponential(self.tool_seconds, shape)
        think[:, 0] = 0.0
        growth = answer + np.rint(tool).astype(np.int64)
        before = np.cumsum(growth, axis=1) - growth
        prompt = self.first_tokens + before
        if prompt.max() > LARGEST_LENGTH:
            raise ValueError(
                f"agents: a context reaches {prompt.max()} tokens, beyond {LARGEST_LENGTH}; use "
                "fewer rounds or a smaller append_mean"
            )
        start = np.cumsum(streams[3].exponential(1 / self.rate, self.sessions))
        seconds = start[:, None] + np.cumsum(think, axis=1)
        return in_arrival_order(self._assembled(seconds, prompt, answer, think))

    def _assembled(
        self, seconds: np.ndarray, prompt: Int64, answer: Int64, think: np.ndarray
    ) -> Trace:
        ticks = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64).ravel()
        order = np.argsort(ticks, kind="stable")
        blocks = prompt // self.block_tokens
        apart = np.arange(self.sessions, dtype=np.int64)[:, None] * (int(blocks.max()) + 1)
        kept = blocks.ravel()[order] > 0
        made = plain("agents", ticks[order], prompt.ravel()[order], answer.ravel()[order])
        number = np.repeat(np.arange(self.sessions, dtype=np.int64), self.rounds)
        return dataclasses.replace(
            made,
            block_tokens=self.block_tokens,
            run_first=np.broadcast_to(apart, blocks.shape).ravel()[order][kept],
            run_count=blocks.ravel()[order][kept],
            run_offsets=np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
            session=number[order],
            turn=np.tile(np.arange(self.rounds, dtype=np.int64), self.sessions)[order],
            think_seconds=think.ravel()[order],
        )

    def _check(self) -> None:
        for name in ("sessions", "rounds", "first_tokens", "block_tokens", "rate", "output_mean"):
            value = getattr(self, name)
            least = 0 if name == "rate" else 1
            if not (value >= least and 0 < value < math.inf):
                raise ValueError(
                    f"agents: {name}={value}, but it must be {'positive' if not least else 'at least 1'} "
                    "and finite; give another value"
                )
        if not 0 <= self.tool_seconds < math.inf:
            raise ValueError(
                f"agents: tool_seconds={self.tool_seconds}, but it must be finite and not "
                "negative; give 0 or more"
            )
        if not self.output_mean <= self.append_mean < math.inf:
            raise ValueError(
                f"agents: append_mean={self.append_mean} holds the output of {self.output_mean} on "
                "average; make it at least that"
            )
