"""Tokens per decode step under speculation: one name for each meaning of "acceptance".

The same word is used for different quantities, which give different token rates for one step rate:

* *mean fraction* a: accepted drafts over verified drafts. tau = 1 + n a.
* *constant conditional* alpha: every draft, given that all before it were accepted, is accepted
  with the same probability (Leviathan et al., arXiv 2211.17192). tau = 1 + alpha + ... + alpha**n.
* *conditionals* c_1..c_n: the same, per position. tau = 1 + c_1 + c_1 c_2 + ...
* *survival* S_1..S_n: probability that positions 1..k are all accepted. tau = 1 + sum S_k.
* *measured*: tokens a request kept over the steps it took, end-of-request clipping included.

tau counts the one token of the target model in every step (vLLM, SGLang and InferenceX report it
this way; TensorRT-LLM leaves that token out). Everything here is exact on `fractions.Fraction`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", int, float, Fraction)


def _probability(value: float | Fraction, name: str) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is not a probability; give a number in [0, 1]")


def tau_from_mean_fraction(fraction: Number, nextn: int) -> Number:
    """`1 + nextn * fraction`, the released plot script's conversion (chapter section 11.6.2)."""
    _probability(fraction, "fraction")
    return 1 + nextn * fraction


def tau_from_constant_conditional(alpha: Number, nextn: int) -> Number:
    """`(1 - alpha**(nextn + 1)) / (1 - alpha)`, summed so that alpha = 1 gives nextn + 1."""
    _probability(alpha, "alpha")
    return tau_from_conditionals([alpha] * nextn)


def tau_from_conditionals(conditionals: Sequence[Number]) -> Number:
    """`1 + sum over k of c_1 ... c_k`."""
    return tau_from_survival(survival_from_conditionals(conditionals))


def tau_from_survival(survival: Sequence[Number]) -> Number:
    """`1 + sum of S_k`; survival never rises with the position.

    Raises:
      ValueError: a value outside [0, 1] or larger than the one before it.
    """
    for value in survival:
        _probability(value, "survival")
    for earlier, later in itertools.pairwise(survival):
        if later > earlier:
            raise ValueError(
                f"survival rises from {earlier!r} to {later!r}; it is the probability that all "
                "positions so far are accepted: did you mean tau_from_conditionals?"
            )
    return sum(survival, start=1)  # type: ignore[return-value]


def tau_by_enumeration(conditionals: Sequence[Fraction]) -> Fraction:
    """Expected tokens per step over all 2**n acceptance patterns, in rational arithmetic.

    Each draft is a Bernoulli draw of its own conditional probability; a pattern yields one token
    plus its leading run of acceptances. Slow and obvious; equals `tau_from_conditionals` exactly.
    """
    expected = Fraction(0)
    for pattern in itertools.product((True, False), repeat=len(conditionals)):
        weight = Fraction(1)
        for accepted, chance in zip(pattern, conditionals, strict=True):
            weight *= chance if accepted else 1 - chance
        expected += weight * (1 + sum(itertools.accumulate(pattern, lambda a, b: a and b)))
    return expected


def survival_from_conditionals(conditionals: Sequence[Number]) -> list[Number]:
    """Running products of the conditional probabilities."""
    for value in conditionals:
        _probability(value, "conditional")
    return list(itertools.accumulate(conditionals, lambda a, b: a * b))


def conditionals_from_survival(survival: Sequence[float]) -> list[float]:
    """Ratios of neighbours; 0 after a survival of 0."""
    return [b / a if a else 0.0 for a, b in itertools.pairwise([1.0, *survival])]


def survival_from_acceptance_lengths(lengths: Sequence[float]) -> list[float]:
    """First differences of the acceptance lengths measured with 1, 2, .. n drafts (bonus included).

    Holds when a longer draft leaves the earlier positions alone; InferenceX lists such lengths.
    """
    return [b - a for a, b in itertools.pairwise([1.0, *lengths])]


def mean_fraction_from_acceptance_length(length: Number, nextn: int) -> Number:
    """`(length - 1) / nextn`, the inverse of `tau_from_mean_fraction`."""
    _acceptance_length(length, nextn)
    return (length - 1) / nextn  # type: ignore[return-value]


def constant_conditional_from_acceptance_length(length: float, nextn: int) -> float:
    """The alpha whose `tau_from_constant_conditional` is `length`, by bisection."""
    _acceptance_length(length, nextn)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if tau_from_constant_conditional(middle, nextn) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _acceptance_length(length: float | Fraction, nextn: int) -> None:
    if nextn < 1 or not 1 <= length <= nextn + 1:
        raise ValueError(
            f"acceptance length {length!r} with {nextn} drafts: it lies in [1, drafts + 1], "
            "bonus token included; add 1 if yours leaves it out"
        )


def speculative_speedup(alpha: float, nextn: int, draft_cost: float) -> float:
    """Wall-clock gain `tau / (nextn * draft_cost + 1)`; `draft_cost` is draft over target step.

    Leviathan et al., theorem 3.8. It assumes that verifying nextn + 1 rows costs one target step.
    """
    return tau_from_constant_conditional(alpha, nextn) / (nextn * draft_cost + 1)


@dataclasses.dataclass(frozen=True)
class MeasuredAcceptance:
    """What a run delivered. Ratios are tokens per request-step; counts are whole numbers.

    `tau` counts tokens the requests kept, `unclipped_tau` the tokens verification released before
    end-of-sequence and token limits cut them. `half_width` is the 95 % normal half-width of `tau`
    as a ratio of sums over requests (infinite for a single request).
    """

    tau: float
    unclipped_tau: float
    half_width: float
    tokens: int
    request_steps: int
    requests: int
    clipped_requests: int
    clipped_tokens: int


def measured_tokens_per_step(
    committed_tokens: Sequence[int],
    request_steps: Sequence[int],
    released_tokens: Sequence[int] | None = None,
) -> MeasuredAcceptance:
    """Useful tokens per request-step, clipped requests counted (the chapter, section 11.6.3).

    Args:
      committed_tokens: per request, decode tokens it kept: cut at its end of sequence or limit.
      request_steps: per request, decode steps that committed them, the cut last one included; a
        step run after the request had finished belongs to none.
      released_tokens: per request, accepted drafts plus one for each of those steps, before the
        cut. Omitted: the same as committed.

    Raises:
      ValueError: lengths differ, a request without steps, or more committed than released.
    """
    released = committed_tokens if released_tokens is None else released_tokens
    kept, steps, raw = (
        np.asarray(v, np.int64) for v in (committed_tokens, request_steps, released)
    )
    if not kept.shape == steps.shape == raw.shape or kept.ndim != 1 or not len(kept):
        raise ValueError(
            f"shapes {kept.shape}, {steps.shape}, {raw.shape}: give one count per request"
        )
    if (steps < 1).any() or (kept < 0).any() or (kept > raw).any():
        raise ValueError(
            "a request has no step, or committed more than its steps released; count decode steps "
            "and decode tokens only (the first token belongs to prefill)"
        )
    tau = kept.sum() / steps.sum()
    count = len(kept)
    spread = math.inf
    if count > 1:
        residual = kept - tau * steps
        spread = math.sqrt(count / (count - 1) * float(residual @ residual)) / float(steps.sum())
    return MeasuredAcceptance(
        tau=float(tau),
        unclipped_tau=float(raw.sum() / steps.sum()),
        half_width=1.959963984540054 * spread,
        tokens=int(kept.sum()),
        request_steps=int(steps.sum()),
        requests=count,
        clipped_requests=int((kept < raw).sum()),
        clipped_tokens=int((raw - kept).sum()),
    )


@dataclasses.dataclass(frozen=True)
class EngineAcceptance:
    """The engine's own counters of fixed-length verification, before any clipping."""

    mean_fraction: Fraction
    survival: tuple[Fraction, ...]
    tau: Fraction


def engine_acceptance(
    accepted_per_step: Sequence[Sequence[int]], requests: int
) -> EngineAcceptance:
    """Counters of steps that each verify the same drafts for `requests` requests.

    Args:
      accepted_per_step: per step, how many requests accepted position 1, 2, .. (never rising).
      requests: requests per step.

    Example: three steps of two requests accepting (2,1,1,0,0), (1,1,0,0,0), (2,2,1,1,0): fraction
    12/30, tau 3, survival (5/6, 4/6, 2/6, 1/6, 0).
    """
    steps, drafts = len(accepted_per_step), len(accepted_per_step[0])
    totals = [sum(step[k] for step in accepted_per_step) for k in range(drafts)]
    rows = steps * requests
    return EngineAcceptance(
        Fraction(sum(totals), rows * drafts),
        tuple(Fraction(total, rows) for total in totals),
        1 + Fraction(sum(totals), rows),
    )
