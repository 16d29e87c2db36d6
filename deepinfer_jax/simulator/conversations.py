"""Synthetic weeks of a service: conversations whose users leave and return days later, and agents beside them.

What a store gains by keeping blocks for days depends on returns alone, so their law is explicit: after an
answer a user replies within minutes, or leaves with probability `leave` and is away for a log-normal time.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from deepinfer_jax.cost.steps import TICKS_PER_SECOND
from deepinfer_jax.simulator.traces import (
    Float64,
    Int64,
    Trace,
    head,
    in_arrival_order,
    plain,
    take,
)

DAY_SECONDS = 86_400
CHAT, AGENT = 0, 1
"""Traffic classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations start uniformly over `days`; each request repeats all that was said and appends to it.

    The defaults are assumptions, none is measured. Agents never leave.
    """

    kind: str = "conversations"
    requests: int  # the first ones to arrive
    conversations: int
    days: float
    turns: float = 10.0  # mean, geometric
    reply_seconds: float = 90.0  # mean from one request to the next without leaving, exponential
    leave: float = 0.05  # probability that the user leaves after an answer
    away_days: float = 1.0  # median of the time away, log-normal
    away_sigma: float = 1.3
    agent_share: float = 0.0  # of the conversations
    agent_turns: float = 40.0
    agent_reply_seconds: float = 10.0
    system_tokens: int = 1024  # all prompts of a class begin with the same ones
    first_tokens: float = 1000.0  # mean of the first message, exponential
    message_tokens: float = 300.0  # mean of the others
    answer_tokens: float = 400.0  # mean, exponential
    context_limit: int = 131_072  # tokens; a conversation ends before the prompt that exceeds it
    block_tokens: int = 128

    @property
    def closed_loop(self) -> bool:
        """Requests arrive by the clock: in a week, an answer's seconds do not matter."""
        return False

    def trace(self, seed: int) -> Trace:
        """The requests drawn with `seed`, with sessions, turns and traffic classes.

        Raises:
          ValueError: a number out of range, or fewer requests than asked for.
        """
        self._check()
        rng = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5)]
        agent = rng[0].random(self.conversations) < self.agent_share
        mean = np.where(agent, self.agent_turns, self.turns)
        turns = rng[0].geometric(1 / mean)
        begin = np.sort(rng[1].random(self.conversations)) * self.days * DAY_SECONDS
        session = np.repeat(np.arange(self.conversations), turns)
        first = np.cumsum(turns) - turns
        turn = np.arange(len(session)) - first[session]
        arrival = begin[session] + _within(self._gaps(rng[2], agent[session], turn), first, session)
        prompt, answer = self._lengths(rng[3], first, session, turn)
        drawn = int(np.sum(prompt <= self.context_limit))
        if drawn < self.requests:
            raise ValueError(
                f"conversations: {drawn} requests were drawn, but {self.requests} are wanted; "
                "raise conversations or turns, or ask for fewer"
            )
        kind = np.where(agent[session], AGENT, CHAT)
        made = self._trace(arrival, prompt, answer, session, turn, kind)
        return head(take(made, made.input_tokens <= self.context_limit), self.requests)

    def _gaps(self, rng: np.random.Generator, agent: np.ndarray, turn: Int64) -> Float64:
        """[K] seconds from the request before; 0 for the first of a conversation."""
        count = len(turn)
        reply = rng.exponential(np.where(agent, self.agent_reply_seconds, self.reply_seconds))
        away = DAY_SECONDS * rng.lognormal(math.log(self.away_days), self.away_sigma, count)
        gap = np.where((rng.random(count) < self.leave) & ~agent, away, reply)
        return np.where(turn == 0, 0.0, gap)

    def _lengths(
        self, rng: np.random.Generator, first: Int64, session: Int64, turn: Int64
    ) -> tuple[Int64, Int64]:
        """(prompt, answer) tokens [K]: a prompt holds every message and answer before it."""
        mean = np.where(turn == 0, self.first_tokens, self.message_tokens)
        message = 1 + rng.exponential(mean).astype(np.int64)
        answer = 1 + rng.exponential(self.answer_tokens, len(turn)).astype(np.int64)
        said = _within(message + answer, first, session)
        return self.system_tokens + said - answer, answer

    def _trace(
        self,
        arrival: Float64,
        prompt: Int64,
        answer: Int64,
        session: Int64,
        turn: Int64,
        kind: Int64,
    ) -> Trace:
        """In arrival order; a prompt's blocks are the class's system blocks, then the session's own."""
        count, size = len(prompt), self.block_tokens
        common, blocks = self.system_tokens // size, prompt // size
        longest = max(int(blocks.max()), common) + 1
        shared = np.minimum(blocks, common)
        runs = np.stack([shared, blocks - shared], axis=1)
        starts = np.stack([kind * longest, (2 + session) * longest], axis=1)
        some = runs > 0
        ticks = np.rint(arrival * TICKS_PER_SECOND).astype(np.int64)
        trace = dataclasses.replace(
            plain("conversations", np.zeros(count, np.int64), prompt, answer),
            arrival=ticks,
            block_tokens=size,
            run_first=starts[some],
            run_count=runs[some],
            run_offsets=np.concatenate([[0], np.cumsum(some.sum(axis=1))]).astype(np.int64),
            session=session,
            turn=turn,
            traffic=kind,
        )
        return in_arrival_order(trace)

    def _check(self) -> None:
        least = {"requests": 1, "conversations": 1, "turns": 1, "agent_turns": 1, "block_tokens": 1}
        positive = ("days", "reply_seconds", "away_days", "agent_reply_seconds", "first_tokens")
        for name in (*least, *positive, "message_tokens", "answer_tokens"):
            value = getattr(self, name)
            if not (max(least.get(name, 0), 0) <= value < math.inf and value > 0):
                raise ValueError(
                    f"conversations: {name}={value}, but it must be positive and finite, a count "
                    "at least 1; give another value"
                )
        for name in ("leave", "agent_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"conversations: {name}={getattr(self, name)}, but it is a share; give 0 to 1"
                )
        if self.away_sigma < 0 or self.system_tokens < 0:
            raise ValueError(
                f"conversations: away_sigma={self.away_sigma}, system_tokens={self.system_tokens}, "
                "but neither may be negative; give 0 or more"
            )


def _within(values: np.ndarray, first: Int64, session: Int64) -> np.ndarray:
    """Running sums [K] of `values` inside each session, whose first entries are `first`."""
    total = np.cumsum(values)
    before = np.concatenate([[0], total])[first]
    made: np.ndarray = total - before[session]
    return made
