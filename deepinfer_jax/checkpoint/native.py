"""Our own checkpoints: Orbax arrays and the configuration, replaced as one, restored to any mesh.

`checkpoint.json` names the directory of arrays beside it, with every file's size. It is exchanged
by one rename after the arrays are complete, so that a reader meets the old checkpoint or the new.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from deepinfer_jax.checkpoint.config_json import config_from_json, config_to_json
from deepinfer_jax.checkpoint.shards import read_json
from deepinfer_jax.checkpoint.tree import check_tree
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import parameters
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Tree

SCHEMA = 1
_RECORD = "checkpoint.json"
_NEW = "checkpoint.new"
_ARRAYS = "arrays-"  # how names of directories of arrays begin
_FIELDS = {"schema", "config", "dtype", "arrays", "files"}


def save(directory: str | os.PathLike[str], params: Tree, config: ModelConfig) -> None:
    """Save parameters and their configuration, replacing the checkpoint in `directory` if any.

    One process saves at a time. An interrupted save leaves the earlier checkpoint as it was.

    Raises:
      ValueError: the tree is not this configuration's; the directory holds something else; or jax
        runs on several hosts, of which none has the whole.
    """
    directory = Path(directory).absolute()
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} hosts are running; save from a single one")
    dtype = check_tree(params, config)
    _check_target(directory)
    directory.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=_ARRAYS, dir=directory))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(made / "params", params)
    _flush(made)
    record = {
        "schema": SCHEMA,
        "config": config_to_json(config),
        "dtype": dtype.name,
        "arrays": made.name,
        "files": _sizes(made),
    }
    _replace(directory / _RECORD, json.dumps(record, indent=1))
    for old in directory.glob(f"{_ARRAYS}*"):
        if old != made:
            shutil.rmtree(old)


def restore(
    directory: str | os.PathLike[str], shardings: Tree | None = None
) -> tuple[Tree, ModelConfig]:
    """(parameters, configuration) as saved; with `shardings`, a tree like theirs, placed so.

    Raises:
      ValueError: no complete checkpoint of this schema is in `directory`.
    """
    directory = Path(directory).absolute()
    record = _record(directory)
    config = config_from_json(record["config"])
    shapes = parameters.abstract(model_parameters(config), jnp.dtype(record["dtype"]))
    if shardings is None:
        local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: local, shapes)
    target = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, shardings
    )
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(directory / record["arrays"] / "params", target)
    return params, config


def _check_target(directory: Path) -> None:
    """Only an absent or empty directory, or one of ours, is written to."""
    if not directory.exists():
        return
    others = [] if directory.is_dir() else [directory.name]
    if directory.is_dir() and not (directory / _RECORD).exists():
        others = [p.name for p in directory.iterdir() if not p.name.startswith((_ARRAYS, _NEW))]
    if others:
        raise ValueError(
            f"{directory} holds {', '.join(sorted(others)[:3])} and no checkpoint of ours; choose "
            "another directory"
        )


def _record(directory: Path) -> dict[str, Any]:
    record = read_json(directory / _RECORD)
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"{directory} has checkpoint schema {record.get('schema')!r}; this version reads "
            f"{SCHEMA}, so save it again with this version"
        )
    if missing := sorted(_FIELDS - record.keys()):
        raise ValueError(f"{directory / _RECORD} lacks {', '.join(missing)}; it is damaged")
    found = _sizes(directory / record["arrays"])
    wrong = sorted(name for name, size in record["files"].items() if found.get(name) != size)
    if wrong:
        raise ValueError(
            f"{directory} is incomplete: {len(wrong)} files are absent or cut short, first "
            f"{wrong[0]}; copy the checkpoint again"
        )
    return record


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below a directory, by its path from there."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _flush(directory: Path) -> None:
    """Have every file and directory below on disk before anything names them."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, text: str) -> None:
    """Exchange a file by one rename."""
    made = path.with_name(_NEW)
    with made.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(made, path)
