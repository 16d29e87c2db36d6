"""What a request may ask of sampling, checked where it enters; an error names value and remedy.

Names and neutral values follow the services' common vocabulary (OpenAI's API for bias, presence,
frequency and logprobs; CTRL, arXiv 1909.05858, for repetition; arXiv 2407.01082 for min-p).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping

from deepinfer_jax.rules import require

LEAST_TEMPERATURE = 1e-5
GRAMMARS = ("regex", "json", "ebnf")
SEEDS = 1 << 64


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A language the answer must lie in: a regular expression, a JSON schema, or an EBNF."""

    kind: str  # "regex", "json" (a schema, as JSON text) or "ebnf" (Lark's notation)
    text: str

    def __post_init__(self) -> None:
        kinds = ", ".join(GRAMMARS)
        require(self.kind in GRAMMARS, f"grammar kind is {self.kind!r}; choose one of {kinds}")
        require(bool(self.text), f"the {self.kind} grammar is empty; give its text or no grammar")


@dataclasses.dataclass(frozen=True)
class SamplingLimits:
    """Static sizes of the packed arrays: what one request may ask for at most."""

    bias: int = 64  # entries of logit_bias
    stop_ids: int = 16  # end of sequence included
    logprobs: int = 20  # alternatives reported per token


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's wishes; the defaults sample the model's own distribution.

    `temperature` 0 is greedy: the lowest id of the most likely. `top_k` -1 is off. `logprobs` and
    `prompt_logprobs` are numbers of alternatives, 0 for the token's own only, None for nothing;
    they are of the model's distribution, or of the one sampled from if `processed_logprobs`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output; 1 is off
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] | str = ()
    include_stop: bool = False  # the text ends with the stop string that ended it
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0  # stop ids are not sampled before so many
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    grammar: Grammar | None = None
    forced_tokens: tuple[int, ...] = ()  # the first tokens of the output, whatever the model says

    def __post_init__(self) -> None:
        """Normalise containers to tuples, then check.

        Raises:
          ValueError: a value outside its range, or two wishes that exclude each other.
        """
        bias = self.logit_bias
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        object.__setattr__(self, "logit_bias", tuple(sorted((int(i), float(b)) for i, b in pairs)))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "forced_tokens", tuple(self.forced_tokens))
        _check_numbers(self)
        _check_lengths(self)
        _check_grammar(self)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """(token id, addend to its logit), ids ascending."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        """True if sampling depends on which tokens the request has seen."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _between(name: str, value: float, low: float, high: float) -> None:
    require(
        low <= value <= high,  # False for NaN
        f"{name} is {value}; it must lie in [{low:g}, {high:g}], so clip it",
    )


def _check_numbers(p: SamplingParams) -> None:
    _between("temperature", p.temperature, 0, 1e4)
    require(
        p.temperature == 0 or p.temperature >= LEAST_TEMPERATURE,
        f"temperature is {p.temperature}; between 0 and {LEAST_TEMPERATURE} logits overflow, so "
        "give 0 for greedy",
    )
    require(0 < p.top_p <= 1, f"top_p is {p.top_p}; it must lie in (0, 1], 1 for off")
    require(p.top_k == -1 or p.top_k >= 1, f"top_k is {p.top_k}; give at least 1, or -1 for off")
    _between("min_p", p.min_p, 0, 1)
    require(
        0 < p.repetition_penalty < math.inf,
        f"repetition_penalty is {p.repetition_penalty}; it must be positive, 1 for off",
    )
    _between("presence_penalty", p.presence_penalty, -2, 2)
    _between("frequency_penalty", p.frequency_penalty, -2, 2)
    for token, addend in p.bias:
        _between(f"logit_bias of token {token}", addend, -1e4, 1e4)
    ids = [token for token, _ in p.bias]
    require(len(set(ids)) == len(ids), f"logit_bias names a token twice in {ids}; give one entry")
    if p.seed is not None:
        require(0 <= p.seed < SEEDS, f"seed is {p.seed}; it must lie in [0, 2**64), so reduce it")


def _check_lengths(p: SamplingParams) -> None:
    require(p.max_tokens >= 1, f"max_tokens is {p.max_tokens}; a request makes at least one token")
    require(
        0 <= p.min_tokens <= p.max_tokens,
        f"min_tokens is {p.min_tokens}; it must lie in [0, max_tokens = {p.max_tokens}]",
    )
    require(p.n >= 1, f"n is {p.n}; give the number of answers, at least 1")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        require(value is None or value >= 0, f"{name} is {value}; give 0 or more, None for nothing")
    require(all(p.stop), f"stop is {p.stop!r}; an empty string would stop at once, so remove it")


def _check_grammar(p: SamplingParams) -> None:
    require(
        p.grammar is None or not (p.ignore_eos or p.min_tokens or p.forced_tokens),
        "a grammar decides where the answer ends and which tokens it has; remove ignore_eos, "
        "min_tokens and forced_tokens, or the grammar",
    )


def check(
    params: SamplingParams, vocab_size: int, limits: SamplingLimits, truncation: str = "off"
) -> None:
    """What only the engine can know: its vocabulary, its array sizes, its prefill.

    Raises:
      ValueError: an id outside the vocabulary, more entries than `limits`, or prompt logprobs of
        rows that prefill truncation does not compute.
    """
    biased = [token for token, _ in params.bias]
    for name, ids in (
        ("logit_bias", biased),
        ("stop_ids", params.stop_ids),
        ("forced_tokens", params.forced_tokens),
    ):
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        require(not wrong, f"{name} holds {wrong}; token ids lie in [0, {vocab_size})")
    for name, asked, most in (
        ("logit_bias entries", len(biased), limits.bias),
        ("stop_ids", len(params.stop_ids) + 1, limits.stop_ids),
        ("logprobs", params.logprobs or 0, limits.logprobs),
        ("prompt_logprobs", params.prompt_logprobs or 0, limits.logprobs),
    ):
        require(
            asked <= most,
            f"{asked} {name} asked; this engine keeps {most}: ask for fewer or raise its limit",
        )
    require(
        params.prompt_logprobs is None or truncation == "off",
        f"prompt_logprobs with truncation {truncation!r}; the decoder skips prompt rows then, so "
        "turn truncation off",
    )


def seeds(params: SamplingParams, random_seed: int) -> tuple[int, ...]:
    """One 64-bit seed for each of the `n` answers; the first is the request's own.

    Args:
      random_seed: stands in if the request names none.
    """
    first = random_seed % SEEDS if params.seed is None else params.seed
    words = [first.to_bytes(8, "little") + i.to_bytes(8, "little") for i in range(1, params.n)]
    others = [hashlib.blake2b(w, digest_size=8).digest() for w in words]
    return (first, *(int.from_bytes(d, "little") for d in others))
