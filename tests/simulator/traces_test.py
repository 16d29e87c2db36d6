"""Loaders against the published figures of each trace, bad rows, and the transformations."""

import gzip
import json
import pathlib
import re

import numpy as np
import pytest

from deepinfer_jax.simulator import loading, traces
from deepinfer_jax.simulator.workload import workload

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "traces"
TRUTH = sorted((FOLDER / "vllm_groundtruth").glob("*/requests.jsonl.gz"))


def write(path, rows):
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def line(timestamp=0, input_length=10, output_length=2, **more):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        **more,
    }


# rows, span in seconds, arrival CV, mean input, mean output, largest input: counted from the files
# by a separate script; Mooncake's README has rows and means too (12,031 / 12,035 / 343; 3,993 /
# 15,325 / 149).
FIGURES = {
    "mooncake_conversation_trace.jsonl.gz": (12_031, 3537.0, 3.03, 12_035.1, 342.6, 126_195),
    "mooncake_synthetic_trace.jsonl.gz": (3_993, 1022.0, 1.01, 15_325.5, 149.1, 191_378),
    "azure_llm_2023_conv.csv.gz": (19_366, 3501.7, 1.09, 1_154.7, 211.1, 14_050),
    "servegen_language_m-large_10rps_1200s.csv.gz": (11_979, 1200.0, 1.14, 758.5, 77.6, 12_714),
    "servegen_multimodal_mm-image_10rps_1200s.csv.gz": (
        11_998,
        1200.0,
        1.30,
        1_377.5,
        137.1,
        25_852,
    ),
    "servegen_reason_deepseek-r1_5rps_1200s.csv.gz": (5_990, 1200.0, 1.12, 1_563.8, 983.5, 48_734),
}


@pytest.mark.parametrize("name", FIGURES)
def test_shipped_traces_have_their_published_figures(name):
    rows, span, variation, prompt, answer, longest = FIGURES[name]
    trace = loading.load(FOLDER / name)
    gaps = np.diff(trace.arrival_seconds)
    assert (len(trace), trace.input_tokens.max(), trace.rejected) == (rows, longest, ())
    assert np.ptp(trace.arrival_seconds) == pytest.approx(span, abs=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.006)
    assert trace.input_tokens.mean() == pytest.approx(prompt, abs=0.06)
    assert trace.output_tokens.mean() == pytest.approx(answer, abs=0.06)


def test_mooncake_blocks_are_the_files_own():
    trace = loading.load(FOLDER / "mooncake_synthetic_trace.jsonl.gz")
    with gzip.open(FOLDER / "mooncake_synthetic_trace.jsonl.gz", "rt") as lines:
        for q, text in enumerate(lines):
            assert trace.blocks(q).tolist() == json.loads(text)["hash_ids"]
    assert trace.run_count.sum() == 121_877 and trace.block_tokens == 512


def test_azure_times_are_exact_to_100_nanoseconds():
    trace = loading.load(FOLDER / "azure_llm_2023_conv.csv.gz")
    # 18:15:46.6805900 and 18:15:50.9951690
    assert trace.arrival[:2].tolist() == [0, 4_314_579_000]
    assert not (trace.arrival % 100).any()


def test_images_are_counted_one_by_one():
    trace = loading.load(FOLDER / "servegen_multimodal_mm-image_10rps_1200s.csv.gz")
    images, total = np.diff(trace.image_offsets), trace.image_tokens_per_request
    assert images.mean() == pytest.approx(1.59, abs=0.005) and images.max() == 49
    assert total.mean() == pytest.approx(819.6, abs=0.05)
    assert (images > 0).mean() == pytest.approx(0.990, abs=5e-4)
    assert (total[2], trace.input_tokens[2]) == (3 * 252, 3 * 252 + 474)


def test_sessions_keep_turns_and_think_times():
    path = FOLDER / "claude_code_sessions_sample.jsonl.gz"
    with pytest.raises(ValueError, match=r"row 2872: output_length = 0, but must be from 1"):
        loading.load(path)
    trace = loading.load(path, on_invalid="reject")
    assert (len(trace), len(trace.rejected), trace.session.max() + 1) == (12_070, 3, 207)
    assert trace.rejected[0][:3] == (2872, "output_length", 0)
    assert trace.think_seconds[:3].tolist() == [0.0, 13.0, 25.0]
    assert trace.turn[:3].tolist() == [0, 1, 2]
    assert len(trace.blocks(0)) == 1_871 == trace.input_tokens[0] // 64


def test_plain_rows_may_name_their_traffic_class(tmp_path):
    path = write(tmp_path / "classes.jsonl", [line(0), line(1, traffic=2), line(2)])
    trace = loading.load(path, "plain")
    assert trace.traffic.tolist() == [0, 2, 0]
    assert traces.take(trace, [1]).traffic.tolist() == [2]
    assert workload(trace).traffic.tolist() == [0, 2, 0]


def test_sessions_may_share_their_tools_and_system_prompt(tmp_path):
    def turn(session, at, runs, tools):
        extra = {"session_id": session, "turn": 0, "hash_runs": runs}
        return line(at, 640, 1, **extra, tool_tokens=tools, system_tokens=30)

    rows = [
        turn("a", 0, [[1, 10]], 98),
        turn("b", 1, [[50, 1], [60, 9]], 98),
        turn("c", 2, [[70, 3]], 99),
        turn("a", 3, [[1, 10]], 98),
    ]
    path = write(tmp_path / "t", rows)
    assert loading.load(path).blocks(1).tolist() == [50, *range(60, 69)]
    shared = loading.load(path, share_system_prefix=True)
    a, b, c, again = (shared.blocks(q).tolist() for q in range(4))
    assert a[:2] == b[:2] and a[2:] == list(range(3, 11)) and b[2:] == list(range(61, 69))
    assert a == again and c[2:] == [72] and not {*c} & {*a, *b}


@pytest.mark.parametrize("path", TRUTH, ids=lambda p: p.parent.name)
def test_measured_times_give_the_recorded_means(path):
    """LLMServingSim printed the same runs' TTFT and latency in milliseconds."""
    summary = (path.parent / "llmservingsim_summary.txt").read_text()
    seen = loading.vllm_measurements(path)
    for metric, end in (("TTFT", "first_token"), ("Latency", "last_token")):
        recorded = float(re.search(rf"{metric} Mean +([\d.]+)", summary)[1])
        assert 1e3 * (seen[end] - seen["queued"]).mean() == pytest.approx(recorded, abs=0.06)
    trace = loading.load(path)
    assert len(trace) == 300 and trace.arrival[0] == 0
    assert trace.arrival_seconds == pytest.approx(seen["queued"], abs=0.5)


def test_ground_truth_is_there():
    assert len(TRUTH) == 3


def test_burstgpt_rows(tmp_path):
    rows = [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45.5,GPT-4,1087,0,1087,API log",
        "45,GPT-4,417,276,693,Conversation log",
    ]
    trace = loading.load(write(tmp_path / "b.csv", rows), on_invalid="reject")
    assert trace.arrival.tolist() == [5 * 10**9, 45 * 10**9]
    assert trace.output_tokens.tolist() == [18, 276] and trace.row.tolist() == [0, 2]
    assert [r.row for r in trace.rejected] == [3]


def test_bailian_chats_become_sessions_and_any_hash_is_an_id(tmp_path):
    rows = [
        line(0.5, 33, 1, chat_id=7, parent_chat_id=-1, turn=1, hash_ids=["x", "y", "z"]),
        line(1, 5, 1, chat_id=8, parent_chat_id=-1, turn=1, hash_ids=["q"]),
        line(2, 40, 1, chat_id=9, parent_chat_id=7, turn=2, hash_ids=["x", "y", "w"]),
        line(3, 40, 1, chat_id=11, parent_chat_id=9, turn=3, hash_ids=["x"]),
    ]
    trace = loading.load(write(tmp_path / "t", rows))
    assert trace.session.tolist() == [0, 1, 0, 0] and trace.block_tokens == 16
    assert trace.arrival.tolist() == [5 * 10**8, 10**9, 2 * 10**9, 3 * 10**9]
    assert trace.blocks(0)[:2].tolist() == trace.blocks(2)[:2].tolist()
    assert trace.blocks(0)[2] != trace.blocks(2)[2] and len({*trace.blocks(0)}) == 3


def test_unsorted_rows_are_sorted_stably_and_keep_their_number(tmp_path):
    rows = [line(9, 1), line(3.25, 2), "", line(9, 3), line(3.25, 4, hash_ids=[])]
    trace = loading.load(write(tmp_path / "t", rows), format="plain")
    assert trace.input_tokens.tolist() == [2, 4, 1, 3]
    assert trace.row.tolist() == [1, 4, 0, 3]
    assert trace.arrival.tolist() == [3_250_000, 3_250_000, 9_000_000, 9_000_000]


BAD = {
    "no output": ({"timestamp": 0, "input_length": 5}, "output_length = missing"),
    "negative time": (line(-1), "timestamp = -1, but a time must not be negative"),
    "empty prompt": (line(0, 0), "input_length = 0, but must be from 1"),
    "no answer": (line(0, 3, 0), "output_length = 0, but must be from 1"),
    "words": (line(0, "many"), "input_length = many, but must be a number"),
    "truth": (line(0, True), "input_length = True, but must be a number"),
    "fraction": (line(0, 2.5), "input_length = 2.5, but must be a whole number"),
    "nan": ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp = nan"),
    "too long": (line(0, 2**31), "input_length = 2147483648, but must be from 1 to 2147483647"),
    "huge": ('{"timestamp": 0, "input_length": 1e999999, "output_length": 1}', "input_length = "),
    "forever": (line(10**30), "but a time must stay below"),
    "broken": ("{timestamp", "line = {timestamp, but must be one JSON object"),
    "not an object": ("[1, 2]", "must be one JSON object"),
    "ids": (line(0, 600, hash_ids=[1, 2, 3]), "3 blocks, but a prompt of 600 tokens has 2 blocks"),
    "id type": (line(0, 600, hash_ids=[1.5]), "must be a list of integers or strings"),
    "id list": (line(0, 600, hash_ids=4), "must be a list of integers or strings"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_stops_or_is_counted(tmp_path, name):
    row, message = BAD[name]
    path = write(tmp_path / "t.jsonl", [line(hash_ids=[1]), row, line(1, hash_ids=[1])])
    with pytest.raises(ValueError) as caught:
        loading.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path} row 2: ") and message in text and "on_invalid=" in text
    assert "\n" not in text
    trace = loading.load(path, on_invalid="reject")
    assert len(trace) == 2 and [r.row for r in trace.rejected] == [2]


def test_bad_csv_rows(tmp_path):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    for row, message in (
        ("2023-13-16 18:15:46,1,1", "must look like"),
        ("yesterday,1,1", "must look like"),
        ("2023-11-16 18:15:46,1", "must be one full csv row"),
        ("2023-11-16 18:15:46,,1", "ContextTokens = missing"),
    ):
        path = write(tmp_path / "a.csv", [head, row])
        with pytest.raises(ValueError, match=rf"a.csv row 2: .*{message}"):
            loading.load(path)
        with pytest.raises(ValueError, match=r"no usable row \(1 rejected\)"):
            loading.load(path, on_invalid="reject")


def test_zones_are_respected(tmp_path):
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,1,1",
        "2024-05-10T02:00:00+01:00,2,1",
        "2024-05-10 00:00:00.00993Z,3,1",
    ]
    trace = loading.load(write(tmp_path / "a.csv", rows))
    assert trace.arrival.tolist() == [0, 0, 3_599_990_070_000]
    assert trace.input_tokens.tolist() == [1, 3, 2]


def test_format_errors_list_the_formats(tmp_path):
    path = write(tmp_path / "t", [line()])
    empty, odd = write(tmp_path / "empty", []), write(tmp_path / "odd", ["a,b", "1,2"])
    for call, message in (
        (lambda: loading.load(path, "mooncacke"), "format 'mooncacke' is unknown; choose one of"),
        (lambda: loading.load(path, "azure"), "'azure' is csv with TIMESTAMP, ContextTokens"),
        (lambda: loading.load(odd), r"a csv file with \['a', 'b'\] is no known format"),
        (lambda: loading.load(odd, "azure"), "'azure' is csv with .* the file is csv with"),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*mooncake.*burstgpt"):
            call()
    with pytest.raises(ValueError, match="the file is empty"):
        loading.load(empty)
    with pytest.raises(ValueError, match="on_invalid='skip' is unknown"):
        loading.load(path, on_invalid="skip")
    with pytest.raises(ValueError, match="no measured"):
        loading.vllm_measurements(path)


def test_gzip_is_recognised_by_content(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(gzip.compress(json.dumps(line(7)).encode()))
    assert loading.load(tmp_path / "t.jsonl").arrival.tolist() == [7_000_000]


@pytest.fixture(scope="module")
def mooncake():
    return loading.load(FOLDER / "mooncake_conversation_trace.jsonl.gz")


def test_head_and_window_keep_whole_requests(mooncake):
    first = traces.head(mooncake, 50)
    later = traces.window(mooncake, 60.0, 120.0)
    assert len(first) == 50 and len(traces.head(mooncake, 10**9)) == len(mooncake)
    inside = [q for q, t in enumerate(mooncake.arrival_seconds) if 60 <= t < 120]
    assert later.row.tolist() == inside
    assert (later.arrival + 60 * 10**9).tolist() == mooncake.arrival[inside].tolist()
    for q, original in enumerate(inside):
        assert later.blocks(q).tolist() == mooncake.blocks(original).tolist()
    for call in (
        lambda: traces.head(mooncake, 0),
        lambda: traces.window(mooncake, 5, 5),
        lambda: traces.window(mooncake, 10_000, 10_001),
    ):
        with pytest.raises(ValueError):
            call()


def test_taking_requests_takes_their_images():
    trace = loading.load(FOLDER / "servegen_multimodal_mm-image_10rps_1200s.csv.gz")
    which = np.array([2, 7, 0])
    taken = traces.take(trace, which)
    assert taken.image_tokens_per_request.tolist() == trace.image_tokens_per_request[which].tolist()
    assert np.diff(taken.image_offsets)[0] == 3


def test_scaling_changes_one_thing(mooncake):
    fast = traces.scale_rate(mooncake, 2.0)
    assert fast.arrival.tolist() == (mooncake.arrival // 2).tolist()
    small = traces.scale_lengths(mooncake, inputs=0.25, outputs=3.0)
    assert small.block_tokens == 128
    assert np.abs(small.input_tokens - mooncake.input_tokens / 4).max() <= 0.75
    assert small.input_tokens.min() >= 1
    assert small.output_tokens.tolist() == (3 * mooncake.output_tokens).tolist()
    for call in (
        lambda: traces.scale_rate(mooncake, 0.0),
        lambda: traces.scale_lengths(mooncake, inputs=1e-4),
        lambda: traces.scale_lengths(mooncake, outputs=-1.0),
        lambda: traces.scale_lengths(mooncake, outputs=1e9),
    ):
        with pytest.raises(ValueError):
            call()
