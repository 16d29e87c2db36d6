"""Operating points of a decode configuration: user speed against throughput, and who is dominated.

x = steps/s * tau (tokens/s/user), y = steps/s * requests * tau / CP (tokens/s/GPU); requests are
per DP rank (the chapter, section 11.6). Neither is a latency percentile: 1/x is an amortised time
per token that shows no gaps between bursts, no queueing and no time to first token. In a prefill
figure the mean step time likewise omits what a request waited before its step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """One measured or predicted point of one configuration.

    `tau` is the tokens per request-step of *this* point. `half_width` is the relative 95 %
    half-width of the step rate (0 for a single run or a prediction).
    """

    requests: int  # per DP rank
    steps_per_second: float
    tau: float
    context_parallel: int = 1
    runs: int = 1
    half_width: float = 0.0

    @property
    def user_rate(self) -> float:
        """Tokens per second of one user."""
        return self.steps_per_second * self.tau

    @property
    def device_rate(self) -> float:
        """Tokens per second of one device."""
        return self.steps_per_second * self.requests * self.tau / self.context_parallel


def non_dominated(x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """Bool [n]: no other point is at least as good on both axes and better on one. Ties are kept.

    Larger is better on both. O(n log n): in order of falling x, a point survives if its y is the
    best among equal x and beats every y seen at larger x.
    """
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if xs.shape != ys.shape or xs.ndim != 1 or np.isnan(xs).any() or np.isnan(ys).any():
        raise ValueError(f"shapes {xs.shape} and {ys.shape}: give two equal lists without NaN")
    keep = np.zeros(len(xs), bool)
    order = np.lexsort((-ys, -xs))
    best, best_x = -math.inf, math.inf
    for i in order:
        if ys[i] > best or (ys[i] == best and xs[i] == best_x):
            keep[i] = True
            best, best_x = ys[i], xs[i]
    return keep


def frontier(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The non-dominated points, in the order given."""
    keep = non_dominated([p.user_rate for p in points], [p.device_rate for p in points])
    return [p for p, kept in zip(points, keep, strict=True) if kept]


def points_from_records(
    records: Sequence[Mapping[str, Any]],
    *,
    fixed: Sequence[str],
    tau: float | Mapping[int, float],
) -> list[OperatingPoint]:
    """Points of one configuration from raw records; repeated runs are combined, not overwritten.

    Args:
      records: each with `requests` (per DP rank), `steps_per_second`, optionally
        `context_parallel`, and every key of `fixed`.
      fixed: keys that must be equal in all records (model, EP, DP, context length, draft length..).
      tau: one value, or one per request count.

    Returns:
      One point per request count, ascending: the mean step rate with its Student t half-width.

    Raises:
      ValueError: records of different configurations, or a request count without a tau.
    """
    _refuse_mixed(records, [*fixed, "context_parallel"])
    runs: dict[int, list[float]] = {}
    for record in records:
        runs.setdefault(int(record["requests"]), []).append(float(record["steps_per_second"]))
    points = []
    for requests, rates in sorted(runs.items()):
        if isinstance(tau, Mapping) and requests not in tau:
            raise ValueError(f"no tau for {requests} requests; measured are {sorted(tau)}")
        mean, half = mean_interval(rates)
        points.append(
            OperatingPoint(
                requests,
                mean,
                tau[requests] if isinstance(tau, Mapping) else tau,
                int(records[0].get("context_parallel", 1)),
                len(rates),
                half / mean if len(rates) > 1 else 0.0,
            )
        )
    return points


def _refuse_mixed(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    missing = object()
    for key in keys:
        values = [
            record.get(key, 1 if key == "context_parallel" else missing) for record in records
        ]
        if any(value is missing for value in values):
            raise ValueError(f"a record lacks {key!r}; every record states its configuration")
        distinct = [v for i, v in enumerate(values) if v not in values[:i]]
        if len(distinct) > 1:
            raise ValueError(
                f"records mix {key}={distinct}; a frontier compares one configuration, "
                "so select one value or draw several curves"
            )


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Mean and Student t half-width; infinite for one value."""
    sample = np.asarray(values, np.float64)
    if not len(sample):
        raise ValueError("no values: a mean needs at least one run")
    if len(sample) == 1:
        return float(sample[0]), math.inf
    error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return float(sample.mean()), student_t_quantile(confidence, len(sample) - 1) * error


def student_t_quantile(confidence: float, degrees: int) -> float:
    """t with P(|T| <= t) = `confidence`, by bisection on the exact finite series.

    Abramowitz and Stegun 26.7.3-4, for whole degrees of freedom.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"confidence={confidence!r}, degrees={degrees!r}: need (0, 1) and >= 1")
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) * tan(angle))."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
