"""The non-dominated points of a sweep against brute force; passes combined; what is left out."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deepinfer_jax.cost.frontier import non_dominated
from experiments import harness, plot_pareto


def point(number: int, user: Any, machine: Any, repeat: int = 0, status: str = "done") -> Any:
    made = {"repeat": repeat, "settings": {"concurrency": number, "drafts": 5}, "status": status}
    if status == "failed":
        return {**made, "error": "RuntimeError: out of memory"}
    decode = {"useful_tau": 2.0, "survival": [0.5, 0.25]}
    return {**made, "user_rate": user, "machine_rate": machine, "decode": decode}


rate = st.one_of(st.integers(1, 6).map(float), st.sampled_from([None, math.nan]))


@given(st.lists(st.tuples(rate, rate, st.booleans()), max_size=12))
def test_front_against_brute_force(drawn: list[tuple[Any, Any, bool]]) -> None:
    """Ties stay; a point that failed, or has no rate, is nobody's rival; nothing gives nothing."""
    points = [
        point(i, user, machine, status="done" if done else "failed")
        for i, (user, machine, done) in enumerate(drawn)
    ]
    means = plot_pareto.combine(points)
    rivals = {
        i: (user, machine)
        for i, (user, machine, done) in enumerate(drawn)
        if done and all(r is not None and not math.isnan(r) for r in (user, machine))
    }
    assert [mean.settings["concurrency"] for mean in means] == list(rivals)
    front = non_dominated(*(axis.tolist() for axis in plot_pareto.axes(means)))
    for mean, kept in zip(means, front, strict=True):
        x, y = rivals[mean.settings["concurrency"]]
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in rivals.values())
        assert kept == (not beaten)


def test_passes_are_combined_with_their_interval() -> None:
    rates = [100.0, 104.0, 96.0]
    points = [point(2, r / 2, r, repeat=i) for i, r in enumerate(rates)] + [point(4, 9.0, 36.0)]
    two, four = plot_pareto.combine(points)
    assert (two.passes, two.machine_rate, two.user_rate, two.tau) == (3, 100.0, 50.0, 2.0)
    low, _ = stats.t.interval(0.95, 2, loc=100.0, scale=stats.sem(rates))
    assert two.half_width == pytest.approx((100.0 - low) / 100.0)
    assert (four.passes, four.half_width, four.survival) == (1, 0.0, (0.5, 0.25))


def test_the_newest_record_of_a_point_counts(tmp_path: pathlib.Path) -> None:
    lines = [point(1, 0, 0, status="failed"), point(2, 5.0, 10.0), point(1, 8.0, 8.0)]
    (tmp_path / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_pareto.latest(tmp_path) == [lines[2], lines[1]]
    with pytest.raises(ValueError, match="holds no points"):
        plot_pareto.latest(tmp_path / "nowhere")


def test_lines_join_what_differs_in_concurrency_only() -> None:
    points = [
        {**point(c, 10.0 / c, 5.0 + c), "settings": {"concurrency": c, "drafts": d}}
        for c in (1, 2)
        for d in (0, 5)
    ]
    means = plot_pareto.combine(points)
    assert plot_pareto.curves(means) == {"drafts 0": [0, 2], "drafts 5": [1, 3]}
    drawn = plot_pareto.figure(means, np.array([True, True, False, False])).axes[0]
    marks = [line for line in drawn.lines if line.get_marker() == "o" and len(line.get_xdata())]
    filled = [line.get_markerfacecolor() == line.get_color() for line in marks]
    assert sorted(filled) == [False, False, True, True]
    names = {text.get_text() for text in drawn.get_legend().get_texts()}
    assert names == {"drafts 0", "drafts 5", "not dominated"}


def test_files_and_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "sweep", tmp_path / "pareto"
    source.mkdir()
    points = [point(1, 30.0, 30.0), point(2, 20.0, 40.0), point(4, 9.0, 36.0)]
    points.append(point(8, 0, 0, status="failed"))
    (source / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in points))
    monkeypatch.setattr(plot_pareto, "SWEEP", type("Flag", (), {"value": str(source)}))
    plot_pareto.main(harness.Run("plot_pareto", None, {}, [], 0, target, False))
    made = [json.loads(line) for line in (target / "points.jsonl").read_text().splitlines()]
    assert [p["non_dominated"] for p in made] == [True, True, False]
    assert (target / "plots" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((target / "summary.json").read_text())["failed"] == 1
    out = capsys.readouterr().out
    assert "left out, failed: concurrency=8,drafts=5,repeat=0: RuntimeError" in out
    assert [line.split()[-1] for line in out.splitlines()[3:6]] == ["yes", "yes", "0.25"]
