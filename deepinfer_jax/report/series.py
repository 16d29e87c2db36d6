"""Queues, running requests, busy shares, rates and hits over time, from a timeline's own events."""

from __future__ import annotations

import dataclasses

import numpy as np

from deepinfer_jax.metrics import Slo, meets
from deepinfer_jax.timeline import COMPLETED, NANOSECONDS_PER_SECOND, RequestTimeline


@dataclasses.dataclass(frozen=True)
class Series:
    """Time averages over equal bins. Arrays [B] except `edges`."""

    edges: np.ndarray  # [B + 1] seconds since the first arrival
    waiting: np.ndarray  # requests between arrival and the start of their prefill
    prefilling: np.ndarray  # between the start of prefill and the first token
    moving: np.ndarray  # between the first token and the decode batch (hand-off and its queue)
    decoding: np.ndarray  # between joining a decode batch and the last token
    prefill_busy: np.ndarray  # share of prefill engines with a prompt in prefill
    decode_busy: np.ndarray  # share of decode engines with a request in decode


def average_count(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Exact time average of the number of intervals [start, end) alive in each bin.

    Args:
      starts, ends: [N], end >= start, in the unit of `edges`.
      edges: [B + 1], rising.

    Returns:
      float64 [B]. Times are shifted by edges[0] and summed in float64.
    """
    origin = edges[0]

    def elapsed(times: np.ndarray) -> np.ndarray:
        # sum over i of max(edge - times_i, 0), by sorting once
        times = np.sort(times - origin).astype(np.float64)
        totals = np.concatenate([[0.0], np.cumsum(times)])
        at = (edges - origin).astype(np.float64)
        before = np.searchsorted(times, at, side="right")
        return before * at - totals[before]

    return np.diff(elapsed(starts) - elapsed(ends)) / np.diff(edges)


def busy_share(
    starts: np.ndarray, ends: np.ndarray, engine: np.ndarray, engines: int, edges: np.ndarray
) -> np.ndarray:
    """Share of `engines` with at least one interval alive, averaged over each bin: float64 [B].

    Occupied is not efficient: an engine with one small request counts as busy.
    """
    if not len(starts):
        return np.zeros(len(edges) - 1)
    # Lay the engines end to end on one axis; overlapping intervals then merge in one pass.
    origin = min(starts.min(), edges[0])
    stride = max(ends.max(), edges[-1]) - origin + 1
    begin, end = (x - origin + engine * stride for x in (starts, ends))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > end[:-1]])
    last = np.concatenate([first[1:], [True]])
    lane = engine[order][first] * stride
    merged = begin[first] - lane + origin, end[last] - lane + origin
    return average_count(*merged, edges) / max(engines, 1)


def series(
    t: RequestTimeline, *, bins: int = 200, prefill_engines: int = 0, decode_engines: int = 0
) -> Series:
    """Time averages over `bins` equal bins from the first arrival to the last finish.

    Requests without a stage's times are left out of that stage; one that never finished is left
    out of all but the stages it passed. Engine counts default to the highest index seen + 1,
    which misses engines that never worked: give them where they are known.
    """
    a = {f.name: np.asarray(getattr(t, f.name)) for f in dataclasses.fields(t)[:-1]}
    times = np.stack([a[name] for name in ("arrival", "first_token", "finish")])
    origin = int(a["arrival"].min()) if a["arrival"].size else 0
    end = max(int(times.max()) if times.size else 0, origin + bins)
    edges = np.linspace(origin, end, bins + 1)

    def pair(start: str, stop: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        both = (a[start] >= 0) & (a[stop] >= a[start])
        return a[start][both], a[stop][both], both

    joined = np.where(a["decode_start"] >= 0, a["decode_start"], a["first_token"])
    a["joined"] = np.where(a["output_tokens"] > 1, joined, -1)
    decode, prefill = pair("joined", "finish"), pair("prefill_start", "first_token")
    shares = []
    for (starts, ends, both), name, count in (
        (prefill, "prefill_engine", prefill_engines),
        (decode, "decode_engine", decode_engines),
    ):
        known = a[name][both] >= 0
        engine = a[name][both][known]
        count = count or (int(engine.max()) + 1 if engine.size else 0)
        shares.append(busy_share(starts[known], ends[known], engine, count, edges))
    return Series(
        (edges - origin) / NANOSECONDS_PER_SECOND,
        average_count(*pair("arrival", "prefill_start")[:2], edges),
        average_count(*prefill[:2], edges),
        average_count(*pair("first_token", "joined")[:2], edges),
        average_count(*decode[:2], edges),
        *shares,
    )


@dataclasses.dataclass(frozen=True)
class Progress:
    """What came in and what came out, in equal bins. Arrays [B] except `edges`."""

    edges: np.ndarray  # [B + 1] seconds since the first arrival
    offered: np.ndarray  # arrivals per second
    completed: np.ndarray  # finishes per second
    good: np.ndarray  # finishes per second of requests within the objectives
    hit: np.ndarray  # prompt tokens not recomputed, of the arrivals that completed; NaN for none


def progress(t: RequestTimeline, slo: Slo, *, bins: int = 60) -> Progress:
    """Rates from the first arrival to the last finish. Requests that never arrived are left out."""
    arrival, finish = (np.asarray(x, np.int64) for x in (t.arrival, t.finish))
    came, done = arrival >= 0, np.asarray(t.status) == COMPLETED
    origin = int(arrival[came].min()) if came.any() else 0
    end = max(int(finish.max()) if finish.size else 0, int(arrival.max()) if came.any() else 0)
    edges = np.linspace(origin, max(end, origin + bins), bins + 1)
    width = np.diff(edges) / NANOSECONDS_PER_SECOND

    def count(times: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.histogram(times, edges, weights=weights)[0]

    tokens, skipped = (np.asarray(x)[done] for x in (t.input_tokens, t.compute_hit_tokens))
    with np.errstate(invalid="ignore", divide="ignore"):
        hit = count(arrival[done], skipped) / count(arrival[done], tokens)
    good = np.asarray(meets(t, slo))
    return Progress(
        (edges - origin) / NANOSECONDS_PER_SECOND,
        count(arrival[came]) / width,
        count(finish[done]) / width,
        count(finish[good]) / width,
        hit,
    )
