"""The labs print what the chapter prints (sections 11.0, 11.2.1, 11.4 and 11.6)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from deepinfer_jax.policy.prefix import hit_lengths
from deepinfer_jax.simulator.labs import LAB_23, QueueLab
from experiments import labs

P_AND_D_ENDS = {
    "local affinity": ([3, 5, 7, 9], [8, 10, 12, 14]),
    "shared cache": ([3, 3, 5, 5], [8, 8, 12, 12]),
    "shared, no hits": ([9, 9, 17, 17], [14, 14, 22, 22]),
    "shared, slower handoff": ([3, 3, 5, 5], [10, 10, 14, 14]),
    "affinity, slower handoff": ([3, 5, 7, 9], [10, 12, 14, 16]),
}


@pytest.fixture(scope="module")
def lab_23() -> labs.Lab:
    return labs.lab_23()


def test_service_cases_end_when_the_chapter_says(lab_23: labs.Lab) -> None:
    assert lab_23.summary["ends"] == P_AND_D_ENDS


def test_capacity_moves_prefill_from_three_to_one(lab_23: labs.Lab) -> None:
    assert lab_23.summary["gpu_equivalents"] == {"0%": (3, 3), "75%": (1, 3)}


def test_printed_service_table_is_the_chapters(
    lab_23: labs.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    labs.show(lab_23)
    text = capsys.readouterr().out
    for name, (prefill, decode) in P_AND_D_ENDS.items():
        pattern = rf"^{name} +{re.escape(str(prefill))} +{re.escape(str(decode))}$"
        assert re.search(pattern, text, re.MULTILINE), name
    assert all(len(line) <= 100 for line in text.splitlines())


def test_no_reuse_is_no_match_and_not_a_short_one() -> None:
    assert not QueueLab(reused_tokens=0).workload().match_node.any()
    assert [case.handoff for case in LAB_23.values()] == [1, 1, 1, 3, 3]


def test_unit_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_unit=3 "):
        QueueLab(tokens_per_unit=3).cost()


def test_hit_length_rows() -> None:
    rows = [tuple(row.values()) for row in labs.lab_24().summary["rows"]]
    assert rows == [
        (128, 0, 0, 0),
        (261, 0, 0, 0),
        (262, 128, 128, 0),
        (390, 256, 256, 128),
        (902, 768, 768, 640),
        (1024, 768, 768, 640),
    ]


def test_enumeration_counts_all_cases_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert labs.enumerate_hits() == 2049 * 17 * 2 == 69_666
    for reserve, wrong_swa in ((133, False), (134, True)):
        monkeypatch.setattr(
            labs,
            "hit_lengths",
            lambda n, c, s, r=reserve, w=wrong_swa: hit_lengths(n, c, s | w, reserve=r),
        )
        with pytest.raises(AssertionError):
            labs.enumerate_hits()


def test_frontier_rates_and_acceptance() -> None:
    lab = labs.lab_25()
    rows = [tuple(row.values()) for row in lab.tables[0].rows]
    assert rows == [
        (8, "100", "325.00", "2600.00", "yes"),
        (16, "90", "292.50", "4680.00", "yes"),
        (32, "60", "195.00", "6240.00", "yes"),
        (48, "35", "113.75", "5460.00", "dominated"),
        (64, "40", "130.00", "8320.00", "yes"),
    ]
    assert lab.summary["frontier"] == [8, 16, 32, 64]
    values = [row["value"] for row in lab.tables[1].rows]
    assert values == ["3.250000", "2.734375", "15.8654 %", "75.69 steps/s", "15744 tokens/s/GPU"]
    assert np.isclose(lab.summary["shrink_percent"], 100 * (1 - 175 / 208), rtol=1e-12)
