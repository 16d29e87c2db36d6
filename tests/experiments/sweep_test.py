"""A sweep over a made-up engine: every point once, raw lines kept, failures noted, resumed."""

import json
import pathlib
import sys
from typing import Any

import pytest
from absl import flags

from experiments import benchmark, harness, settings, sweep

ROOT = pathlib.Path(__file__).parents[2]


def parameters(**changes: Any) -> dict[str, Any]:
    point = {"model": "none", "concurrency": 1, "drafts": 5, "overlap": True}
    grid = {"concurrency": [1, 4], "drafts": [0, 5]}
    return {"name": "sweep", "point": point, "grid": grid, "repeats": 2, **changes}


def run(workdir: pathlib.Path | None, resuming: bool = False, **changes: Any) -> harness.Run:
    return harness.Run("sweep", None, parameters(**changes), [], 7, workdir, resuming)


class Engines:
    """Stands in for `benchmark.measure`: three tokens a step and a tenth of a second with drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.broken: set[tuple[int, int]] = set()
        monkeypatch.setattr(benchmark, "measure", self.measure)

    def measure(self, asked: dict[str, Any], seed: int) -> tuple[dict[str, Any], list[Any]]:
        key = asked["concurrency"], asked["drafts"]
        self.asked.append((*key, seed))
        if key in self.broken:
            raise RuntimeError("out of memory")
        tau = 3.0 if asked["drafts"] else 1.0
        decode = {"steps": 20, "seconds": 2.0, "useful_tau": tau, "survival": [0.5]}
        lines = [{"stage": "decode", "token_times": [0.1]}] * asked["concurrency"]
        return {"prompt": {"rows_per_second": 9.0}, "decode": decode}, lines


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(monkeypatch)


def journal(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "points.jsonl").read_text().splitlines()]


def test_every_point_once_with_its_own_rates(engines: Engines, tmp_path: pathlib.Path) -> None:
    sweep.main(run(tmp_path))
    grid = [(1, 0), (1, 5), (4, 0), (4, 5)]
    assert engines.asked == [(*key, 7) for key in grid] + [(*key, 8) for key in grid]
    for point in journal(tmp_path):
        tau = 3 if point["settings"]["drafts"] else 1
        assert point["user_rate"] == 10 * tau  # 20 steps in 2 s
        assert point["machine_rate"] == 10 * tau * point["settings"]["concurrency"]
        raw = tmp_path / "raw" / f"{sweep.name_of(point)}.jsonl"
        assert len(raw.read_text().splitlines()) == point["settings"]["concurrency"]
    assert len(list((tmp_path / "raw").iterdir())) == 8


def test_a_failed_point_is_noted_and_tried_again_alone(
    engines: Engines, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.broken = {(4, 0)}
    sweep.main(run(tmp_path))
    failed = [p for p in journal(tmp_path) if p["status"] == "failed"]
    assert [p["settings"] for p in failed] == [{"concurrency": 4, "drafts": 0}] * 2
    assert failed[0]["error"] == "RuntimeError: out of memory" and len(engines.asked) == 8
    shown = capsys.readouterr().out
    assert "failed: concurrency=4,drafts=0,repeat=1: RuntimeError: out of memory" in shown
    assert json.loads((tmp_path / "summary.json").read_text())["failed"] == 2
    engines.asked, engines.broken = [], set()
    sweep.main(run(tmp_path, resuming=True))
    assert engines.asked == [(4, 0, 7), (4, 0, 8)]
    assert json.loads((tmp_path / "summary.json").read_text())["failed"] == 0
    assert "6 of 8 points are there already" in capsys.readouterr().out


def test_a_sweep_cut_short_goes_on_where_it_was(
    engines: Engines, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engines.measure

    def cut(asked: dict[str, Any], seed: int) -> tuple[dict[str, Any], list[Any]]:
        if len(engines.asked) == 3:
            raise KeyboardInterrupt
        return whole(asked, seed)

    monkeypatch.setattr(benchmark, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(run(tmp_path))
    with open(tmp_path / "points.jsonl", "a") as file:
        file.write('{"repeat": 0, "settings": {"concurrency": 4, "dra')  # torn by the kill
    assert len(engines.asked) == 3
    monkeypatch.setattr(benchmark, "measure", whole)
    sweep.main(run(tmp_path, resuming=True))
    assert len(engines.asked) == len(set(engines.asked)) == 8
    assert [p["status"] for p in journal(tmp_path)] == ["done"] * 8


@pytest.mark.parametrize("grid", [{"nextn": [1]}, {"drafts": []}, {"drafts": [5, 5]}])
def test_a_grid_must_be_one_of_settings(engines: Engines, grid: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give different values to one of model, concurrency"):
        sweep.main(run(None, grid=grid))
    assert not engines.asked


def test_the_config_sweeps_settings_of_the_benchmark() -> None:
    """Its points hold exactly the settings that `benchmark.measure` reads."""
    wanted = set(settings.load(str(ROOT / "configs/benchmark.py"))) - {"name", "provenance"}
    for variant in ("", ":smoke"):
        config = settings.load(str(ROOT / f"configs/sweep.py{variant}"))
        assert set(config.point) == wanted
        for point in sweep.points(config.to_dict()):
            seats = {**config.point, **point["settings"]}["concurrency"]
            assert config.point.requests % seats == 0


@pytest.mark.slow
def test_two_real_points(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["sweep", f"--config={ROOT}/configs/sweep.py:smoke", f"--workdir={tmp_path}/run"]
    monkeypatch.chdir(ROOT)
    values = flags.FlagValues()
    monkeypatch.setattr(sys, "argv", arguments)
    harness.parse(arguments, "configs/sweep.py", values)
    sweep.main(harness.begin("sweep", values, resumable=True))
    plain, drafted = journal(tmp_path / "run")
    assert plain["decode"]["useful_tau"] == 1 < drafted["decode"]["useful_tau"] <= 6
    assert plain["decode"]["steps"] > drafted["decode"]["steps"]
    for point in (plain, drafted):
        raw = (tmp_path / "run" / "raw" / f"{sweep.name_of(point)}.jsonl").read_text()
        tokens = [len(json.loads(line)["token_times"]) for line in raw.splitlines()]
        assert tokens == [1, 1, 16, 16]
