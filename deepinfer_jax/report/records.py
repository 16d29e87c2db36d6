"""Files of a run: written whole or not at all, each naming the schema and the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import jax
import jaxlib
import numpy as np

from deepinfer_jax.timeline import EVENTS, RequestTimeline

SCHEMA_VERSION = 1
GZIP_ABOVE_ROWS = 50_000


class WriteError(OSError):
    """A record could not be written; the message is one line for the user."""


def environment(*, devices: bool = True) -> dict[str, Any]:
    """{schema_version, jax, jaxlib, numpy, python, git, platform, device_kind, devices}.

    Without `devices` the last three are left out and jax's backend is not started.
    """
    found = {
        "schema_version": SCHEMA_VERSION,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "git": git_hash(pathlib.Path(__file__).parent),
    }
    if devices:
        found["platform"] = jax.devices()[0].platform
        found["device_kind"] = jax.devices()[0].device_kind
        found["devices"] = len(jax.devices())
    return found


def git_hash(directory: pathlib.Path) -> str:
    """Commit of the clone that holds `directory`, with "+changes" if it is dirty, or "unknown"."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changes else "")


@contextlib.contextmanager
def atomic(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """A binary file that appears at `path` complete, or leaves what was there untouched.

    Raises:
      WriteError: the disk is full, or the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(
            f"cannot write {path}: {reason}; free space or choose another --workdir"
        ) from error


def plain(value: Any) -> Any:
    """`value` with numpy scalars, arrays, tuples and dataclasses as JSON types.

    NaN is None; infinity, which a config uses for no limit, is the text "inf".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, (np.ndarray, jax.Array)):
        return plain(np.asarray(value).tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def fingerprint(value: Any) -> str:
    """Twelve hex digits that depend on the content of `value` only (key order does not matter)."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_json(path: pathlib.Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic(path) as file:
        file.write(text.encode() + b"\n")


def write_jsonl(path: pathlib.Path, rows: Iterable[Mapping[str, Any]], count: int) -> pathlib.Path:
    """One JSON object per line, atomically; gzip (`path` + ".gz") above 50,000 rows.

    Returns:
      The path written. The other form of the same name, if an earlier run left one, is removed.
    """
    packed = path.with_name(path.name + ".gz")
    target, stale = (packed, path) if count > GZIP_ABOVE_ROWS else (path, packed)
    with atomic(target) as file:
        # mtime 0 and no name: equal rows give equal bytes.
        stream: Any = file
        if target == packed:
            stream = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0)
        for row in rows:
            stream.write(_line(row))
        if target == packed:
            stream.close()
    stale.unlink(missing_ok=True)
    return target


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(row, allow_nan=False, default=plain)
    except (ValueError, TypeError):  # NaN, or keys that are not text: the slower way
        text = json.dumps(plain(row), allow_nan=False)
    return text.encode() + b"\n"


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .jsonl.gz file, [] if there is none. A torn last line is dropped."""
    if not path.exists():
        return []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")
    rows = [json.loads(line) for line in lines[:-1] if line]
    with contextlib.suppress(json.JSONDecodeError):
        rows += [json.loads(lines[-1])] if lines[-1] else []
    return rows


def append_jsonl(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Adds one row and waits for the disk: the journal of a sweep, read back by `read_jsonl`.

    A line torn by a killed writer is cut off first, so that it cannot swallow this row.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            end = file.tell()
            file.seek(max(end - 1, 0))
            if file.read() not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError(
            f"cannot append to {path}: {error.strerror or error}; free space and run again"
        ) from error


def request_rows(t: RequestTimeline) -> Iterator[dict[str, Any]]:
    """One record per request: index, the times in ns (None if never), counts, engines, status."""
    columns = {
        field.name: np.asarray(getattr(t, field.name)).tolist()
        for field in dataclasses.fields(t)
        if field.name != "statuses"
    }
    optional = {*EVENTS, "prefill_engine", "decode_engine", "decode_rank"}
    for request in range(len(columns["arrival"])):
        row: dict[str, Any] = {"request": request}
        for name, column in columns.items():
            value = column[request]
            row[name] = None if name in optional and value < 0 else value
        row["status"] = t.statuses[row["status"]]
        yield row
