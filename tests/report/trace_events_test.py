"""A trace file is well-formed, and its slices, arrows and counters say what the timeline says."""

import gzip
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.report import trace_events
from deepinfer_jax.timeline import timeline

KEYS = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "ph", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "s", "pid", "tid", "ts", "args"},
}
KEYS["t"] = KEYS["f"] = KEYS["s"]


def ns(us):
    """Microseconds of a file in whole nanoseconds; no other number is near."""
    assert abs(us * 1000 - round(us * 1000)) < 1e-3
    return round(us * 1000)


def example():
    """Two prompt engines, one completion engine; a refused request; one that ends at its prompt."""
    return timeline(
        [0, 1_000, 2_000, 2_500],
        [90_001, 70_000, -1, 30_000],
        matched=[5, 1_005, 2_005, 2_505],
        pulled=[5, 1_005, -1, 20_000],
        fetched=[9_000, 1_005, -1, 20_000],
        prefill_start=[9_000, 2_000, -1, 20_000],
        first_token=[20_000, 30_000, -1, 30_000],
        handed_off=[25_000, 30_001, -1, -1],
        decode_start=[26_000, 30_001, -1, -1],
        output_tokens=[7, 8, 0, 1],
        status=[0, 0, 1, 0],
        prefill_engine=[0, 1, -1, 0],
        decode_engine=[2, 2, -1, -1],
        decode_rank=[1, 1, -1, -1],
    )


def read(path, t, engines, requests):
    trace_events.write(path, t, engines, requests=requests)
    with gzip.open(path, "rt") as file:
        text = file.read()
    made = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(made) == {"displayTimeUnit", "traceEvents"} and made["displayTimeUnit"] == "ms"
    return made["traceEvents"]


def check(events):
    """The format's rules: keys, slices of a thread nested, arrows from slice to slice in time."""
    threads = defaultdict(list)
    for event in events:
        assert set(event) == KEYS[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 1) > 0
        if event["ph"] == "X":
            begin = ns(event["ts"])
            threads[event["pid"], event["tid"]].append((begin, begin + ns(event["dur"])))
    for slices in threads.values():
        stack = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], "slices of one thread overlap"
            stack.append(end)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            inside = threads[event["pid"], event["tid"]]
            assert any(begin <= ns(event["ts"]) < end for begin, end in inside)
            flows[event["id"]].append(event)
    for path in flows.values():
        phases = [e["ph"] for e in path]
        assert phases == ["s"] + ["t"] * (len(path) - 2) + ["f"]
        assert [e["ts"] for e in path] == sorted(e["ts"] for e in path)


def test_a_small_run_as_worked_out_by_hand(tmp_path):
    events = read(tmp_path / "trace.json.gz", example(), ["prompt", "prompt", "completion"], 9)
    check(events)
    slices = {
        (e["args"]["request"], e["name"]): (e["pid"], ns(e["ts"]), ns(e["dur"]))
        for e in events
        if e["ph"] == "X" and e["cat"] == "stage"
    }
    assert slices == {
        (0, "match"): (0, 0, 5),
        (0, "fetch"): (1, 5, 8_995),
        (0, "prefill"): (1, 9_000, 11_000),
        (0, "hand-off"): (1, 20_000, 5_000),
        (0, "decode wait"): (3, 25_000, 1_000),
        (0, "decode"): (3, 26_000, 64_001),
        (1, "match"): (0, 1_000, 5),
        (1, "prefill wait"): (2, 1_005, 995),
        (1, "prefill"): (2, 2_000, 28_000),
        (1, "hand-off"): (2, 30_000, 1),
        (1, "decode"): (3, 30_001, 39_999),
        (3, "match"): (0, 2_500, 5),
        (3, "queue"): (0, 2_505, 17_495),
        (3, "prefill"): (1, 20_000, 10_000),
    }
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "service", 1: "prompt", 2: "prompt", 3: "completion"}
    refused = [e for e in events if e["ph"] == "i"]
    assert [(e["args"], e["ts"]) for e in refused] == [({"request": 2}, 2.005)]
    queue = [(ns(e["ts"]), e["args"]["requests"]) for e in events if e["name"] == "queue length"]
    assert queue[-2:] == [(2_505, 1), (20_000, 0)]
    # The decodes overlap: two lanes. The prompts of engine 0 do not: one.
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 3}
    assert lanes == {"decode, rank 1", "decode, rank 1 (1)"}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert lanes == {"prompts", "hand-off"}


def test_the_bound_is_on_requests_and_equal_runs_are_equal_files(tmp_path):
    files = [tmp_path / f"{k}.json.gz" for k in range(2)]
    for path in files:
        events = read(path, example(), ["a", "b", "c"], 2)
    assert {e["args"]["request"] for e in events if e["ph"] == "X"} == {0, 1}
    assert files[0].read_bytes() == files[1].read_bytes()


@st.composite
def runs(draw):
    """Any requests, preempted ones too, whose first token may lie before a later match."""
    count = draw(st.integers(1, 12))
    gaps = draw(
        st.lists(
            st.lists(st.integers(0, 40), min_size=9, max_size=9), min_size=count, max_size=count
        )
    )
    times = np.cumsum(gaps, axis=1)
    early = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    times[early, 5] = times[early, 1]
    engine = np.asarray(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    names = (
        "matched",
        "pulled",
        "fetched",
        "prefill_start",
        "first_token",
        "handed_off",
        "decode_start",
    )
    known = {name: times[:, k + 1] for k, name in enumerate(names)}
    return timeline(
        times[:, 0], times[:, 8], **known, prefill_engine=engine, decode_engine=1 - engine
    )


@given(runs())
@settings(max_examples=60, deadline=None)
def test_any_run_is_well_formed_and_adds_up(t):
    events = json.loads(json.dumps(list(trace_events.events(t, ["a", "b"], requests=99))))
    check(events)
    count = len(t.arrival)
    lasts = np.zeros(count, int)
    wholes = np.zeros(count, int)
    for event in events:
        if event["ph"] == "X":
            totals = lasts if event["cat"] == "stage" else wholes
            totals[event["args"]["request"]] += ns(event["dur"])
    assert np.array_equal(lasts, t.finish - t.arrival)
    assert np.array_equal(wholes, t.finish - t.arrival)
    live = {ns(e["ts"]): e["args"]["requests"] for e in events if e["name"] == "live requests"}
    for time, value in live.items():
        assert value == sum(a <= time < f for a, f in zip(t.arrival, t.finish, strict=True))


def test_ticks_of_days_survive():
    for ticks in (1, 999, 10**15 - 1, 86_400 * 10**9 + 123_456_789):
        text = json.dumps(trace_events.microseconds(ticks))
        whole, _, rest = text.partition(".")
        assert int(whole) * 1000 + int(rest.ljust(3, "0")) == ticks and len(rest) <= 3
