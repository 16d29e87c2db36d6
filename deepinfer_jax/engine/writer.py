"""Answers in the making: tokens, text and log-probabilities from the news of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tokenizers import Tokenizer

from deepinfer_jax.engine.detokenise import Detokeniser
from deepinfer_jax.engine.grammar import Compilation
from deepinfer_jax.engine.logprobs import Logprobs
from deepinfer_jax.engine.plan import RequestOutput
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token."""

    logprob: float  # of the token itself
    rank: int  # ids strictly likelier
    top: tuple[tuple[int, float], ...]  # (id, log-probability), likeliest first


@dataclasses.dataclass(frozen=True)
class News:
    """What one step added to one answer."""

    prompt: int  # number of the prompt as given
    answer: int  # 0 .. n - 1
    tokens: tuple[int, ...]
    text: str  # whole characters that no stop string can take back; "" without a tokenizer
    finish_reason: str | None  # a `request.Status`, in the last news
    error: str | None = None  # of a grammar, in the last news


@dataclasses.dataclass(frozen=True)
class Completion:
    """One whole answer. `tokens` hold the stop id, or the stop string's, that ended it."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None  # of a grammar


@dataclasses.dataclass(frozen=True)
class Result:
    """All answers to one prompt."""

    prompt: tuple[int, ...]
    answers: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the tokens behind the first


class Writer:
    """One answer in the making."""

    def __init__(
        self, prompt: int, answer: int, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.prompt, self.answer, self.params = prompt, answer, params
        self._words = None
        if tokenizer is not None:
            self._words = Detokeniser(tokenizer, params.stop, params.include_stop)
        self.request: Request | None = None
        self.compilation: Compilation | None = None
        self.tokens: list[int] = []
        self.text = ""
        self._shown = 0
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

    def see(self, request: Request) -> bool:
        """`Request.stop_when`: whether the newest token completes a stop string."""
        assert self._words is not None
        self.text += self._words.feed(request.tokens[-1:])
        return self._words.stopped is not None

    def write(self, output: RequestOutput) -> News:
        """Take a step's news."""
        self.tokens += output.tokens
        if output.details is not None:
            wanted = self.params.logprobs or 0
            self.logprobs += unpack(output.details, len(output.tokens), wanted)
        self.finish_reason = output.finish_reason
        if output.finish_reason == Status.GRAMMAR_FAILED and self.request and self.request.grammar:
            self.error = self.request.grammar.error
        if output.finish_reason is not None and self._words is not None:
            self.text += self._words.finish()
        shown, self._shown = self._shown, len(self.text)
        text, reason = self.text[shown:], output.finish_reason
        return News(self.prompt, self.answer, output.tokens, text, reason, self.error)

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        asked = self.params.logprobs is not None
        return Completion(
            tuple(self.tokens),
            self.text,
            self.finish_reason,
            tuple(self.logprobs) if asked else None,
            self.error,
        )


def unpack(report: Logprobs, count: int, wanted: int) -> list[TokenLogprobs]:
    """The first `count` tokens of a report with arrays [tokens, ...]."""
    return [
        TokenLogprobs(
            float(report.chosen[i]),
            int(report.rank[i]),
            tuple(
                zip(
                    report.ids[i, :wanted].tolist(), report.values[i, :wanted].tolist(), strict=True
                )
            ),
        )
        for i in range(count)
    ]


def results(writers: Sequence[Writer]) -> list[Result]:
    grouped: dict[int, list[Writer]] = {}
    for writer in writers:
        grouped.setdefault(writer.prompt, []).append(writer)
    return [_result(group) for group in grouped.values()]


def _result(group: Sequence[Writer]) -> Result:
    request, wanted = group[0].request, group[0].params.prompt_logprobs
    assert request is not None
    report = None
    if wanted is not None:
        report = tuple(_one(token, wanted) for token in request.sampling.prompt_report)
    answers = tuple(writer.completion() for writer in group)
    return Result(tuple(request.prompt), answers, report)


def _one(report: Logprobs, wanted: int) -> TokenLogprobs:
    top = zip(report.ids[:wanted].tolist(), report.values[:wanted].tolist(), strict=True)
    return TokenLogprobs(float(report.chosen), int(report.rank), tuple(top))
