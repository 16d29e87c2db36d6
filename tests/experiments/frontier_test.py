"""The frontier sweep: its numbers against numpy, its choices against brute force."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.simulator.simulate import sweep
from experiments import frontier
from experiments.frontier_plots import heat_map, sparse
from experiments.frontier_report import Findings
from experiments.settings import load, resolve_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLO = {"ttft": 0.12, "tpot": 0.008}
LIMITS = (0.006, 0.008, 0.02)


@pytest.fixture(scope="module")
def parameters() -> dict[str, Any]:
    values = resolve_config(load(f"{ROOT}/configs/frontier.py:smoke"))
    values["workload"] |= {"path": f"{ROOT}/{values['workload']['path']}", "requests": 60}
    values["engines"] |= {"total": 3, "slots": 4}
    values["sweep"] |= {"rates": 2, "prompt_engines": (1, 2), "lowest_rate": 10.0}
    return values


@pytest.fixture(scope="module")
def swept(parameters: dict[str, Any]) -> tuple[frontier.Grid, Any, Any]:
    grid = frontier.grid(parameters, seed=3)
    reduced, requests = sweep(
        grid.clusters,
        grid.workloads,
        lambda run: (
            frontier.reduce(run, slo=metrics.Slo(**SLO), limits=LIMITS, warmup=0.25),
            run.requests,
        ),
    )
    return grid, reduced, requests


def test_grid_is_every_rate_with_every_split(swept: Any) -> None:
    grid = swept[0]
    assert list(zip(grid.rate, grid.prompt, strict=True)) == [
        (10.0, 1), (10.0, 2), (320.0, 1), (320.0, 2),
    ]  # fmt: skip
    assert grid.gpus == 3 * 4
    modes = [[int(mode) for mode in cluster.modes] for cluster in grid.clusters]
    assert modes == [[0, 1, 1], [0, 0, 1]] * 2
    slow, fast = grid.workloads[0].arrival, grid.workloads[2].arrival
    assert np.all(np.abs(slow / 32 - fast) <= 1)  # ticks: the same draw, 32 times as fast
    assert 0.5 < slow[-1] / 1e9 / 6 < 2  # 60 requests at 10 per second


def nearest_rank(values: np.ndarray, percent: int) -> float:
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def test_reduction_under_jit_equals_numpy(swept: Any) -> None:
    grid, reduced, t = swept
    for i in range(len(grid.rate)):
        kept = slice(15, None)
        first = (t.first_token[i] - t.arrival[i])[kept] / 1e9
        tokens = t.output_tokens[i][kept]
        whole = (t.finish[i] - t.first_token[i])[kept] / 1e9
        each = np.where(tokens > 1, whole / np.maximum(tokens - 1, 1), 0.0)
        assert np.all(t.status[i] == 0) and reduced["completed"][i] == 60
        within = (first <= SLO["ttft"]) & (each <= SLO["tpot"])
        assert reduced["share_within"][i] == pytest.approx(within.mean(), rel=1e-12)
        kept_tokens = tokens[within].sum() / 45
        assert reduced["tokens_within"][i] == pytest.approx(kept_tokens, rel=1e-12)
        shares = [((first <= SLO["ttft"]) & (each <= limit)).mean() for limit in LIMITS]
        assert reduced["share_by_limit"][i] == pytest.approx(shares, rel=1e-12)
        for percent in (50, 90, 99):
            assert reduced[f"ttft_p{percent}"][i] == pytest.approx(
                nearest_rank(first, percent), rel=1e-12
            )
            assert reduced[f"tpot_p{percent}"][i] == pytest.approx(
                nearest_rank(each[tokens > 1], percent), rel=1e-12
            )
    assert len(set(reduced["share_within"])) > 1, "the objective separates no points"


def test_points_carry_the_rates_that_follow(swept: Any) -> None:
    grid, reduced, _ = swept
    points = frontier.points_of(grid, reduced)
    for i, point in enumerate(points):
        assert point["goodput"] == pytest.approx(grid.rate[i] * reduced["share_within"][i])
        per_gpu = grid.rate[i] * reduced["tokens_within"][i] / 12
        assert point["good_tokens_per_second_per_gpu"] == pytest.approx(per_gpu)
        assert point["user_tokens_per_second"] * point["tpot_p50"] == pytest.approx(1)
    json.dumps(points)


def test_split_without_a_decode_engine_is_refused(parameters: dict[str, Any]) -> None:
    changed = {**parameters, "sweep": {**parameters["sweep"], "prompt_engines": (1, 3)}}
    with pytest.raises(ValueError, match=r"has 3 of engines.total=3"):
        frontier.clusters_by_split(changed, 0)


def made_up(seed: int) -> Findings:
    """Twelve points whose numbers are drawn from few values, so that ties occur."""
    generator = np.random.default_rng(seed)
    points = []
    for rate in (1.0, 2.0, 4.0):
        for prompt in (1, 2, 3, 4):
            share = float(generator.choice([0.0, 0.5, 0.9, 1.0]))
            points.append(
                {
                    "rate": rate,
                    "prompt_engines": prompt,
                    "share_within": share,
                    "goodput": rate * share,
                    "good_tokens_per_second_per_gpu": float(generator.integers(0, 4)),
                    "user_tokens_per_second": float(generator.integers(1, 5)),
                    "share_by_limit": [float(x) for x in np.sort(generator.random(2))],
                    **{
                        f"{name}_p{p}": float(generator.integers(1, 9)) / 100
                        for name in ("ttft", "tpot")
                        for p in (50, 90, 99)
                    },
                }
            )
    parameters = {
        "slo": SLO,
        "attainment": 0.5,
        "engines": {"total": 5},
        "workload": {"requests": 10},
        "hardware": "H100",
        "model": "tiny",
        "title": "made up",
    }
    timing = {"points": 12, "compile_seconds": 1.0, "sweep_seconds": 2.0, "seconds_per_scenario": 1}
    return Findings(points, [0.01, 0.02], parameters, 20, timing)


@pytest.mark.parametrize("seed", range(6))
def test_choices_are_the_best_by_brute_force(seed: int) -> None:
    found = made_up(seed)
    for rate, chosen in zip((1.0, 2.0, 4.0), found.best_of_rate(), strict=True):
        rivals = [p for p in found.points if p["rate"] == rate]
        assert chosen in rivals
        for p in rivals:
            assert (chosen["goodput"], -chosen["ttft_p90"]) >= (p["goodput"], -p["ttft_p90"])
    for i, chosen in enumerate(found.best_of_limit()):
        rates = [p["rate"] for p in found.points if p["share_by_limit"][i] >= 0.5]
        assert (chosen["rate"] if chosen else None) == (max(rates) if rates else None)
    x, y = found.axes()
    for i, kept in enumerate(found.front()):
        beaten = (x >= x[i]) & (y >= y[i]) & ((x > x[i]) | (y > y[i]))
        assert kept == (y[i] > 0 and not beaten.any())


def test_page_tables_and_figures_are_written(tmp_path: pathlib.Path) -> None:
    found = made_up(0)
    found.write(tmp_path, [])
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {
        "points.jsonl", "summary.json", "report.html", "goodput.png", "frontier.png", "latency.png",
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert [row["non_dominated"] for row in rows] == found.front().tolist()
    assert len(found.limit_rows()) == 2 and len(found.best_rows()) == 3
    page = (tmp_path / "report.html").read_text()
    assert all(sentence.split(".")[0] in page for sentence in ("What a faster answer costs",))


def test_heat_map_shows_goodput_in_its_cell() -> None:
    found = made_up(1)
    figure = heat_map(found.points, dots=[], crosses=[], total=5)
    shown = np.asarray(figure.axes[0].collections[0].get_array()).reshape(3, 4)
    wanted = [[p["goodput"] for p in found.points[4 * r : 4 * r + 4]] for r in range(3)]
    assert shown.tolist() == wanted


def test_labels_are_thinned_to_the_front() -> None:
    y = np.arange(31.0)
    shown = sparse([str(i) for i in range(31)], y, y >= 10, gap=0.2)
    assert [text for text in shown if text] == ["12", "18", "24", "30"]
    assert shown[30] == "30"
