"""How many drafts a decode step verifies: rows in total by expected throughput, then by request.

S requests, N drafts each. A rate is the chance that a draft and all before it are accepted: the
running product of the confidences. The host chooses the total from rates one step older than those
that split it, so that whether draft i is verified depends neither on confidences of later drafts
nor on the tokens that are verified. The split is one function for the host (numpy) and the device
(jnp, under jit), with the same bits. Source: the released engine's behaviour (variable lengths).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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


def total_rows(rates: np.ndarray, milliseconds: Sequence[float]) -> int:
    """Query rows in S .. S + S * N with the largest expected tokens per time; the fewest of equals.

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
    return len(rates) + int(np.argmax(expected / np.asarray(milliseconds)))


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


def fixed(live: Array, count: int) -> Array:
    """Query rows int32 [S] when every request verifies all `count` drafts."""
    xp = namespace(live)
    return xp.where(live, count + 1, 0).astype(xp.int32)
