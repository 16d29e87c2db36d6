"""The peer's adapter keeps every request of a trace, in order."""

import datetime
import gzip
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.peers import dynamo_replay

REQUESTS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(1, 5000), st.integers(1, 2000)), min_size=1
)


def azure_rows(requests: list[tuple[int, int, int]]) -> list[dict[str, str]]:
    """Rows as published: seven fractional digits, no time zone; gaps in microseconds."""
    now = datetime.datetime(2023, 11, 16, 18, 15, 46, 680590)
    rows = []
    for gap, context, generated in requests:
        stamp = now.strftime("%Y-%m-%d %H:%M:%S.%f") + "0"
        rows.append(
            {
                "TIMESTAMP": stamp,
                "ContextTokens": str(context),
                "GeneratedTokens": str(generated),
            }
        )
        now += datetime.timedelta(microseconds=gap)
    return rows


@given(REQUESTS, st.sampled_from([1, 16, 64, 512]))
def test_every_request_is_kept_in_order_with_its_lengths_and_time(requests, block):
    records = list(dynamo_replay.azure_to_mooncake(azure_rows(requests), block))
    assert [(r["input_length"], r["output_length"]) for r in records] == [r[1:] for r in requests]
    elapsed = 0
    for record, (gap, _, _) in zip(records, requests, strict=True):
        assert record["timestamp"] * 1000 == pytest.approx(elapsed, rel=1e-12, abs=1e-6)
        elapsed += gap


@given(REQUESTS, st.sampled_from([1, 16, 64, 512]))
def test_blocks_cover_the_prompt_and_are_never_shared(requests, block):
    records = list(dynamo_replay.azure_to_mooncake(azure_rows(requests), block))
    ids = [i for record in records for i in record["hash_ids"]]
    assert len(ids) == len(set(ids))
    for record in records:
        spare = len(record["hash_ids"]) * block - record["input_length"]
        assert 0 <= spare < block


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_published_azure_rows_convert_line_for_line(tmp_path, suffix):
    source = tmp_path / f"azure{suffix}"
    source.write_bytes(gzip.compress(AZURE.encode()) if suffix == ".csv.gz" else AZURE.encode())
    target = tmp_path / "trace.jsonl"
    assert not dynamo_replay.convert_trace(source, target, 64)
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first == {
        "timestamp": 0.0,
        "input_length": 374,
        "output_length": 44,
        "hash_ids": [0, 1, 2, 3, 4, 5],
    }
    assert second["timestamp"] == pytest.approx(4314.579)
    assert second["hash_ids"] == [6, 7, 8, 9, 10, 11, 12]


def test_a_trace_in_the_peers_own_format_passes_unchanged(tmp_path):
    line = b'{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    source = tmp_path / "mooncake.jsonl.gz"
    source.write_bytes(gzip.compress(line * 3))
    target = tmp_path / "trace.jsonl"
    assert dynamo_replay.convert_trace(source, target, 64)
    assert target.read_bytes() == line * 3


def test_the_azure_hour_keeps_its_published_totals(tmp_path):
    hour = pathlib.Path(__file__).parents[2] / "configs/traces/azure_llm_2023_conv.csv.gz"
    target = tmp_path / "trace.jsonl"
    dynamo_replay.convert_trace(hour, target, 512)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(records) == 19_366  # AzurePublicDataset, AzureLLMInferenceTrace_conv.csv
    with gzip.open(hour, "rt") as text:
        columns = np.loadtxt(text, delimiter=",", skiprows=1, usecols=(1, 2), dtype=int)
    lengths = [[record["input_length"], record["output_length"]] for record in records]
    np.testing.assert_array_equal(lengths, columns)
