"""A run's directory: never overwritten by accident, resumed only by the identical config."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.report import records
from experiments.settings import UserError, leaves

OURS = (
    "config.json",
    "summary.json",
    "results.jsonl",
    "results.jsonl.gz",
    "points.jsonl",
    "report.html",
    "trace.json",
    "trace.json.gz",
    "trace_*.json.gz",
    "plots/*.png",
    "raw/*.jsonl",
    "raw/*.jsonl.gz",
)
IDENTITY = ("experiment", "flags", "seed", "config")


def open_workdir(
    path: pathlib.Path, content: Mapping[str, Any], *, overwrite: bool, resumable: bool
) -> bool:
    """Makes `path` this run's directory and writes config.json there; True if it resumes one.

    Args:
      content: for config.json; `IDENTITY` decides whether two runs are the same.
      overwrite: remove an earlier run's files (`OURS`, nothing else).
      resumable: the experiment can continue from its own points.jsonl.

    Raises:
      UserError: the directory holds another run, or things that are not a run's.
      records.WriteError: it cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--workdir={path} is a file: choose a directory")
    if path.is_dir() and any(path.iterdir()):
        earlier = _earlier(path)
        identity = {key: records.plain(content.get(key)) for key in IDENTITY}
        same = {key: earlier.get(key) for key in IDENTITY} == identity
        if same and resumable and not overwrite:
            return True
        if not overwrite:
            reason = "this very run" if same else f"another run ({_difference(earlier, identity)})"
            raise UserError(
                f"--workdir={path} already holds {reason}: choose another directory, or "
                "--overwrite to replace its files"
            )
        for pattern in OURS:
            for file in path.glob(pattern):
                file.unlink()
    records.write_json(path / "config.json", content)
    return False


def _earlier(path: pathlib.Path) -> dict[str, Any]:
    try:
        earlier = json.loads((path / "config.json").read_text())
        return {key: earlier[key] for key in IDENTITY}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--workdir={path} is not empty and has no config.json of a run: choose another "
            "directory; --overwrite never removes files that a run did not write"
        ) from None


def _difference(earlier: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first setting in which two runs differ, as "name: theirs, here ours"."""
    before, after = dict(leaves(earlier)), dict(leaves(new))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return f"{name}: there {before.get(name)!r}, here {after.get(name)!r}"
    return "same settings"
