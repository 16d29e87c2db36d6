"""Prefill cost as a fitted polynomial, and the largest chunk a budget allows.

`cost(q, c) = k0 + k1 q + k2 (q c + q (q + 1) / 2) + k3 c` for q new tokens on c cached ones: a
step's base, the linear layers, the causal pairs, and the reading of what is attended to. All
coefficients are non-negative, so cost never falls when work is added. The engine uses the fit for
chunk sizes and rank choice, the simulator for tiers and caps; both through `StepCost`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, StepCost


@dataclasses.dataclass(frozen=True)
class PrefillQuota:
    """Seconds per step, per new token, per causal pair, per cached token."""

    base: float
    token: float
    pair: float
    context: float = 0.0

    def seconds(self, new_tokens: Any, cached_tokens: Any) -> Any:
        """Predicted seconds of one step with one chunk; numbers or numpy arrays."""
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        work = self.token * new_tokens + self.pair * pairs + self.context * cached_tokens
        return self.base + work

    def femtoseconds(self) -> dict[str, int]:
        """The four `prefill_*` fields of `StepCost`, rounded to whole femtoseconds."""
        names = ("base", "token", "pair", "context")
        return {f"prefill_{n}": round(getattr(self, n) * FEMTOSECONDS_PER_SECOND) for n in names}

    def apply_to(self, cost: StepCost) -> StepCost:
        """`cost` with this fit's prefill coefficients."""
        return dataclasses.replace(cost, **self.femtoseconds())

    @classmethod
    def of(cls, cost: StepCost) -> PrefillQuota:
        """The prefill side of `cost`, in seconds."""
        parts = (cost.prefill_base, cost.prefill_token, cost.prefill_pair, cost.prefill_context)
        return cls(*(float(part) / FEMTOSECONDS_PER_SECOND for part in parts))


@dataclasses.dataclass(frozen=True)
class HeldOutError:
    """Errors |predicted / measured - 1| of samples predicted by fits that did not see them."""

    median: float
    p90: float
    largest: float
    samples: int
    folds: int


@dataclasses.dataclass(frozen=True)
class QuotaFit:
    """A fitted quota, its error on its own samples (median relative) and on held-out ones."""

    quota: PrefillQuota
    training_error: float
    held_out: HeldOutError


def _columns(new_tokens: np.ndarray, cached_tokens: np.ndarray, context: bool) -> np.ndarray:
    pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
    columns = [np.ones_like(new_tokens), new_tokens, pairs]
    return np.stack([*columns, cached_tokens] if context else columns, axis=1)


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """argmin |matrix x - target| over x >= 0 for a handful of columns, by trying every support.

    The optimum is the unconstrained least squares of the columns it uses, so among the 2**n
    supports with a non-negative solution the best is it. Columns are scaled to unit length first.

    Args:
      matrix: [samples, n]. target: [samples].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    width = matrix.shape[1]
    best, best_loss = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for support in itertools.combinations(range(width), size):
            columns = list(support)
            solution, *_ = np.linalg.lstsq(scaled[:, columns], target, rcond=None)
            loss = float(np.sum((scaled[:, columns] @ solution - target) ** 2))
            if (solution >= 0).all() and loss < best_loss:
                best, best_loss = np.zeros(width), loss
                best[columns] = solution
    return best / np.where(scale > 0, scale, 1.0)


def fit_quota(
    new_tokens: Any,
    cached_tokens: Any,
    seconds: Any,
    *,
    context: bool = True,
    weighting: str = "relative",
    folds: int = 5,
) -> QuotaFit:
    """Fits `PrefillQuota` to samples and reports its error on held-out folds.

    Args:
      new_tokens, cached_tokens, seconds: [samples], one chunk and the time of its step each.
      context: whether to fit the per-cached-token term.
      weighting: `relative` minimises squared relative error, `absolute` squared seconds.
      folds: sample i is held out in fold i mod `folds`; shuffle beforehand if order matters.

    Raises:
      ValueError: shapes differ, times not positive, an unknown weighting, or too few samples for
        every fold to keep one sample per coefficient.
    """
    q, c, y = (np.asarray(v, np.float64) for v in (new_tokens, cached_tokens, seconds))
    if not q.shape == c.shape == y.shape or q.ndim != 1 or not (y > 0).all():
        raise ValueError(
            f"shapes {q.shape}, {c.shape}, {y.shape}: give one positive time per (q, c) sample"
        )
    if weighting not in ("relative", "absolute"):
        raise ValueError(f"weighting={weighting!r}: choose 'relative' or 'absolute'")
    columns = _columns(q, c, context)
    needed = columns.shape[1] + -(-columns.shape[1] // max(folds - 1, 1))
    if folds < 2 or len(y) < max(needed, folds):
        raise ValueError(
            f"{len(y)} samples in {folds} folds for {columns.shape[1]} coefficients: "
            f"measure at least {max(needed, folds)} chunks and use two folds or more"
        )
    weight = 1 / y if weighting == "relative" else np.ones_like(y)

    def solve(rows: np.ndarray) -> np.ndarray:
        return non_negative_least_squares(
            columns[rows] * weight[rows, None], y[rows] * weight[rows]
        )

    fold = np.arange(len(y)) % folds
    held = np.concatenate(
        [np.abs(columns[fold == f] @ solve(fold != f) / y[fold == f] - 1) for f in range(folds)]
    )
    solution = solve(np.ones(len(y), bool))
    return QuotaFit(
        PrefillQuota(*(float(value) for value in solution)),
        float(np.median(np.abs(columns @ solution / y - 1))),
        HeldOutError(
            float(np.median(held)),
            float(np.quantile(held, 0.9)),
            float(held.max()),
            len(y),
            folds,
        ),
    )


MAX_CHUNK_BITS = 21
"""Chunks up to 2,097,151 tokens: twice the longest V4.1 context."""


def largest_chunk(cost: StepCost, remaining: Any, cached_tokens: Any, budget: Any) -> Any:
    """Largest q <= `remaining` with `cost.prefill_work(q, cached_tokens) <= budget`, 0 if none.

    Work never falls with q, so the answer is found bit by bit from the highest, exactly, in the
    arguments' own integers: Python ints, numpy int64, or jax int64 under `jit` and `vmap` (x64).
    Only arithmetic is used, so that one definition serves all three.

    Args:
      remaining: tokens left of the prompt, below 2**MAX_CHUNK_BITS. cached_tokens: context below
        them. budget: femtoseconds for this chunk, the step's base already taken off.
        All broadcast together.
    """
    chunk = remaining * 0 + cached_tokens * 0 + budget * 0
    for bit in reversed(range(MAX_CHUNK_BITS)):
        tried = chunk + (1 << bit)
        inside = tried <= remaining
        clipped = tried - (tried - remaining) * (1 - inside)
        fits = inside & (cost.prefill_work(clipped, cached_tokens) <= budget)
        chunk = chunk + (1 << bit) * fits
    return chunk
