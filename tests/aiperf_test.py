"""AIPerf's metrics on runs small enough to be worked out by hand, and where they part from ours."""

import pathlib

import numpy as np
import pytest

from deepinfer_jax import aiperf, metrics
from deepinfer_jax.report import beside

S = 10**9
ALL = np.ones(5, bool)


def run():
    """Refused at 0 s; four completed, the third with one token, the last with two at one moment."""
    seconds = np.array([S, S, S, S, S])
    return metrics.timeline(
        arrival=np.array([0, 1, 2, 3, 4]) * seconds,
        first_token=np.where(np.arange(5) == 0, -1, np.array([0, 2, 5, 4, 6]) * seconds),
        finish=np.where(np.arange(5) == 0, -1, np.array([0, 6, 7, 4, 11]) * seconds),
        input_tokens=[9, 300, 200, 100, 50],
        output_tokens=[0, 5, 3, 1, 2],
        status=[2, 0, 0, 0, 0],
    )


def test_every_tag_has_a_definition_and_a_value():
    made = aiperf.summarise(run(), metrics.Slo(ttft=1.0), ALL)
    assert set(made) == {d.tag for d in aiperf.DEFINITIONS}


def test_latencies_are_ours_but_percentiles_lie_between_ranks():
    # TTFT 1, 3, 1, 2; latency 5, 5, 1, 7; time per further token 4/4, 2/2, none, 5/1.
    made = aiperf.summarise(run(), metrics.Slo(), ALL)
    assert made["time_to_first_token"] == {
        "count": 4, "avg": 1.75, "p50": 1.5, "p90": pytest.approx(2.7), "p99": pytest.approx(2.97),
    }  # fmt: skip
    assert made["request_latency"]["avg"] == 4.5
    assert made["inter_token_latency"] == {
        "count": 3, "avg": pytest.approx(7 / 3), "p50": 1.0, "p90": pytest.approx(4.2),
        "p99": pytest.approx(4.92),
    }  # fmt: skip
    assert metrics.summarise(run())["ttft_seconds"]["p90"] == 3  # nearest rank: a value there is


def test_rates_of_users_are_means_of_inverses():
    made = aiperf.summarise(run(), metrics.Slo(), ALL)
    users = made["output_token_throughput_per_user"]
    assert users["avg"] == pytest.approx((1 + 1 + 1 / 5) / 3) and users["p50"] == 1
    assert users["avg"] > 1 / made["inter_token_latency"]["avg"]
    whole = made["e2e_output_token_throughput"]
    assert whole["avg"] == pytest.approx((5 / 5 + 3 / 5 + 1 / 1 + 2 / 7) / 4)


def test_the_time_base_is_that_of_valid_requests():
    t = run()
    made, ours = aiperf.summarise(t, metrics.Slo(), ALL), metrics.summarise(t)
    assert made["request_throughput"] == 4 / 10 and ours["requests_per_second"] == 4 / 11
    assert made["output_token_throughput"] == 11 / 10
    assert ours["output_tokens_per_second"] == 11 / 11
    assert made["goodput"] is made["good_request_count"] is made["good_request_fraction"] is None


def test_an_answer_of_one_token_misses_an_objective_on_the_time_between_tokens():
    t, slo = run(), metrics.Slo(ttft=2.0, tpot=1.0)
    made, ours = aiperf.summarise(t, slo, ALL), metrics.summarise(t, slo=slo)
    assert made["good_request_count"] == 1 and ours["goodput_requests"] == 2
    assert made["good_request_fraction"] == 1 / 5 and ours["goodput_fraction"] == 2 / 5
    assert made["goodput"] == 1 / 10 and ours["goodput_per_second"] == 2 / 11
    # Without that objective they agree.
    slo = metrics.Slo(ttft=2.0)
    made, ours = aiperf.summarise(t, slo, ALL), metrics.summarise(t, slo=slo)
    assert made["good_request_count"] == ours["goodput_requests"] == 3


def test_chunks_are_steps_and_those_of_left_out_requests_do_not_count():
    # Request 1 sends one token, then bursts of 3 and 1; request 4 one burst of two.
    ticks = np.array([2, 4, 4, 4, 6, 5, 6, 7, 4, 6, 11]) * S
    splits = np.array([0, 0, 5, 8, 9, 11])
    assert aiperf.inter_chunk_latency(ticks, splits).tolist() == [2, 2, 1, 1, 5]
    assert metrics.itl(ticks, splits).tolist() == [2, 0, 0, 2, 1, 1, 5]
    late = np.arange(5) > 1
    made = aiperf.summarise(run(), metrics.Slo(), late, (ticks, splits))
    assert made["inter_chunk_latency"]["count"] == 3
    assert made["inter_chunk_latency"]["avg"] == pytest.approx(7 / 3)


def test_nothing_completed_is_no_error():
    t = metrics.timeline(np.array([0, S]), np.array([-1, -1]))
    made = aiperf.summarise(t, metrics.Slo(ttft=1.0), np.ones(2, bool))
    assert made["request_throughput"] is None and made["goodput"] is None
    assert made["good_request_fraction"] == 0 and made["request_latency"]["count"] == 0


def test_the_report_shows_both_numbers_and_the_reason():
    slo = metrics.Slo(ttft=2.0, tpot=1.0)
    told = metrics.summarise(run(), slo=slo) | {"aiperf": aiperf.summarise(run(), slo, ALL)}
    rows = {row["metric"]: row for row in beside.rows({"": told})}
    assert "inter_chunk_latency" not in rows  # no token times were recorded
    first = rows["time_to_first_token"]
    assert first["AIPerf"] == "1.75 s / 1.5 s / 2.97 s" and first["ours"] == "1.75 s / 1 s / 3 s"
    good = rows["good_request_count"]
    assert (good["AIPerf"], good["ours"]) == ("1", "2") and "one token" in good["why they differ"]
    two = [r for r in beside.rows({"a": told, "b": told}) if r["by"] == "us"]
    assert {"by": "us", "metric": "", "a": "2", "b": "2"} in two


def test_the_page_shows_the_definitions():
    page = pathlib.Path(aiperf.__file__).with_name("METRICS.md").read_text()
    assert aiperf.table() in page
