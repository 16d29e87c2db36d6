"""A run as a trace-event file, to be looked at in ui.perfetto.dev or chrome://tracing.

Process 0 is the service: matches and queues, and counters. Every engine is a process of its own, with
the prompts, hand-offs and decodes that it holds. Requests overlap and slices of one thread may not, so
each kind of work, decodes by rank, has as many threads (lanes) as it has requests at once. Arrows follow a request from
lane to lane. Format: "Trace Event Format", the Chromium project. Times are microseconds since tick 0,
exact to the nanosecond.
"""

from __future__ import annotations

import gzip
import heapq
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.metrics import stage_ticks
from deepinfer_jax.report import records
from deepinfer_jax.timeline import COMPLETED, EVENTS, STAGES, RequestTimeline

Event = dict[str, Any]

SERVICE = 0
"""The process that is no engine; engine m is process m + 1."""

LANES = {
    "arrivals": ("match", "queue"),
    "prompts": ("fetch", "prefill wait", "prefill"),
    "hand-off": ("hand-off",),
    "decode": ("decode wait", "decode"),
}
"""Kinds of lanes and the stages of a request that it spends in one of them."""


def microseconds(ticks: int) -> float:
    """Exact up to some 11 days: the shortest decimal of the float is that of the ticks."""
    return int(ticks) / 1000


def events(t: RequestTimeline, engines: Sequence[str], *, requests: int) -> Iterator[Event]:
    """The trace events of the first `requests` arrivals.

    Args:
      t: numpy arrays [Q]. Repeated stages of a preempted request show as in `metrics.stage_ticks`.
      engines: [M] names.
      requests: bound on the requests that are drawn; counters count all, until the last drawn one ends.
    """
    chosen = np.argsort(np.asarray(t.arrival), kind="stable")[:requests]
    yield from _names(SERVICE, "service", [])
    for engine, name in enumerate(engines):
        yield from _names(engine + 1, name, [])
    stays = list(_stays(t, chosen))
    threads = _threads(stays)
    for (group, _), thread in threads.items():
        yield from _names(group[0], "", [thread])
    for request in chosen.tolist():
        yield from _ended_early(t, request)
    arrows: dict[int, list[Event]] = {}
    for stay in stays:
        where = {"pid": stay.group[0], "tid": threads[stay.group, stay.lane][0]}
        yield from _slices(stay, where, t)
        arrows.setdefault(stay.request, []).append(_arrow(stay, where))
    for path in arrows.values():
        for place, event in enumerate(path):
            last = place == len(path) - 1
            if len(path) > 1:
                yield event | {"ph": "s" if place == 0 else "f" if last else "t"}
    yield from _counters(t, max((stay.end for stay in stays), default=0))


class _Stay:
    """One request in one lane: the stages it spends there, each (name, begin, end) in ticks."""

    def __init__(
        self, request: int, process: int, kind: str, rank: int, stages: list[tuple[str, int, int]]
    ) -> None:
        self.request, self.kind, self.stages = request, kind, stages
        self.begin, self.end = stages[0][1], stages[-1][2]
        self.group = process, list(LANES).index(kind), rank
        self.lane = 0

    @property
    def label(self) -> str:
        """What the lane is called."""
        rank = f", rank {self.group[2]}" if self.group[2] >= 0 else ""
        return self.kind + rank + (f" ({self.lane})" if self.lane else "")


def _stays(t: RequestTimeline, chosen: np.ndarray) -> Iterator[_Stay]:
    """By request, then in the order of its life; what takes no time is not drawn."""
    lasts = stage_ticks(t)
    begins = np.asarray(t.arrival) + np.cumsum(lasts, axis=0) - lasts
    engine = {
        "prompts": np.asarray(t.prefill_engine),
        "hand-off": np.asarray(t.prefill_engine),
        "decode": np.where(
            np.asarray(t.decode_engine) >= 0, np.asarray(t.decode_engine), t.prefill_engine
        ),
    }
    for request in chosen.tolist():
        if t.status[request] != COMPLETED:
            continue
        for kind, names in LANES.items():
            rows = [STAGES.index(name) for name in names]
            spans = [
                (STAGES[k], int(begins[k, request]), int(begins[k, request] + lasts[k, request]))
                for k in rows
                if lasts[k, request] > 0
            ]
            process = SERVICE if kind == "arrivals" else int(engine[kind][request]) + 1
            rank = int(t.decode_rank[request]) if kind == "decode" else -1
            if spans:
                yield _Stay(request, process, kind, rank, spans)


def _threads(stays: Sequence[_Stay]) -> dict[tuple[tuple[int, int, int], int], tuple[int, str]]:
    """Gives every stay the lowest free lane of its group; {(group, lane): (thread, label)}."""
    free: dict[tuple[int, int, int], list[int]] = {}
    busy: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    labels = {}
    for stay in sorted(stays, key=lambda s: (s.begin, s.request)):
        idle, taken = free.setdefault(stay.group, []), busy.setdefault(stay.group, [])
        while taken and taken[0][0] <= stay.begin:
            heapq.heappush(idle, heapq.heappop(taken)[1])
        stay.lane = heapq.heappop(idle) if idle else len(taken)
        heapq.heappush(taken, (stay.end, stay.lane))
        labels[stay.group, stay.lane] = stay.label
    return {lane: (1 + place, labels[lane]) for place, lane in enumerate(sorted(labels))}


def _slices(stay: _Stay, where: Event, t: RequestTimeline) -> Iterator[Event]:
    """The stay as a slice, its stages as slices inside."""
    place = where | {"ph": "X"}
    args = {
        "request": stay.request,
        "input_tokens": int(t.input_tokens[stay.request]),
        "output_tokens": int(t.output_tokens[stay.request]),
        "hit_tokens": int(t.compute_hit_tokens[stay.request]),
        "preemptions": int(t.preemptions[stay.request]),
    }
    whole = {"name": f"request {stay.request}", "cat": stay.kind, "args": args}
    yield place | whole | _times(stay.begin, stay.end)
    for name, begin, end in stay.stages:
        own = {"name": name, "cat": "stage", "args": {"request": stay.request}}
        yield place | own | _times(begin, end)


def _times(begin: int, end: int) -> Event:
    return {"ts": microseconds(begin), "dur": microseconds(end - begin)}


def _arrow(stay: _Stay, where: Event) -> Event:
    """A flow event bound to the slice that begins with the stay; its phase is the caller's."""
    named = {"name": "request", "cat": "request", "id": stay.request, "bp": "e"}
    return where | named | {"ts": microseconds(stay.begin)}


def _ended_early(t: RequestTimeline, request: int) -> Iterator[Event]:
    """A mark where a request was refused or lost."""
    status = int(t.status[request])
    if status == COMPLETED:
        return
    seen = max(int(np.asarray(getattr(t, name))[request]) for name in EVENTS)
    yield {
        "name": f"request {request} {t.statuses[status]}", "ph": "i", "s": "p", "cat": "refused",
        "pid": SERVICE, "tid": 0, "ts": microseconds(max(seen, 0)), "args": {"request": request},
    }  # fmt: skip


def _names(process: int, name: str, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    """Metadata: names of a process and of threads, in the order of their numbers."""
    if name:
        yield _meta("process_name", process, 0, {"name": name})
        yield _meta("process_sort_index", process, 0, {"sort_index": process})
    for thread, label in threads:
        yield _meta("thread_name", process, thread, {"name": label})
        yield _meta("thread_sort_index", process, thread, {"sort_index": thread})


def _meta(name: str, process: int, thread: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _counters(t: RequestTimeline, end: int) -> Iterator[Event]:
    """How many requests are in the service, in its queues, and decoding, at every change."""
    done = np.asarray(t.status) == COMPLETED
    began = np.where(np.asarray(t.decode_start) >= 0, t.decode_start, t.first_token)
    spans = {
        "live requests": (t.arrival, t.finish),
        "queue length": (t.matched, t.pulled),
        "decoding": (began, t.finish),
    }
    for name, (begin, finish) in spans.items():
        starts, ends = (np.sort(np.asarray(x)[done]) for x in (begin, np.maximum(begin, finish)))
        times = np.unique(np.concatenate([starts, ends]))
        counts = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
        for time, count in zip(times.tolist(), counts.tolist(), strict=True):
            if time <= end:
                args = {"requests": count}
                yield {
                    "name": name, "ph": "C", "pid": SERVICE, "tid": 0,
                    "ts": microseconds(time), "args": args,
                }  # fmt: skip


def write(path: pathlib.Path, t: RequestTimeline, engines: Sequence[str], *, requests: int) -> None:
    """`events` as one gzipped JSON object, atomically; equal runs give equal bytes.

    Raises:
      records.WriteError: the file could not be written.
    """
    text = (
        json.dumps(event, separators=(",", ":")) for event in events(t, engines, requests=requests)
    )
    with (
        records.atomic(path) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0) as packed,
    ):
        packed.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, line in enumerate(text):
            packed.write((",\n" if number else "").encode() + line.encode())
        packed.write(b"\n]}\n")
