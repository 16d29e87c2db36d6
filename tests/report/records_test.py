"""Records are written whole or not at all."""

import errno
import gzip
import json
import os

import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.report import records


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "summary.json"
    records.write_json(path, {"old": 1})
    monkeypatch.setattr(records.os, broken, full_disk)
    with pytest.raises(records.WriteError, match="No space left") as caught:
        records.write_json(path, {"new": 2})
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_disk_that_fills_while_rows_are_written(tmp_path):
    def rows():
        yield {"a": 1}
        full_disk()

    with pytest.raises(records.WriteError, match="No space left"):
        records.write_jsonl(tmp_path / "results.jsonl", rows(), 2)
    assert not list(tmp_path.iterdir())


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(records.WriteError, match="cannot write"):
        records.write_json(tmp_path / "run" / "summary.json", {})


def test_errors_of_the_caller_pass_through_and_leave_nothing(tmp_path):
    with pytest.raises(KeyError), records.atomic(tmp_path / "x"):
        raise KeyError("x")
    assert not list(tmp_path.iterdir())


def test_numpy_values_and_nan_become_plain_json(tmp_path):
    value = {"a": np.float32(1.5), "b": (np.int64(2), np.array([1.0, np.nan])), "c": float("inf")}
    records.write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": 1.5,
        "b": [2, [1.0, None]],
        "c": "inf",
    }


def test_many_rows_are_packed_and_replace_the_other_form(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    assert records.write_jsonl(path, [{"i": 0}], 1) == path
    monkeypatch.setattr(records, "GZIP_ABOVE_ROWS", 2)
    packed = records.write_jsonl(path, ({"i": i} for i in range(3)), 3)
    assert not path.exists() and packed.name == "results.jsonl.gz"
    first = packed.read_bytes()
    records.write_jsonl(path, ({"i": i} for i in range(3)), 3)
    assert packed.read_bytes() == first
    assert gzip.decompress(first) == b'{"i": 0}\n{"i": 1}\n{"i": 2}\n'
    assert records.read_jsonl(packed) == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_journal_survives_a_torn_line(tmp_path):
    path = tmp_path / "points.jsonl"
    assert records.read_jsonl(path) == []
    records.append_jsonl(path, {"key": "a"})
    with open(path, "a") as file:
        file.write('{"key": "b')
    assert records.read_jsonl(path) == [{"key": "a"}]
    records.append_jsonl(path, {"key": "c"})
    assert records.read_jsonl(path) == [{"key": "a"}, {"key": "c"}]


def test_rows_may_hold_numpy_values_and_nan(tmp_path):
    path = tmp_path / "points.jsonl"
    records.append_jsonl(path, {"a": np.int64(3), "b": np.array([1, 2])})
    records.append_jsonl(path, {"a": float("nan"), "b": np.float32(0.5)})
    assert records.read_jsonl(path) == [{"a": 3, "b": [1, 2]}, {"a": None, "b": 0.5}]


def test_fingerprint_ignores_key_order_but_not_values():
    assert records.fingerprint({"a": 1, "b": (1, 2)}) == records.fingerprint({"b": [1, 2], "a": 1})
    assert records.fingerprint({"a": 1}) != records.fingerprint({"a": 2})


def test_request_rows_name_the_status_and_hide_the_sentinel():
    t = metrics.timeline(
        arrival=np.array([0, 5]), first_token=[3, -1], finish=np.array([9, -1]), status=[0, 1]
    )
    done, rejected = records.request_rows(t)
    assert done["finish"] == 9 and done["status"] == "completed" and done["decode_rank"] is None
    assert rejected["first_token"] is None and rejected["status"] == "rejected: too long"


def test_environment_says_what_ran():
    got = records.environment()
    assert got["schema_version"] == 1 and got["device_kind"] and got["jax"]
    assert got["git"] == "unknown" or len(got["git"].removesuffix("+changes")) == 40


def test_no_git_is_not_an_error(tmp_path):
    assert records.git_hash(tmp_path / "nowhere") == "unknown"
