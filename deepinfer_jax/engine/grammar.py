"""Structured output: grammars compiled off the loop, masks for the rows of a verify step.

llguidance parses; this file keeps one request's failure to that request. A request waits until its
`Compilation` is done or too late. Then its `Constraint` gives masks before each sampling, walks
along the drafts and back, and follows the tokens that count. A failed constraint allows every id,
so the step goes on; whoever drives the loop reads `error` and ends the request.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from deepinfer_jax.engine.sampling_params import Grammar

TIMEOUT = 20.0
READERS: dict[str, Callable[[str], str]] = {
    "regex": LLMatcher.grammar_from_regex,
    "json": LLMatcher.grammar_from_json_schema,
    "ebnf": LLMatcher.grammar_from_lark,
}
EVERYTHING = -1  # a mask word that allows 32 ids


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self.vocab_size = matcher, vocab_size
        self.error = matcher.get_error()

    @property
    def finished(self) -> bool:
        """The answer is complete: only end of sequence may follow."""
        return not self.error and self._matcher.is_stopped()

    def fork(self) -> Constraint:
        """An independent one at the same place, for each of n answers."""
        return Constraint(self._matcher.deep_copy(), self.vocab_size)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow committed tokens; one that the grammar refuses sets `error`."""
        for token in tokens:
            if self.error:
                return
            if not self._matcher.consume_token(token):
                self.error = self._matcher.get_error() or f"token {token} is outside the grammar"

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Bits int32 [len(drafts) + 1, ceil(V / 32)], row j behind drafts 1 .. j.

        Rows behind a refused draft allow everything: verification rejects that draft before them.
        """
        out = np.full((len(drafts) + 1, -(-self.vocab_size // 32)), EVERYTHING, np.int32)
        walked = 0
        for row in range(len(drafts) + 1):
            if self.error:
                break
            fill_next_token_bitmask(self._matcher, out, row)
            self.error = self._matcher.get_error()
            if row == len(drafts) or not self._accepts(drafts[row]):
                break
            walked += 1
        if walked and not self.error and not self._matcher.rollback(walked):
            self.error = self._matcher.get_error() or "the parser cannot go back"
        if self.error:
            out[:] = EVERYTHING
        return out

    def _accepts(self, token: int) -> bool:
        if not 0 <= token < self.vocab_size or self._matcher.is_stopped():
            return False
        return self._matcher.try_consume_tokens([token]) == 1


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A grammar being compiled."""

    future: concurrent.futures.Future[Constraint]
    deadline: float  # time.monotonic

    def poll(self) -> Constraint | str | None:
        """The constraint, or why there is none, or None while it is awaited. Never waits."""
        if self.future.done():
            error = self.future.exception()
            return self.future.result() if error is None else str(error)
        if time.monotonic() < self.deadline:
            return None
        self.future.cancel()
        return "the grammar took too long to compile; simplify it"


class Compiler:
    """A pool of threads that compile; the parser releases the interpreter's lock meanwhile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_id: int,
        *,
        workers: int = 4,
        timeout: float = TIMEOUT,
    ) -> None:
        self.vocab_size, self.timeout = vocab_size, timeout
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos_id)
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "grammar")

    def submit(self, grammar: Grammar) -> Compilation:
        """Begin; returns at once."""
        future = self._pool.submit(self._compile, grammar)
        return Compilation(future, time.monotonic() + self.timeout)

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Constraint:
        text = READERS[grammar.kind](grammar.text)
        found = Constraint(LLMatcher(self._tokenizer, text, log_level=0), self.vocab_size)
        if found.error:
            raise ValueError(f"the {grammar.kind} grammar does not compile: {found.error}")
        return found


def batch_masks(
    constraints: Sequence[Constraint | None], drafts: np.ndarray, vocab_size: int
) -> np.ndarray:
    """`RowContext.mask` int32 [S, N + 1, ceil(V / 32)] for drafts int32 [S, N].

    Requests without a constraint, and rows behind them, are allowed everything.
    """
    rows, count = drafts.shape
    out = np.full((rows, count + 1, -(-vocab_size // 32)), EVERYTHING, np.int32)
    for i, constraint in enumerate(constraints):
        if constraint is not None:
            out[i] = constraint.masks(drafts[i].tolist())
    return out
