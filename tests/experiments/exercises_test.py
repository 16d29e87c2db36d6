"""The exercises: predictions against numbers worked out by hand, answers against predictions."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from experiments.answers import (
    exercise_1,
    exercise_2,
    exercise_3,
    exercise_4,
    exercise_5,
    exercise_6,
)
from experiments.answers.answer import Answer, Exercise
from experiments.answers.tandem import ends
from experiments.labs import RECORDS_25
from experiments.settings import UserError, load, resolve_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return resolve_config(load(f"{ROOT}/configs/exercises.py:smoke"))


def solve(exercise: Exercise, section: dict[str, Any]) -> Answer:
    prediction = exercise.predict(section, 0)
    answer = exercise.answer(section, 0, prediction)
    assert answer.summary["agrees"], answer.text
    assert "FAILED" not in answer.text and all(plot.figure.axes for plot in answer.plots)
    json.dumps(answer.summary)
    return answer


def test_jobs_take_the_first_free_server() -> None:
    assert ends([4, 6, 8, 10], [4] * 4, 1) == [8, 12, 16, 20]
    assert ends([4, 4, 6, 6], [4] * 4, 2) == [8, 8, 12, 12]  # the chapter's shared cache
    assert ends([5, 1], [2, 7], 1) == [10, 8]  # by readiness, answered in the order given


def test_one_decode_worker_absorbs_the_whole_saving() -> None:
    answer = solve(exercise_1.EXERCISE, {"decode_workers": (1,)})
    # Ready at 4, 6, 8, 10 and at 4, 4, 6, 6; served at 4, 8, 12, 16 both times.
    assert answer.summary["values"] == {
        "1 local": {"last prefill": 9, "last answer": 20, "prefill wait": 3, "decode wait": 3},
        "1 shared": {"last prefill": 5, "last answer": 20, "prefill wait": 1, "decode wait": 5},
    }


def test_chapters_saving_is_predicted_with_two_workers() -> None:
    values = exercise_1.predict({"decode_workers": (2,)}, 0).values
    assert [values[2, name]["last answer"] for name in ("local", "shared")] == [14, 12]


def test_recomputing_rule_by_hand() -> None:
    values = exercise_2.predict({"hit_tokens": (256, 768)}, 0).values
    # 6 units with the prefix, 8 without: owner, other, owner, other end at 7, 9, 13, 17.
    assert tuple(values[256, "recompute"].values()) == (12, 22, 11.5)
    # Affinity: prefills end at 7, 13, 19, 25.
    assert tuple(values[256, "affinity"].values()) == (12, 30, 16)
    assert values[768, "affinity"] == values[768, "recompute"]


@pytest.mark.slow
def test_affinity_is_preferable_for_the_first_answer_only(config: dict[str, Any]) -> None:
    wins = solve(exercise_2.EXERCISE, config["exercise_2"]).summary["affinity_preferable"]
    assert wins == {"first answer": [256, 768], "last answer": [768], "mean wait": [768]}


@pytest.mark.slow
def test_902_tokens(config: dict[str, Any]) -> None:
    summary = solve(exercise_3.EXERCISE, config["exercise_3"]).summary
    present, missing, larger = summary["first"].values()
    assert tuple(present.values()) == (768, 768, 0, 134, 762, 6)
    assert tuple(missing.values()) == (768, 640, 128, 134, 762, 0)
    assert larger["restart H"] == 640 and larger["unfilled rows"] == 0
    assert summary["lengths_with_unfilled_rows"] == 6  # 902 to 907
    read = list(summary["fetched_bytes"].values())
    blocks = 6 * 128 + 0  # every length from 902 to 1,029 hits six blocks
    assert read == [blocks * 113_920, blocks * 113_920, (blocks - 6) * 113_920]


@pytest.mark.slow
def test_same_request_hits_and_other_work(config: dict[str, Any]) -> None:
    section = {**config["exercise_4"], "requests": 20_000}
    values = solve(exercise_4.EXERCISE, section).summary["values"]
    assert values[1]["request hits"] == values[6]["request hits"] == 0.5
    for blocks, busy, wait in ((1, 0.768, 1.596), (6, 0.512, 0.457)):  # M/G/1
        # The request that filled the cache beforehand finds its whole prompt.
        assert values[blocks]["token hits"] == pytest.approx(blocks / 16, rel=1e-3)
        assert values[blocks]["by tokens"] == pytest.approx(busy, rel=0.02)
        assert values[blocks]["wait"] == pytest.approx(wait, rel=0.1)


def slow_frontier(taus: dict[int, float]) -> list[int]:
    points = [(r, s * taus[r], s * r * taus[r]) for r, s in RECORDS_25.items()]
    return [
        r
        for r, x, y in points
        if not any(a >= x and b >= y and (a > x or b > y) for _, a, b in points)
    ]


def test_ranges_of_tau_hold_everywhere_inside_them() -> None:
    for changed in RECORDS_25:
        found = exercise_5.ranges(changed)
        assert found[0][0] == 1 and found[-1][1] == 4
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in itertools.pairwise(found))
        for low, high, kept in found:
            for tau in np.linspace(float(low), float(high), 9)[1:-1]:
                assert kept == slow_frontier(dict.fromkeys(RECORDS_25, 3.25) | {changed: tau})


def test_scatter_of_a_step_by_enumeration() -> None:
    tokens = []
    for pattern in itertools.product((1, 0), repeat=3):
        weight = 0.7 ** sum(pattern) * 0.3 ** (3 - sum(pattern))
        tokens.append((weight, 1 + sum(itertools.accumulate(pattern, lambda a, b: a * b))))
    mean = sum(w * n for w, n in tokens)
    assert exercise_5.spread(0.7) ** 2 == pytest.approx(sum(w * (n - mean) ** 2 for w, n in tokens))


def test_counts_of_the_changed_point(config: dict[str, Any]) -> None:
    section = config["exercise_5"]
    summary = solve(exercise_5.EXERCISE, section).summary
    assert summary["edge"] == pytest.approx(26 / 7)
    assert summary["sets"] == {"as before": [8, 16, 32, 64], "changed": [8, 16, 32, 48, 64]}
    for name, expected in (("as before", 3.25), ("changed", 1 + 0.97 + 0.97**2 + 0.97**3)):
        one = summary[name]
        assert one["tokens"] == section["requests"] * section["output_tokens"]
        released = one["tokens"] + one["clipped_tokens"]
        assert one["unclipped_tau"] == pytest.approx(released / one["request_steps"])
        assert abs(one["unclipped_tau"] - expected) < 1.5 * one["half_width"]
        assert 0 < one["clipped_tokens"] <= 3 * one["clipped_requests"]


@pytest.mark.parametrize("changed", RECORDS_25)
def test_other_points_have_an_edge_or_are_refused(changed: int) -> None:
    section = {"changed_requests": changed, "conditional_acceptance": 0.95}
    better = [
        slow_frontier(dict.fromkeys(RECORDS_25, 3.25) | {changed: t}) for t in (3.26, 3.6, 3.99)
    ]
    if all(kept == [8, 16, 32, 64] for kept in better):
        with pytest.raises(ValueError, match="no better acceptance of that point changes the set"):
            exercise_5.predict(section, 0)
    else:
        values = exercise_5.predict(section, 0).values
        above = dict.fromkeys(RECORDS_25, 3.25) | {changed: values["edge"] + 1e-9}
        assert slow_frontier(above) != values["sets"]["as before"] == [8, 16, 32, 64]


def test_query_by_tag_and_source(tmp_path: pathlib.Path) -> None:
    record = tmp_path / "config.json"
    row = {"parameter": "a.b", "value": 3, "tag": "released", "source": "here"}
    record.write_text(json.dumps({"provenance": [row, {**row, "tag": "assumed"}]}))
    rows = exercise_6.tagged([], [str(record)])
    assert [r["value"] for r in exercise_6.query(rows, tag="released", source="h*")] == [3]
    assert exercise_6.query(rows, parameter="b*") == []
    assert [r["column"] for r in exercise_6.support(rows)] == ["Released in DeepInfer"]
    with pytest.raises(UserError, match=r"nowhere\.json, which is not a run"):
        exercise_6.tagged([], [str(tmp_path / "nowhere.json")])


def test_moves_follow_the_last_engine_of_a_group() -> None:
    group, engine = np.array([1, 2, 1, 1, 2]), np.array([0, 0, 1, 1, 0])
    assert exercise_6.moved(group, engine).tolist() == [-1, -1, 1, 0, 0]


@pytest.mark.slow
def test_only_a_shared_store_hits_wherever_a_conversation_goes(config: dict[str, Any]) -> None:
    hits = solve(exercise_6.EXERCISE, config["exercise_6"]).summary["hits"]
    shared, local = hits.values()
    assert shared["stayed"] == shared["moved"] == local["stayed"] == 0.75
    assert local["moved"] < 0.5
