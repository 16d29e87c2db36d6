"""How many drafts a decode step verifies: rows in total by expected throughput, then by request.

S requests, N drafts each. A rate is the chance that a draft and all before it are accepted: the
running product of the confidences. The host chooses the total from rates one step older than those
that split it, so that whether draft i is verified depends neither on confidences of later drafts
nor on the tokens that are verified. The split is one function for the host (numpy) and the device
(jnp, under jit), with the same bits. Source: the released engine's behaviour (variable lengths).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.engine.step_curve import Drift, StepCurve
from deepinfer_jax.percentiles import namespace
from deepinfer_jax.rules import require

Array = Any


def cumulative(confidences: Array) -> Array:
    """Rates float32 [S, N] of confidences [S, N]; products in one order on host and device."""
    xp = namespace(confidences)
    columns = [confidences[:, 0].astype(xp.float32)] if confidences.shape[1] else []
    for i in range(1, confidences.shape[1]):
        columns.append(columns[-1] * confidences[:, i].astype(xp.float32))
    return xp.stack(columns, axis=1) if columns else confidences.astype(xp.float32)


def fill(rates: Sequence[Sequence[float]], pending: Sequence[bool], count: int) -> np.ndarray:
    """Rates float32 [S, count] where some are not known.

    Args:
      rates: of each request, () for unknown.
      pending: a proposal exists or is being made (1.0 stands for its rates); else 0.0 does.
    """
    rows = [r or [float(p)] * count for r, p in zip(rates, pending, strict=True)]
    return np.array(rows, np.float32).reshape(len(rows), count)


def total_rows(rates: np.ndarray, milliseconds: Sequence[float]) -> tuple[int, float]:
    """Query rows in S .. S + S * N with the largest expected tokens per millisecond, and these.

    Of equals the fewest rows.

    Args:
      rates: [S, N] older rates.
      milliseconds: time of a step of S, S + 1, ..., S + S * N rows (`StepCurve.times`).
    """
    require(
        len(milliseconds) == rates.size + 1,
        f"{len(milliseconds)} step times for {rates.size} drafts; give one per draft and one more",
    )
    best = np.sort(rates.astype(np.float64), axis=None)[::-1]
    expected = len(rates) + np.concatenate([[0.0], np.cumsum(best)])
    throughput = expected / np.asarray(milliseconds)
    at = int(np.argmax(throughput))
    return len(rates) + at, float(throughput[at])


def split(rates: Array, drafts: Array, live: Array) -> Array:
    """Query rows int32 [S] of each request: one, and one for each of its drafts among the best.

    Args:
      rates: float32 [S, N], falling along N; equals go to the lower request, then draft.
      drafts: int, verified in all: total rows less the live requests; at most live * N.
      live: bool [S]; idle rows get 0.
    """
    xp = namespace(rates, drafts, live)
    flat = xp.where(live[:, None], rates, -1.0).reshape(-1)
    order = xp.argsort(-flat, stable=True)
    rank = xp.argsort(order, stable=True).reshape(rates.shape)
    count = (rank < drafts).sum(axis=1) + 1
    return xp.where(live, count, 0).astype(xp.int32)


class Chooser:
    """`decode.Lengths` of an engine whose decode steps are rectangles, sequences times a width.

    A rectangle takes its time whatever is verified in it. So the width is what is chosen, and in it
    every draft is verified that may be accepted.
    """

    def __init__(self, curves: Mapping[int, StepCurve], nextn: int) -> None:
        """No step was seen yet.

        Args:
          curves: by bucket of sequences b, ascending: milliseconds of b * width query rows for each
            width.
          nextn: drafts proposed per step.
        """
        self.curves, self.nextn = curves, nextn
        self.drifts = {b: Drift() for b in curves}

    def __call__(
        self, rates: Sequence[Sequence[float]], pending: Sequence[bool]
    ) -> tuple[int, int]:
        """(drafts to verify in all, query rows of a request at most) for older rates, see `fill`."""
        known, requests = fill(rates, pending, self.nextn), len(rates)
        bucket = self._bucket(requests)
        curve, slope = self.curves[bucket], self.drifts[bucket].slope
        best = (0.0, 0, 0)
        for size in curve.sizes:
            width, (time,) = size // bucket, curve.times(size, size, slope)
            worth = known[:, : width - 1]
            total, throughput = total_rows(worth, [time] * (worth.size + 1))
            if throughput > best[0]:
                best = throughput, total - requests, width
        return best[1:]

    def observe(self, requests: int, width: int, milliseconds: float) -> None:
        """A decode step took so long, from the end of the step before or its own beginning."""
        bucket = self._bucket(requests)
        self.drifts[bucket].record(self.curves[bucket], bucket * width, milliseconds)

    def _bucket(self, requests: int) -> int:
        return next(b for b in self.curves if b >= requests)
