"""Nearest-rank percentiles with distribution-free intervals; masked means; numpy or jit."""

from __future__ import annotations

import fractions
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def namespace(*arrays: Array) -> ModuleType:
    """jax.numpy if any argument is a jax array, else numpy."""
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def nearest_rank(percent: float, count: Array) -> Array:
    """ceil(percent / 100 * count), at least 1, in exact integers. `count`: int or int array.

    Example: percent 99, count 200 -> 198; percent 50, count 5 -> 3.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percentile {percent} is outside (0, 100]: give percent, not a fraction")
    share = fractions.Fraction(str(percent)) / 100
    top, bottom = share.numerator, share.denominator
    # Split so that count * top cannot overflow int32: the remainder stays below bottom.
    rank = count // bottom * top - (-(count % bottom * top) // bottom)
    return namespace(count).maximum(rank, 1)


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean over the last axis where `mask` holds, NaN where it never does. numpy or jit."""
    xp = namespace(values, mask)
    values, mask = xp.broadcast_arrays(xp.asarray(values) * 1.0, mask)
    count = xp.sum(mask, axis=-1)
    total = xp.sum(xp.where(mask, values, 0.0), axis=-1)
    return xp.where(count > 0, total / xp.maximum(count, 1), xp.nan)


def masked_percentile(values: Array, mask: Array, percent: float) -> Array:
    """Nearest-rank percentile over the last axis where `mask` holds, NaN if nowhere. numpy or jit.

    Args:
      values: numeric [..., Q]; must not be NaN where `mask` holds.
      mask: bool, broadcast against `values`.
      percent: in (0, 100], static under jit.
    """
    xp = namespace(values, mask)
    values, mask = xp.broadcast_arrays(xp.asarray(values), mask)
    if values.shape[-1] == 0:
        return xp.full(values.shape[:-1], xp.nan)
    floating = np.issubdtype(values.dtype, np.floating)
    worst = xp.asarray(np.inf if floating else np.iinfo(values.dtype).max, values.dtype)
    count = xp.sum(mask, axis=-1)
    index = xp.clip(nearest_rank(percent, count) - 1, 0, values.shape[-1] - 1)
    ordered = xp.sort(xp.where(mask, values, worst), axis=-1)
    picked = xp.take_along_axis(ordered, index[..., None], axis=-1)[..., 0]
    return xp.where(count > 0, picked, xp.nan)


def percentile(values: np.ndarray, percent: float) -> float:
    """Nearest-rank percentile of the values that are not NaN; NaN if there are none."""
    values = np.asarray(values, np.float64)
    return float(masked_percentile(values, ~np.isnan(values), percent))


def interval_ranks(count: int, percent: float, confidence: float = 0.95) -> tuple[int, int]:
    """Ranks (l, u) such that the true percentile lies in [X_(l), X_(u)] with `confidence`.

    Distribution-free: the number of `count` independent values at or below the percentile is
    Binomial(count, percent / 100), and each tail outside the ranks is at most
    (1 - confidence) / 2 (David and Nagaraja, Order Statistics, section 7.1). l = 0 or
    u = count + 1 means that so few values do not bound that side (p99 needs 368 for u).
    """
    q = percent / 100
    spread = int(12 * np.sqrt(count * q * (1 - q))) + 40
    ks = np.arange(max(0, int(count * q) - spread), min(count, int(count * q) + spread) + 1)
    steps = np.log((count - ks[:-1]) / (ks[:-1] + 1) * q / (1 - q))
    log_mass = np.concatenate([[0.0], np.cumsum(steps)])
    mass = np.exp(log_mass - log_mass.max())
    mass /= mass.sum()
    tail = (1 - confidence) / 2
    below = int(np.sum(np.cumsum(mass) <= tail))  # the ks whose P(B <= k) is inside the tail
    above = int(np.sum(np.cumsum(mass[::-1]) <= tail))
    return int(ks[0]) + below, int(ks[-1]) + 1 - above


def percentile_interval(
    values: np.ndarray, percent: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """Confidence interval of a percentile; None on a side that the sample cannot bound.

    The values are taken as independent. Requests of one run share queues, so the real
    uncertainty is larger: repeat with other seeds.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    ordered = ordered[~np.isnan(ordered)]
    if not len(ordered):
        return None, None
    low, high = interval_ranks(len(ordered), percent, confidence)
    return (
        float(ordered[low - 1]) if low >= 1 else None,
        float(ordered[high - 1]) if high <= len(ordered) else None,
    )


def summary(values: np.ndarray) -> dict[str, Any]:
    """{count, mean, p50, p90, p99, p99_interval}; NaN values are left out of all, count included.

    `p99_interval` is the 95 % interval of `percentile_interval`. Without values, numbers are None.
    """
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        empty = dict.fromkeys(("mean", "p50", "p90", "p99"))
        return {"count": 0, **empty, "p99_interval": [None, None]}
    points = {f"p{p}": percentile(values, p) for p in (50, 90, 99)}
    interval = list(percentile_interval(values, 99))
    return {"count": len(values), "mean": float(values.mean()), **points, "p99_interval": interval}
