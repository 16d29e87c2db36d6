"""The page stands alone, parses, and says what the numbers say."""

import dataclasses
import html.parser
import json
import re

import matplotlib
import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.report import claims, over_time, page, plots, records, series, style, write

S = 10**9
RATES = ("request_hit_fraction", "block_hit_fraction", "token_hit_fraction")
VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Checker(html.parser.HTMLParser):
    """Fails on unbalanced tags; collects every address and the text."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def example(requests=500):
    rng = np.random.default_rng(3)
    arrival = np.sort(rng.integers(0, 600 * S, requests))
    start = arrival + rng.integers(0, S, requests)
    first = start + rng.integers(S // 10, S, requests)
    output = rng.integers(1, 40, requests)
    return metrics.timeline(
        arrival=arrival,
        matched=arrival,
        pulled=start,
        fetched=start,
        prefill_start=start,
        first_token=first,
        handed_off=first,
        decode_start=first,
        finish=first + (output - 1) * S // 50,
        input_tokens=np.full(requests, 1000),
        output_tokens=output,
        block_hit_tokens=np.where(np.arange(requests) % 2, 512, 0),
        compute_hit_tokens=np.where(np.arange(requests) % 2, 384, 0),
        prefill_engine=np.arange(requests) % 3,
        decode_engine=np.zeros(requests, int),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    t = example()
    summary = metrics.summarise(t, slo=metrics.Slo(ttft=1.0))
    provenance = [{"parameter": "rate", "value": 3, "tag": "assumed", "source": "<&>"}]
    paths = write.write_run(
        workdir, "A <run> & more", t, summary, provenance=provenance, not_modelled=["jitter"]
    )
    return workdir, t, summary, paths


def test_the_page_parses_and_needs_nothing_from_outside(run):
    text = (run[0] / "report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert all(address.startswith("#") for address in checker.addresses)
    assert not re.search(r"https?:|@import|url\((?!#)|<script|<link|<img", text)
    assert len(checker.ids) == len(set(checker.ids))
    seen = " ".join(checker.text)
    assert "A <run> & more" in seen and "<&>" in seen and "Not modelled here: jitter." in seen
    assert style.INK not in text.split("</style>")[1]  # figures follow the page's colours


def test_every_file_is_there_and_whole(run):
    workdir, t, summary, paths = run
    assert all(p.stat().st_size for p in paths)
    assert not [p for p in workdir.rglob("*") if p.name.endswith(".tmp")]
    written = json.loads((workdir / "summary.json").read_text())
    assert (
        written["ttft_seconds"]["p99"] == summary["ttft_seconds"]["p99"]
        and written["schema_version"] == 1
    )
    assert len(records.read_jsonl(workdir / "results.jsonl")) == len(t.arrival)
    names = {p.name for p in (workdir / "plots").iterdir()}
    assert names == {"latency.png", "stages.png", "over_time.png", "hit_rates.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (workdir / "plots").iterdir())


def test_the_same_run_gives_the_same_bytes(run):
    t = run[1]
    first = plots.distribution({"TTFT": {"": metrics.ttft(t)}})
    second = plots.distribution({"TTFT": {"": metrics.ttft(t)}})
    assert style.png(first) == style.png(second)
    assert style.svg(first, "a") == style.svg(second, "a")


def test_claims_carry_counts_intervals_and_limits(run):
    _, _, summary, _ = run
    text = " ".join(claims.claims(summary, not_modelled=["jitter"]))
    low, high = summary["ttft_seconds"]["p99_interval"]
    assert "500 requests arrived and 500 completed (100 %)" in text
    assert f"{low:.3g} s to {high:.3g} s" in text
    assert "50 % of the requests found some cached prefix" in text
    assert "19.2 % of the prompt tokens" in text  # 384 of 2000
    assert f"{summary['goodput_requests']} of 500" in text


def test_a_short_run_admits_that_it_cannot_bound_its_tail():
    t = example(50)
    summary = metrics.summarise(t)
    assert "too few to bound" in " ".join(claims.claims(summary))
    found = claims.warnings(summary, t, metrics.window(t))
    assert any("cannot bound p99" in w for w in found)
    assert any("warm-up" in w for w in found)


def test_a_growing_queue_is_a_warning_and_a_steady_one_is_not():
    arrival = np.arange(900) * S
    steady = metrics.timeline(arrival, arrival + S, first_token=arrival + S)
    late = arrival + S + np.arange(900) * S
    growing = metrics.timeline(arrival, late, first_token=late)
    for t, expected in ((steady, False), (growing, True)):
        found = claims.warnings(metrics.summarise(t), t, metrics.window(t))
        assert any("steady state" in w for w in found) is expected


@pytest.mark.parametrize("requests", [0, 3])
def test_nothing_completed_still_makes_a_page(tmp_path, requests):
    t = metrics.timeline(np.arange(requests), np.full(requests, -1))
    paths = write.write_run(tmp_path, "nothing", t, metrics.summarise(t))
    Checker().feed(paths[-1].read_text())
    assert not re.search(r"\bnan\b", paths[-1].read_text(), re.IGNORECASE)


def test_plots_take_nan_ties_and_several_runs():
    values = np.array([np.nan, 0.0, 0.1, 0.1])
    made = plots.distribution({"TTFT": {"a": values, "b": np.full(3, np.nan)}}, {"TTFT": 0.2})
    assert style.png(made)
    stages = {"match": 0.0, "decode": None}
    assert style.png(plots.stages({"a": stages, "b": stages}))
    hits = dict(zip(RATES, (0.9, None, 0.3), strict=True))
    assert style.png(plots.hit_rates({"a": hits, "b": hits}))


def test_the_frontier_draws_exactly_the_points_it_was_told():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([3.0, 1.0, 2.0])
    front = np.array([True, False, True])
    made = plots.frontier(
        x, y, front, xlabel="x", ylabel="y", labels="abc", half_width=np.array([0.1, 0, 0])
    )
    lines = {line.get_label(): line.get_xydata().tolist() for line in made.axes[0].lines}
    assert lines["dominated"] == [[2.0, 1.0]]
    assert lines["non-dominated"] == [[1.0, 3.0], [3.0, 2.0]]
    assert {t.get_text() for t in made.axes[0].texts} == {"a", "c"}


def test_the_drawn_curve_is_the_empirical_distribution():
    made = plots.distribution({"TTFT": {"": np.array([4.0, 1.0, 2.0, 3.0])}})
    curve = made.axes[0].lines[0].get_xydata()
    assert curve.tolist() == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1]]


def course(t, slo, up):
    edges = np.array([0.0, 200.0, 400.0, 700.0])
    busy = {"prompt engines": np.array([0.5, 1.0, 0.2])}
    return over_time.Course(
        series.series(t), series.progress(t, slo), slo != metrics.Slo(), busy, up, edges
    )


def drawn(figure):
    """{panel: {line's label: values}}"""
    return {
        ax.get_title(loc="left"): {line.get_label(): line.get_ydata() for line in ax.lines}
        for ax in figure.axes
    }


def test_a_run_over_time_draws_what_it_has():
    t, slo, up = example(), metrics.Slo(ttft=1.0), {"prompt engines": np.array([1.0, 2.0, 0.5])}
    made = drawn(over_time.run(course(t, slo, up)))
    rates = made["Requests per second"]
    assert set(rates) == {"arrivals", "completed", "within the objectives"}
    np.testing.assert_array_equal(rates["within the objectives"], series.progress(t, slo).good)
    assert made["Engines that serve"]["prompt engines"].tolist() == [1.0, 2.0, 0.5]
    assert len(made) == 5
    t = dataclasses.replace(t, compute_hit_tokens=np.zeros(500, int))
    made = drawn(over_time.run(course(t, metrics.Slo(), {})))
    assert len(made) == 3 and "within the objectives" not in made["Requests per second"]


def test_runs_are_compared_line_by_line():
    slo, other = metrics.Slo(ttft=1.0), example(300)
    up = {"prompt engines": np.array([1.0, 1.0, 1.0]), "decode engines": np.array([2.0, 0.0, 1.0])}
    made = drawn(over_time.compared({"a": course(example(), slo, {}), "b": course(other, slo, up)}))
    assert set(made) >= {"Waiting requests", "Goodput, requests per second", "Engines that serve"}
    np.testing.assert_array_equal(made["Waiting requests"]["b"], series.series(other).waiting)
    assert made["Engines that serve"]["b"].tolist() == [3.0, 1.0, 2.0]
    assert set(made["Engines that serve"]) == {"b"}


def test_plots_leave_matplotlibs_global_settings_alone():
    before = dict(matplotlib.rcParams)
    style.svg(plots.hit_rates({"a": dict.fromkeys(RATES, 1.0)}), "x")
    assert dict(matplotlib.rcParams) == before


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    t = example(5)
    monkeypatch.setattr(records.os, "replace", full)
    with pytest.raises(records.WriteError, match=r"summary\.json: No space left"):
        write.write_run(tmp_path, "x", t, metrics.summarise(t))
    assert not list(tmp_path.iterdir())


def test_long_names_may_break_and_nothing_else_changes():
    row = {"parameter": "cache.capacity_gib", "value": "configs/traces/a_b.jsonl.gz", "n": "1.5 s"}
    text = page.render(page.Page("x", tables=[page.Table("t", [row, row | {"n": "-"}])]))
    assert "configs/<wbr>traces/<wbr>a_<wbr>b.<wbr>jsonl.<wbr>gz" in text and "1.5 s" in text
    assert "<td>cache.capacity_gib</td>" in text.replace("<wbr>", "")


def test_page_without_anything_is_still_html():
    checker = Checker()
    checker.feed(page.render(page.Page("empty")))
    assert not checker.open
