"""A run's numbers as AIPerf defines them, beside ours, as table rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_jax.aiperf import DEFINITIONS
from deepinfer_jax.report.table import quantity

OURS = {
    "time_to_first_token": "ttft_seconds",
    "inter_token_latency": "tpot_seconds",
    "inter_chunk_latency": "itl_seconds",
    "request_latency": "e2e_seconds",
    "request_throughput": "requests_per_second",
    "output_token_throughput": "output_tokens_per_second",
    "good_request_count": "goodput_requests",
    "good_request_fraction": "goodput_fraction",
    "goodput": "goodput_per_second",
}
"""The key of summary.json that holds our number of the same thing."""

NOTE = (
    "Mean / p50 / p99 where a metric has a distribution; AIPerf interpolates its percentiles, ours are "
    "values that occurred. Why they differ: deepinfer_jax/METRICS.md."
)


def _text(tag: str, value: Any) -> str:
    unit = "/s" if "throughput" in tag or tag == "goodput" else "s"
    if tag == "good_request_fraction":
        return quantity(value, "%")
    if tag == "good_request_count":
        return quantity(value)
    if isinstance(value, Mapping):
        mean = value["avg"] if "avg" in value else value["mean"]
        return " / ".join(quantity(x, unit) for x in (mean, value["p50"], value["p99"]))
    return quantity(value, unit)


def rows(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """AIPerf's number of every metric and ours, {name of the case: summary.json with `aiperf`}.

    One case: a row per metric, with the reason where the two differ. Several: a row per number.
    """
    made = []
    for definition in DEFINITIONS:
        tag, key = definition.tag, OURS.get(definition.tag, "")
        given = {name: _text(tag, s["aiperf"][tag]) for name, s in summaries.items()}
        ours = {name: _text(tag, s.get(key)) for name, s in summaries.items()}
        if set(given.values()) == {"-"}:
            continue
        if len(summaries) == 1:
            (theirs,), (own,) = given.values(), ours.values()
            numbers = {"metric": tag, "AIPerf": theirs, "ours": own}
            made.append(numbers | {"why they differ": definition.difference or "-"})
            continue
        made.append({"metric": tag, "by": "AIPerf", **given})
        if set(ours.values()) != {"-"}:
            made.append({"metric": "", "by": "us", **ours})
    return made
