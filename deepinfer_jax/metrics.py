"""What a request's times mean and how they are summarised: one definition for engine, service and
simulator.

Latencies are NVIDIA AIPerf's (docs, "AIPerf Metrics Reference"). Two of its names differ from
ours: AIPerf's "Inter Token Latency" is our amortised TPOT, its "Inter Chunk Latency" our ITL.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.percentiles import (  # noqa: F401 (metrics.* is where callers look for them)
    interval_ranks,
    masked_mean,
    masked_percentile,
    namespace,
    nearest_rank,
    percentile,
    percentile_interval,
    summary,
)
from deepinfer_jax.timeline import (  # noqa: F401
    COMPLETED,
    EVENTS,
    MISSING,
    NANOSECONDS_PER_SECOND,
    STAGES,
    STATUSES,
    RequestTimeline,
    account,
    check,
    timeline,
)

Array = Any


def seconds(later: Array, earlier: Array, valid: Array) -> Array:
    """(later - earlier) in seconds [Q], NaN where not `valid`."""
    xp = namespace(later, earlier, valid)
    return xp.where(valid, (later - earlier) / NANOSECONDS_PER_SECOND, xp.nan)


def ttft(t: RequestTimeline) -> Array:
    """Time to first token, seconds [Q]: arrival to the first token. NaN unless completed."""
    return seconds(t.first_token, t.arrival, (t.status == COMPLETED) & (t.first_token >= 0))


def tpot(t: RequestTimeline) -> Array:
    """Time per output token, seconds [Q]: (finish - first token) / (output tokens - 1).

    Amortised over the request, so token bursts of speculation do not show. NaN unless completed
    with two tokens or more. AIPerf prints this as "Inter Token Latency".
    """
    xp = namespace(t.finish)
    valid = (t.status == COMPLETED) & (t.first_token >= 0) & (t.output_tokens > 1)
    return seconds(t.finish, t.first_token, valid) / xp.maximum(t.output_tokens - 1, 1)


def e2e(t: RequestTimeline) -> Array:
    """End-to-end latency, seconds [Q]: arrival to the last token. NaN unless completed."""
    return seconds(t.finish, t.arrival, t.status == COMPLETED)


def itl(token_ticks: np.ndarray, row_splits: np.ndarray) -> np.ndarray:
    """Inter-token latency: the gaps between successive tokens of one request, in seconds.

    Args:
      token_ticks: [T] times of all tokens in ns, request after request, rising inside a request.
      row_splits: [Q + 1]; request i owns token_ticks[row_splits[i]:row_splits[i + 1]].

    Returns:
      float64 [T - (requests with a token)]. Tokens of one step have gaps of 0.
    """
    inside = np.ones(max(len(token_ticks) - 1, 0), bool)
    starts = np.asarray(row_splits)[1:-1]
    inside[starts[(starts > 0) & (starts < len(token_ticks))] - 1] = False
    return np.diff(token_ticks)[inside] / NANOSECONDS_PER_SECOND


def stage_ticks(t: RequestTimeline) -> np.ndarray:
    """Ticks [8, Q] of each of `STAGES`, in their order; of a completed request they sum to `e2e`.

    A time that is missing, or earlier than its predecessor (a fetch that prefill overlaps), takes
    its predecessor's value: its stage lasts 0 and what remains is charged to the next one.
    Example: a co-located engine without hand-off has 0 hand-off and 0 decode wait.
    """
    events = np.stack([np.asarray(getattr(t, name)) for name in EVENTS])
    return np.diff(np.minimum(np.maximum.accumulate(events, axis=0), np.asarray(t.finish)), axis=0)


def stage_seconds(t: RequestTimeline) -> dict[str, np.ndarray]:
    """Seconds [Q] of each of `STAGES`: `stage_ticks`, NaN unless completed."""
    gaps = np.where(np.asarray(t.status) == COMPLETED, stage_ticks(t), np.nan)
    return {name: gap / NANOSECONDS_PER_SECOND for name, gap in zip(STAGES, gaps, strict=True)}


def window(t: RequestTimeline, *, warmup_seconds: float = 0.0, warmup_requests: int = 0) -> Any:
    """bool [Q]: the requests that count, by arrival. Nothing is excluded unless asked for.

    Args:
      warmup_seconds: leave out requests that arrive less than this after the first arrival.
      warmup_requests: leave out this many of the earliest requests, in (arrival, index) order.
    """
    if warmup_seconds and warmup_requests:
        raise ValueError(
            f"warm-up is given as {warmup_seconds} s and as {warmup_requests} requests: keep one"
        )
    arrival = np.asarray(t.arrival)
    since = arrival - (arrival.min() if len(arrival) else 0)
    kept = since >= warmup_seconds * NANOSECONDS_PER_SECOND
    kept[np.argsort(arrival, kind="stable")[:warmup_requests]] = False
    return kept


def span_seconds(t: RequestTimeline, kept: np.ndarray) -> float:
    """The time base of every rate: first arrival to last finish of the kept requests, in seconds.

    AIPerf's benchmark duration. An open-loop run drains after its last arrival and the drain
    counts, so a short run understates the sustained rate.
    """
    finish = np.asarray(t.finish)[kept & (np.asarray(t.finish) >= 0)]
    if not len(finish):
        return 0.0
    return float(finish.max() - np.asarray(t.arrival)[kept].min()) / NANOSECONDS_PER_SECOND


@dataclasses.dataclass(frozen=True)
class Slo:
    """Service-level objectives in seconds per request; None asks nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


def meets(t: RequestTimeline, slo: Slo) -> Array:
    """bool [Q]: completed and within every given SLO (<=). A one-token answer has no TPOT to miss.

    numpy or jit; under jit, goodput is `sum(meets) / seconds`.
    """
    good = t.status == COMPLETED
    if slo.ttft is not None:
        good = good & (ttft(t) <= slo.ttft)
    if slo.tpot is not None:
        good = good & ((t.output_tokens <= 1) | (tpot(t) <= slo.tpot))
    if slo.e2e is not None:
        good = good & (e2e(t) <= slo.e2e)
    return good


def goodput(t: RequestTimeline, slo: Slo, kept: np.ndarray) -> dict[str, Any]:
    """{slo_seconds, goodput_requests, goodput_fraction, goodput_per_second}: all SLOs met at once.

    The fraction is of every kept request, rejected and lost ones included; the rate is per second
    of `span_seconds`.
    """
    met, total = int(np.sum(np.asarray(meets(t, slo)) & kept)), int(np.sum(kept))
    span = span_seconds(t, kept)
    return {
        "slo_seconds": {k: v for k, v in dataclasses.asdict(slo).items() if v is not None},
        "goodput_requests": met,
        "goodput_fraction": met / total if total else None,
        "goodput_per_second": met / span if span else None,
    }


def hit_rates(t: RequestTimeline, kept: np.ndarray, block_tokens: int = 128) -> dict[str, Any]:
    """Prefix hits three ways, over completed kept requests; they are different numbers.

    `request_hit_fraction`: requests with any matched block. `block_hit_fraction`: matched blocks of
    all full prompt blocks. `token_hit_fraction`: prompt tokens whose prefill was skipped (H); the
    only one that enters capacity.
    """
    done = kept & (np.asarray(t.status) == COMPLETED)
    tokens, blocks, skipped = (
        np.asarray(a)[done] for a in (t.input_tokens, t.block_hit_tokens, t.compute_hit_tokens)
    )
    pairs = {
        "request_hit_fraction": (np.sum(blocks > 0), len(blocks)),
        "block_hit_fraction": (np.sum(blocks // block_tokens), np.sum(tokens // block_tokens)),
        "token_hit_fraction": (np.sum(skipped), np.sum(tokens)),
    }
    return {name: float(hit / of) if of else None for name, (hit, of) in pairs.items()}


def throughput(t: RequestTimeline, kept: np.ndarray) -> dict[str, float | None]:
    """{requests, input_tokens, output_tokens}_per_second of `span_seconds`, completed kept ones."""
    done, span = kept & (np.asarray(t.status) == COMPLETED), span_seconds(t, kept)
    totals = {
        "requests_per_second": np.sum(done),
        "input_tokens_per_second": np.sum(np.asarray(t.input_tokens)[done]),
        "output_tokens_per_second": np.sum(np.asarray(t.output_tokens)[done]),
    }
    return {name: float(total) / span if span else None for name, total in totals.items()}


def summarise(
    t: RequestTimeline,
    *,
    slo: Slo | None = None,
    warmup_seconds: float = 0.0,
    warmup_requests: int = 0,
    block_tokens: int = 128,
) -> dict[str, Any]:
    """All of the above for one run, ready for JSON: the core of summary.json.

    Returns:
      One flat mapping, the names of summary.json everywhere:
      requests, completed: ints of the whole run; rejected, lost: {reason: requests};
      window: {rule, requests, seconds}; everything below looks at the window only;
      preempted: requests preempted or rerouted;
      ttft_seconds, tpot_seconds, e2e_seconds: `summary`; stage_seconds: {stage: mean};
      requests_per_second, input_tokens_per_second, output_tokens_per_second: `throughput`;
      request_hit_fraction, block_hit_fraction, token_hit_fraction: `hit_rates`;
      slo_seconds, goodput_requests, goodput_fraction, goodput_per_second: `goodput`, whose numbers
      are None without an SLO.
      Unknown numbers are None, never NaN.

    Raises:
      ValueError: `check` fails, or the warm-up is given twice.
    """
    books = check(t)
    kept = window(t, warmup_seconds=warmup_seconds, warmup_requests=warmup_requests)
    rule = "every request"
    if warmup_seconds:
        rule = f"arrivals from {warmup_seconds:g} s after the first one"
    elif warmup_requests:
        rule = f"all but the first {warmup_requests} arrivals"
    latencies = {"ttft_seconds": ttft(t), "tpot_seconds": tpot(t), "e2e_seconds": e2e(t)}
    done = kept & (np.asarray(t.status) == COMPLETED)
    means = {
        name: float(masked_mean(values, done)) if done.any() else None
        for name, values in stage_seconds(t).items()
    }
    good = goodput(t, slo or Slo(), kept)
    if not good["slo_seconds"]:
        good |= dict.fromkeys(("goodput_requests", "goodput_fraction", "goodput_per_second"))
    return {
        **books,
        "window": {"rule": rule, "requests": int(kept.sum()), "seconds": span_seconds(t, kept)},
        "preempted": int(np.sum(kept & (np.asarray(t.preemptions) > 0))),
        **{name: summary(np.where(kept, values, np.nan)) for name, values in latencies.items()},
        "stage_seconds": means,
        **throughput(t, kept),
        **hit_rates(t, kept, block_tokens),
        **good,
    }
