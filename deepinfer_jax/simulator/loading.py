"""Trace files into `Trace`s, and the measured times that lie beside the vLLM ground truth."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator
from decimal import Decimal
from typing import IO, Any, Literal, cast

import numpy as np

from deepinfer_jax.simulator.formats import (
    FORMATS,
    LARGEST_ID,
    BadRow,
    Format,
    Record,
    Row,
    guess,
    listed,
)
from deepinfer_jax.simulator.traces import (
    Float64,
    Int64,
    Rejection,
    Trace,
    in_arrival_order,
    offsets,
)

Path = str | os.PathLike[str]


def open_text(path: Path) -> IO[str]:
    """A text file, plain or gzipped (by content, not by name)."""
    with open(path, "rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    file = gzip.open(path) if zipped else open(path, "rb")  # noqa: SIM115, the caller closes it
    return io.TextIOWrapper(cast(io.BufferedReader, file), encoding="utf-8-sig", newline="")


def _look(path: Path) -> tuple[str, set[str]]:
    """("jsonl" or "csv", field names) of the first line that is not blank."""
    with open_text(path) as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    if not first:
        raise ValueError(f"{path}: the file is empty, but a trace needs at least one row; fill it")
    if not first.startswith("{"):
        return "csv", {name.strip() for name in next(csv.reader([first]))}
    try:
        return "jsonl", set(json.loads(first))
    except json.JSONDecodeError:
        return "jsonl", set()


def _format(path: Path, name: str | None) -> Format:
    kind, names = _look(path)
    if name is not None and name not in FORMATS:
        raise ValueError(f"{path}: format {name!r} is unknown; choose one of {listed()}")
    chosen = name or guess(kind, names)
    if chosen is None:
        raise ValueError(
            f"{path}: a {kind} file with {sorted(names)} is no known format; name one of {listed()}"
        )
    known = FORMATS[chosen]
    missing = [f for f in known.fields if f not in names] if known.kind == "csv" == kind else []
    if known.kind != kind or missing:
        raise ValueError(
            f"{path}: format {chosen!r} is {known.kind} with {', '.join(known.fields)}, but the "
            f"file is {kind} with {sorted(names)}; leave the format out or choose one of {listed()}"
        )
    return known


def _jsonl(lines: IO[str]) -> Iterator[tuple[int, Record | None, str]]:
    decode = json.JSONDecoder(parse_float=Decimal).decode
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = decode(line)
            except json.JSONDecodeError:
                record = None
            yield number, record if isinstance(record, dict) else None, line


def _csv(lines: IO[str]) -> Iterator[tuple[int, Record | None, str]]:
    reader = csv.reader(lines)
    names = next((row for row in reader if row), [])
    names = [name.strip() for name in names]
    for row in reader:
        if row:
            fits = len(row) == len(names)
            yield reader.line_num, dict(zip(names, row, strict=True)) if fits else None, str(row)


def _rows(
    path: Path, known: Format, block_tokens: int, on_invalid: str
) -> tuple[list[int], list[Row], list[Rejection]]:
    numbers, rows, rejected = [], [], []
    with open_text(path) as lines:
        for number, record, text in _jsonl(lines) if known.kind == "jsonl" else _csv(lines):
            try:
                if record is None:
                    rule = (
                        f"must be one {'JSON object' if known.kind == 'jsonl' else 'full csv row'}"
                    )
                    raise BadRow("line", text.strip()[:40], rule)
                rows.append(known.parse(record, block_tokens))
                numbers.append(number)
            except BadRow as bad:
                if on_invalid == "error":
                    raise ValueError(
                        f"{path} row {number}: {bad.field} = {bad.value}, but {bad.rule}; mend the "
                        "row or load with on_invalid='reject' to leave it out and count it"
                    ) from None
                rejected.append(Rejection(number, bad.field, bad.value, bad.rule))
    return numbers, rows, rejected


def _numbered(rows: list[Row]) -> list[list[int]]:
    """Block ids as integers; ids that are not are numbered by first appearance."""
    chains = [row.blocks or [] for row in rows]
    if all(type(i) is int and abs(i) < LARGEST_ID for ids in chains for i in ids):
        return chains
    numbers: dict[Any, int] = {}
    return [[numbers.setdefault(i, len(numbers)) for i in ids] for ids in chains]


def _runs_of_blocks(rows: list[Row]) -> tuple[Int64, Int64, Int64]:
    chains = _numbered(rows)
    starts = offsets([len(ids) for ids in chains])
    flat = np.fromiter((i for ids in chains for i in ids), np.int64, starts[-1])
    fresh = np.ones(len(flat), bool)
    fresh[1:] = flat[1:] != flat[:-1] + 1
    fresh[starts[:-1][starts[:-1] < len(flat)]] = True
    heads = np.flatnonzero(fresh)
    counts = np.diff(np.append(heads, len(flat)))
    return flat[heads], counts, np.searchsorted(heads, starts).astype(np.int64)


def _runs(rows: list[Row]) -> tuple[Int64, Int64, Int64]:
    """(first, count, offsets) of the prefix chains, see `Trace`."""
    if all(row.runs is None for row in rows):
        return _runs_of_blocks(rows)
    pairs = [row.runs or [] for row in rows]
    flat = np.array([pair for runs in pairs for pair in runs], np.int64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1], offsets([len(runs) for runs in pairs])


def _share_common(rows: list[Row], block_tokens: int) -> list[Row]:
    """Give sessions with equal (tools, system) lengths equal ids for that many leading tokens."""
    largest = max((f + n for row in rows for f, n in row.runs or []), default=0)
    heads: dict[tuple[int, int], int] = {}
    shared = []
    for row in rows:
        blocks = min(sum(row.common) // block_tokens, sum(n for _, n in row.runs or []))
        if row.common not in heads:
            heads[row.common] = largest
            largest += sum(row.common) // block_tokens
        runs, left = [[heads[row.common], blocks]] if blocks else [], blocks
        for first, count in row.runs or []:
            skipped = min(left, count)
            left -= skipped
            if count > skipped:
                runs.append([first + skipped, count - skipped])
        shared.append(row._replace(runs=runs))
    return shared


def _traffic(rows: list[Row]) -> Int64 | None:
    if all(row.traffic is None for row in rows):
        return None
    return np.array([row.traffic or 0 for row in rows], np.int64)


def _sessions(rows: list[Row]) -> Int64 | None:
    if all(row.session is None for row in rows):
        return None
    root: dict[str, str] = {}
    dense: dict[str, int] = {}
    numbers = []
    for index, row in enumerate(rows):
        own = f"<row {index}>" if row.session is None else row.session
        root[own] = root.get(row.parent or own, own)
        numbers.append(dense.setdefault(root[own], len(dense)))
    return np.array(numbers, np.int64)


def load(
    path: Path,
    format: str | None = None,
    *,
    on_invalid: Literal["error", "reject"] = "error",
    block_tokens: int | None = None,
    share_system_prefix: bool = False,
) -> Trace:
    """Read a trace, plain or gzipped.

    Args:
      path: the file.
      format: a key of `formats.FORMATS`; None guesses it from the first line.
      on_invalid: "error" stops at the first bad row; "reject" leaves bad rows out and keeps them,
        with the broken rule, in `Trace.rejected`.
      block_tokens: tokens per prefix block, where they differ from the format's own.
      share_system_prefix: for "sessions", whose ids are local to a session: sessions with equal
        tool_tokens and system_tokens share that prefix (an assumption, the trace cannot tell).

    Raises:
      ValueError: for an unknown format, a bad row (see `on_invalid`) or a file without a good row.
    """
    if on_invalid not in ("error", "reject"):
        raise ValueError(f"on_invalid={on_invalid!r} is unknown; choose 'error' or 'reject'")
    known = _format(path, format)
    per_block = known.block_tokens if block_tokens is None else block_tokens
    numbers, rows, rejected = _rows(path, known, per_block, on_invalid)
    if not rows:
        raise ValueError(
            f"{path}: no usable row ({len(rejected)} rejected), but a trace needs at least one; "
            "check the format or the file"
        )
    return _assemble(str(path), known, per_block, numbers, rows, rejected, share_system_prefix)


def _assemble(
    source: str,
    known: Format,
    block_tokens: int,
    numbers: list[int],
    rows: list[Row],
    rejected: list[Rejection],
    share_system_prefix: bool,
) -> Trace:
    if share_system_prefix:
        rows = _share_common(rows, block_tokens)
    first, count, run_offsets = _runs(rows)
    arrival = np.array([row.arrival for row in rows], np.int64)
    turns = [row.turn for row in rows]
    thought = np.array([row.think_seconds for row in rows])
    answered = np.array([row.answer_seconds for row in rows])
    trace = Trace(
        source=source,
        arrival=arrival - arrival.min() if known.absolute else arrival,
        input_tokens=np.array([row.input_tokens for row in rows], np.int64),
        output_tokens=np.array([row.output_tokens for row in rows], np.int64),
        row=np.array(numbers, np.int64) - (1 if known.kind == "jsonl" else 2),
        block_tokens=block_tokens if len(first) else 0,
        run_first=first,
        run_count=count,
        run_offsets=run_offsets,
        image_tokens=np.array([i for row in rows for i in row.images], np.int64),
        image_offsets=offsets([len(row.images) for row in rows]),
        session=_sessions(rows),
        turn=None if None in turns else np.array(turns, np.int64),
        think_seconds=None if np.isnan(thought).all() else thought,
        answer_seconds=None if np.isnan(answered).all() else answered,
        traffic=_traffic(rows),
        rejected=tuple(rejected),
    )
    return in_arrival_order(trace)


def vllm_measurements(path: Path) -> dict[str, Float64]:
    """What real vLLM did with each request of a ground-truth `requests.jsonl`, in file order.

    Returns:
      float64 [Q] seconds since the first request was queued: `queued`, `scheduled`, `first_token`,
      `last_token`.
    """
    with open_text(path) as lines:
        records = [record or {} for _, record, _ in _jsonl(lines)]
    names = ("queued", "scheduled", "first_token", "last_token")
    missing = [n for n in names if any(f"{n}_ts" not in r for r in records)]
    if missing or not records:
        raise ValueError(
            f"{path}: no measured {missing or names}_ts; give a requests.jsonl of a run"
        )
    start = min(record["queued_ts"] for record in records)
    return {n: np.array([float(r[f"{n}_ts"] - start) for r in records]) for n in names}
