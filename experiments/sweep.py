"""Measures the engine over a grid of settings, each point as `experiments.benchmark` does.

  python -m experiments.sweep --config=configs/sweep.py:smoke
  python -m experiments.sweep --config=configs/sweep.py --workdir=runs/sweep
  python -m experiments.plot_pareto --sweep=runs/sweep --workdir=runs/pareto

Every point is an engine of its own. The grid is gone through `repeats` times, so that a machine
that slows down for a while does not slow one point only; each pass has prompts of its own, the same
at all points. A workdir gets points.jsonl, one line per point and pass, and in raw/ one line per
request with the time of each token. Started again with the same workdir, finished points are not
measured again; a point that fails is noted, and the sweep goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from deepinfer_jax.cost.frontier import OperatingPoint
from deepinfer_jax.report import records
from deepinfer_jax.report.table import quantity, table
from experiments import benchmark, harness

JOURNAL, RAW = "points.jsonl", "raw"
Point = dict[str, Any]


def main(run: harness.Run) -> None:
    p = run.parameters
    todo = list(points(p))
    earlier = records.read_jsonl(run.workdir / JOURNAL) if run.workdir and run.resuming else []
    made = {name_of(point): point for point in earlier}
    missing = [point for point in todo if made.get(name_of(point), {}).get("status") != "done"]
    if len(missing) < len(todo):
        print(f"{len(todo) - len(missing)} of {len(todo)} points are there already")
    with kept_programs():
        for point in harness.progress(missing, "points"):
            made[name_of(point)] = done = measured(p["point"], point, run.seed, run.workdir)
            if run.workdir:
                records.append_jsonl(run.workdir / JOURNAL, done)
    found = [made[name_of(point)] for point in todo]
    title = f"{p['point']['model']}: {', '.join(p['grid'])}"
    print(table([shown(point) for point in found], title=title))
    failed = [point for point in found if point["status"] != "done"]
    for point in failed:
        print(f"failed: {name_of(point)}: {point['error']}")
    if run.workdir:
        about = {**records.environment(), "machine": benchmark.machine()}
        about |= {"points": len(found), "failed": len(failed)}
        records.write_json(run.workdir / "summary.json", about)


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Compiled programs on disk while the sweep runs: each pass needs the same ones."""
    before = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", before or directory)
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)


def points(parameters: Mapping[str, Any]) -> Iterator[Point]:
    """{"repeat", "settings"} of each point, pass after pass; settings are those swept.

    Raises:
      ValueError: an unknown setting, one without a value, or one with a value twice.
    """
    grid: Mapping[str, Sequence[Any]] = parameters["grid"]
    for name, values in grid.items():
        if name not in parameters["point"] or not values or len(set(values)) < len(values):
            known = ", ".join(parameters["point"])
            raise ValueError(f"grid.{name} is {values}: give different values to one of {known}")
    for repeat in range(parameters["repeats"]):
        for values in itertools.product(*grid.values()):
            yield {"repeat": repeat, "settings": dict(zip(grid, values, strict=True))}


def name_of(point: Mapping[str, Any]) -> str:
    """What tells a point from all others, as a file's name: "concurrency=8,drafts=5,repeat=0"."""
    parts = {**point["settings"], "repeat": point["repeat"]}
    return ",".join(f"{key}={value}" for key, value in parts.items()).replace("/", "_")


def measured(
    base: Mapping[str, Any], point: Point, seed: int, workdir: pathlib.Path | None
) -> Point:
    """The point with its status, and its windows or its error; raw lines go to the workdir.

    A point is an `OperatingPoint`: its steps per second and its own tau give the user's and the
    machine's rate, both of useful tokens in full batches.
    """
    settings = {**base, **point["settings"]}
    try:
        found, lines = benchmark.measure(settings, seed + point["repeat"])
    except Exception as error:
        return {**point, "status": "failed", "error": f"{type(error).__name__}: {error}"}
    if workdir:
        path = workdir / RAW / f"{name_of(point)}.jsonl"
        records.write_jsonl(path, lines, len(lines))
    decode = found["decode"]
    place = OperatingPoint(
        settings["concurrency"], decode["steps"] / decode["seconds"], decode["useful_tau"]
    )
    rates = {"user_rate": place.user_rate, "machine_rate": place.device_rate}
    return {**point, "status": "done", **rates, **found}


def shown(point: Point) -> dict[str, str]:
    """One line of the printed table."""
    parts = {**point["settings"], "pass": point["repeat"]}
    head = {key: str(value) for key, value in parts.items()}
    if point["status"] != "done":
        return {**head, "tokens/s": "failed"}
    decode = point["decode"]
    survival = " ".join(f"{share:.2f}" for share in decode["survival"] if share is not None)
    return {
        **head,
        "tokens/s": quantity(point["machine_rate"]),
        "per user": quantity(point["user_rate"]),
        "tau": f"{decode['useful_tau']:.2f}",
        "drafts accepted, by position": survival,
        "prompt rows/s": quantity(point["prompt"]["rows_per_second"]),
    }


if __name__ == "__main__":
    harness.run(main, config="configs/sweep.py", resumable=True)
