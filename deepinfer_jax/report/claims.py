"""Sentences that a run's numbers support, with their counts, intervals and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.metrics import COMPLETED, RequestTimeline, percentile, ttft
from deepinfer_jax.report.table import quantity, slo_text

ENOUGH_FOR_P99 = 368  # fewest values whose 95 % interval of p99 is bounded above (0.99**n <= 2.5 %)


def claims(summary: Mapping[str, Any], *, not_modelled: Sequence[str] = ()) -> list[str]:
    """What `metrics.summarise` says, in sentences; a number that is missing yields no sentence.

    Args:
      not_modelled: what the run leaves out and a reader might expect, as noun phrases.
    """
    sentences = [_books(summary), _window(summary)]
    sentences += [_latency(summary), _stages(summary), _rates(summary), _goodput(summary)]
    sentences += [_hits(summary)]
    if not_modelled:
        sentences.append(f"Not modelled here: {'; '.join(not_modelled)}.")
    return [sentence for sentence in sentences if sentence]


def comparison(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence per run, for runs that share a page: {name: `metrics.summarise`}."""
    sentences = []
    for name, s in summaries.items():
        text = f"{name}: {s['completed']:,} of {s['requests']:,} requests completed"
        if s["ttft_seconds"]["count"]:
            text += (
                f"; TTFT {quantity(s['ttft_seconds']['p50'], 's')} in the median and "
                f"{quantity(s['ttft_seconds']['p99'], 's')} at p99"
            )
        if s["tpot_seconds"]["count"]:
            text += f", TPOT {quantity(s['tpot_seconds']['p50'], 's')} in the median"
        if s["request_hit_fraction"]:
            text += (
                f"; {quantity(s['request_hit_fraction'], '%')} of the requests hit a prefix, "
                f"{quantity(s['token_hit_fraction'], '%')} of the tokens were not recomputed"
            )
        if s["goodput_fraction"] is not None:
            text += f"; {quantity(s['goodput_fraction'], '%')} met {slo_text(s, ' and ')}"
        sentences.append(text + ".")
    return sentences


def _books(books: Mapping[str, Any]) -> str:
    total, done = books["requests"], books["completed"]
    if not total:
        return "No request arrived."
    text = f"{total:,} requests arrived and {done:,} completed ({quantity(done / total, '%')})"
    rest = {**books["rejected"], **books["lost"]}
    if not rest:
        return text + "; none was rejected or lost."
    return text + "; " + ", ".join(f"{n:,} {reason}" for reason, n in rest.items()) + "."


def _window(summary: Mapping[str, Any]) -> str:
    window, count = summary["window"], summary["e2e_seconds"]["count"]
    return (
        f"The latencies and rates below cover {window['rule']}: {window['requests']:,} requests, "
        f"{count:,} of them completed, over {quantity(window['seconds'], 's')} from the first "
        "arrival to the last finish."
    )


def _latency(summary: Mapping[str, Any]) -> str:
    first, each = summary["ttft_seconds"], summary["tpot_seconds"]
    if not first["count"]:
        return ""
    low, high = first["p99_interval"]
    text = (
        f"Half of the requests had their first token within {quantity(first['p50'], 's')}, 99 % "
        f"within {quantity(first['p99'], 's')}"
    )
    if high is None:
        text += (
            f"; {first['count']:,} requests are too few to bound that p99 from above "
            f"({ENOUGH_FOR_P99} is the least)."
        )
    else:
        text += (
            f" (95 % interval {quantity(low, 's')} to {quantity(high, 's')} if requests were "
            "independent; they share queues, so repeat with other seeds before comparing tails)."
        )
    if each["count"]:
        text += (
            f" Each further token then took {quantity(each['p50'], 's')} in the median and "
            f"{quantity(each['p99'], 's')} at p99, averaged over a request: gaps between bursts "
            "are larger."
        )
    return text


def _stages(summary: Mapping[str, Any]) -> str:
    stages = {name: value for name, value in summary["stage_seconds"].items() if value}
    total = sum(stages.values())
    if not total:
        return ""
    ranked = sorted(stages, key=lambda name: -stages[name])[:2]
    parts = " and ".join(f"{quantity(stages[s] / total, '%')} to {s}" for s in ranked)
    parts = parts.replace(" to ", " went to ", 1)
    return f"The mean request took {quantity(total, 's')} end to end, of which {parts}."


def _rates(summary: Mapping[str, Any]) -> str:
    if not summary["requests_per_second"]:
        return ""
    return (
        f"Completed work: {quantity(summary['requests_per_second'])} requests, "
        f"{quantity(summary['input_tokens_per_second'])} input and "
        f"{quantity(summary['output_tokens_per_second'])} output tokens per second, the final "
        "drain included."
    )


def _goodput(summary: Mapping[str, Any]) -> str:
    met, fraction = summary["goodput_requests"], summary["goodput_fraction"]
    if fraction is None:
        return ""
    return (
        f"{met:,} of {summary['window']['requests']:,} requests ({quantity(fraction, '%')}) met "
        f"{slo_text(summary, ' and ')}; that is a goodput of "
        f"{quantity(summary['goodput_per_second'])} requests per second. "
        "Rejected and lost requests count as misses."
    )


def _hits(rates: Mapping[str, Any]) -> str:
    if not rates["request_hit_fraction"]:
        return ""
    return (
        f"{quantity(rates['request_hit_fraction'], '%')} of the requests found some cached "
        f"prefix, but {quantity(rates['token_hit_fraction'], '%')} of the prompt tokens were not "
        f"recomputed ({quantity(rates['block_hit_fraction'], '%')} of the blocks matched); "
        "capacity follows the tokens."
    )


def drift(t: RequestTimeline, kept: np.ndarray) -> tuple[float, float]:
    """Median TTFT (seconds) of the first and of the last third of the kept arrivals; NaN if none.

    In a steady run they are alike. A last third several times slower means a queue that grows:
    the percentiles then depend on the length of the run.
    """
    done = np.flatnonzero(kept & (np.asarray(t.status) == COMPLETED))
    done = done[np.argsort(np.asarray(t.arrival)[done], kind="stable")]
    third = len(done) // 3
    waits = np.asarray(ttft(t))[done]
    if not third:
        return float("nan"), float("nan")
    return percentile(waits[:third], 50), percentile(waits[-third:], 50)


def warnings(summary: Mapping[str, Any], t: RequestTimeline, kept: np.ndarray) -> list[str]:
    """What a reader must know before quoting the numbers; [] when there is nothing."""
    found = []
    count = summary["ttft_seconds"]["count"]
    missed = summary["requests"] - summary["completed"]
    if missed:
        found.append(
            f"{missed:,} of {summary['requests']:,} requests did not complete, and latencies "
            "describe the ones that did."
        )
    if count < ENOUGH_FOR_P99:
        found.append(
            f"{count:,} completed requests cannot bound p99 from above; use {ENOUGH_FOR_P99} or "
            "more."
        )
    early, late = drift(t, kept)
    if late > 2 * early and late - early > 1e-3:
        found.append(
            f"The median TTFT grew from {quantity(early, 's')} in the first third of the arrivals "
            f"to {quantity(late, 's')} in the last: the system was not in a steady state, so the "
            "percentiles depend on how long the run is."
        )
    if summary["window"]["rule"] == "every request":
        found.append("No warm-up was excluded: the empty system at the start is in the numbers.")
    return found
