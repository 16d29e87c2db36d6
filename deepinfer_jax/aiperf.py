"""AIPerf's metrics of a run, for numbers that stand beside a measurement made with that tool.

Most are ours by another name; the others are computed here from the same timeline. `DEFINITIONS` says
which is which (`METRICS.md` shows it). Source: NVIDIA AIPerf, docs/metrics-reference.md and
src/aiperf/metrics, as published in 2026.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.metrics import RequestTimeline, Slo
from deepinfer_jax.timeline import COMPLETED, NANOSECONDS_PER_SECOND

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Definition:
    """One metric: AIPerf's tag and meaning, what we call ours, and where the two part."""

    tag: str
    meaning: str
    ours: str
    difference: str = ""


DEFINITIONS = (
    Definition(
        "time_to_first_token",
        "request sent to first chunk with content",
        "`metrics.ttft`, arrival to first token",
        "percentiles",
    ),
    Definition(
        "inter_token_latency",
        "(request latency - TTFT) / (output tokens - 1), one value per request",
        "`metrics.tpot`; our ITL is something else",
        "the name; percentiles; with --per-chunk-usage AIPerf subtracts the tokens of the first "
        "chunk where we subtract one, which is what our first steps send",
    ),
    Definition(
        "inter_chunk_latency",
        "gaps between successive chunks of a stream",
        "`metrics.itl`, gaps between successive tokens",
        "tokens of one speculative step come in one chunk: AIPerf has no gap between them, we have 0",
    ),
    Definition(
        "request_latency",
        "request sent to last chunk with content",
        "`metrics.e2e`, arrival to last token",
        "percentiles",
    ),
    Definition(
        "output_token_throughput_per_user",
        "1 / inter_token_latency, one value per request",
        "none: we give TPOT",
        "a mean of inverses, at least the inverse of the mean TPOT",
    ),
    Definition(
        "e2e_output_token_throughput",
        "output tokens / request latency, one value per request",
        "none",
    ),
    Definition(
        "request_throughput",
        "valid requests / (first request sent to last response, of valid requests)",
        "`requests_per_second`",
        "our time base begins with the first arrival, refused or not",
    ),
    Definition(
        "output_token_throughput",
        "output tokens of valid requests / the same time",
        "`output_tokens_per_second`",
        "the time base",
    ),
    Definition(
        "good_request_count",
        "valid requests that have every metric with an objective, within it",
        "`goodput_requests`",
        "an answer of one token has no inter_token_latency: AIPerf counts it as a miss of that "
        "objective, we as met",
    ),
    Definition(
        "good_request_fraction",
        "good requests / (valid + failed requests)",
        "`goodput_fraction`",
        "answers of one token",
    ),
    Definition(
        "goodput",
        "good requests / the same time",
        "`goodput_per_second`",
        "answers of one token; the time base",
    ),
)


def inter_chunk_latency(token_ticks: np.ndarray, row_splits: np.ndarray) -> np.ndarray:
    """Seconds between successive chunks of one request, arguments as of `metrics.itl`.

    A chunk is what one step sends: tokens of equal time.
    """
    gaps = metrics.itl(token_ticks, row_splits)
    return gaps[gaps > 0]


def output_token_throughput_per_user(t: RequestTimeline) -> np.ndarray:
    """Tokens per second [Q] after the first token: 1 / `metrics.tpot`; NaN where that is NaN or 0."""
    each = np.asarray(metrics.tpot(t))
    return np.divide(1.0, each, out=np.full(each.shape, np.nan), where=each > 0)


def e2e_output_token_throughput(t: RequestTimeline) -> np.ndarray:
    """Output tokens per second of the whole request [Q], NaN unless completed in some time."""
    lasted = np.asarray(metrics.e2e(t))
    tokens = np.asarray(t.output_tokens, np.float64)
    return np.divide(tokens, lasted, out=np.full(lasted.shape, np.nan), where=lasted > 0)


def benchmark_seconds(t: RequestTimeline, kept: np.ndarray) -> float:
    """First arrival to last finish of completed kept requests, in seconds; 0 without any."""
    done = kept & (np.asarray(t.status) == COMPLETED)
    if not done.any():
        return 0.0
    lasted = np.asarray(t.finish)[done].max() - np.asarray(t.arrival)[done].min()
    return float(lasted) / NANOSECONDS_PER_SECOND


def good(t: RequestTimeline, slo: Slo) -> np.ndarray:
    """bool [Q]: completed, and each metric with an objective exists and is within it (<=)."""
    met = np.asarray(metrics.meets(t, slo))
    return met if slo.tpot is None else met & (np.asarray(t.output_tokens) > 1)


def statistics(values: np.ndarray) -> dict[str, float | int | None]:
    """{count, avg, p50, p90, p99} of the values that are not NaN; percentiles are interpolated.

    Rank p / 100 * (n - 1) counted from 0, between its neighbours in proportion, where ours is the
    nearest rank: of 1, 2, 3, 10 the p90 is 7.9 (ours: 10).
    """
    values = values[~np.isnan(values)]
    names = ("avg", *(f"p{p}" for p in PERCENTILES))
    if not len(values):
        return {"count": 0, **dict.fromkeys(names)}
    found = (np.mean(values), *np.percentile(values, PERCENTILES, method="linear"))
    return {"count": len(values), **{n: float(x) for n, x in zip(names, found, strict=True)}}


def summarise(
    t: RequestTimeline,
    slo: Slo,
    kept: np.ndarray,
    tokens: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, Any]:
    """AIPerf's numbers by its tags, in seconds and per second, of the kept requests.

    Args:
      slo: without objectives the three of goodput are None.
      kept: bool [Q], of `metrics.window`: AIPerf's profiling phase.
      tokens: (ticks, row splits) of all tokens, of every request; else inter_chunk_latency is None.
    """
    done = kept & (np.asarray(t.status) == COMPLETED)
    span = benchmark_seconds(t, kept)
    each = {
        "time_to_first_token": metrics.ttft(t),
        "inter_token_latency": metrics.tpot(t),
        "request_latency": metrics.e2e(t),
        "output_token_throughput_per_user": output_token_throughput_per_user(t),
        "e2e_output_token_throughput": e2e_output_token_throughput(t),
    }
    made: dict[str, Any] = {n: statistics(np.where(kept, x, np.nan)) for n, x in each.items()}
    made["inter_chunk_latency"] = None
    if tokens is not None:
        made["inter_chunk_latency"] = statistics(inter_chunk_latency(*_of(tokens, done)))
    met = int(np.sum(good(t, slo) & kept)) if slo != Slo() else None
    total = int(np.sum(kept))
    counts = {
        "request_throughput": int(done.sum()),
        "output_token_throughput": int(np.asarray(t.output_tokens)[done].sum()),
        "goodput": met,
    }
    rates = {n: None if x is None or not span else x / span for n, x in counts.items()}
    fraction = None if met is None else met / total if total else 0.0
    return made | rates | {"good_request_count": met, "good_request_fraction": fraction}


def _of(tokens: tuple[np.ndarray, np.ndarray], chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the chosen requests alone."""
    ticks, splits = tokens
    counts = np.diff(splits)
    inside = np.repeat(chosen, counts)
    return ticks[inside], np.concatenate([[0], np.cumsum(np.where(chosen, counts, 0))])


def table() -> str:
    """`DEFINITIONS` in Markdown."""
    rows = ["| AIPerf's tag | what it is | ours | difference |", "|---|---|---|---|"]
    rows += [
        f"| `{d.tag}` | {d.meaning} | {d.ours} | {d.difference or 'none'} |" for d in DEFINITIONS
    ]
    return "\n".join(rows)
