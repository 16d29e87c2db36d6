"""The day of the scaling loop: promises counted on rounds written by hand, and what the figure draws."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.report.write import Case
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode, Pool
from deepinfer_jax.simulator.usage import scaling_rounds
from experiments import autoscale
from experiments.simulation import Result
from tests.simulator.oracle.hand import cost

POOL = Pool(initial=2, minimum=2, maximum=6, capacity=10, step_up=2, step_down=1)


def rounds(*rows):
    """(engines, demand, wanted) of successive rounds, a second apart."""
    return np.asarray([(10**9 * (k + 1), *row) for k, row in enumerate(rows)])


@pytest.mark.parametrize(
    "row, promise",
    [
        ((3, 30, 3), None),
        ((3, 24, 2), None),  # at 0.8 exactly it may shrink
        ((3, 25, 2), "shrank above 0.8"),
        ((2, 90, 4), None),
        ((2, 90, 5), "grew by more than a step"),
        ((5, 0, 3), "shrank by more than a step"),
        ((2, 0, 1), "fewer than the minimum"),
        ((5, 99, 7), "more than the maximum"),
        ((0, 99, 2), None),  # the bounds win over the steps
        ((1, 99, 6), None),
    ],
)
def test_a_broken_promise_is_counted_under_its_name(row, promise):
    found = autoscale.broken(rounds((3, 30, 3), row), POOL, 0.8)
    assert {name for name, count in found.items() if count} == ({promise} if promise else set())
    assert sum(found.values()) == (promise is not None)


@dataclasses.dataclass
class Lives:
    scale_log: np.ndarray
    scale_rounds: int


@dataclasses.dataclass
class Run:
    lives: Lives | None


def test_rounds_are_read_by_pool_and_not_guessed_when_too_many():
    log = np.zeros((3, 7), np.int64)
    log[0], log[1] = (5, -1, -1, -1, 2, 30, 3), (10, -1, -1, -1, 3, 20, 2)
    made = scaling_rounds(Run(Lives(log, 2)))
    assert set(made) == {"completion"}
    assert made["completion"].tolist() == [[5, 2, 30, 3], [10, 3, 20, 2]]
    assert scaling_rounds(Run(None)) == {}
    with pytest.raises(ValueError, match=r"4 scaling rounds happened where 3 are recorded"):
        scaling_rounds(Run(Lives(log, 4)))


@dataclasses.dataclass
class Made:
    translation: "Made | None" = None
    cluster: ClusterConfig | None = None


def test_the_figure_draws_demand_in_engines_and_what_each_case_held():
    cluster = ClusterConfig(
        modes=(Mode.PROMPT,) * 6 + (Mode.COMPLETION,),
        cost=cost(),
        scale_prompt=POOL,
        scale_round_ticks=10**9,
    )
    arrival = np.arange(120) * 10**9
    t = metrics.timeline(arrival, arrival + 10**9, first_token=arrival, output_tokens=[5] * 120)
    summary = {"gpu_hours": 2.0, "goodput_fraction": 1.0}
    summary |= {"ttft_seconds": {"p99": 1.0}, "tpot_seconds": {"p99": 1.0}}
    held = rounds((2, 45, 4), (4, 30, 3))
    results = [
        Result(Case("all held", t, summary), "", [], []),
        Result(Case("scaled", t, summary | {"gpu_hours": 1.0}), "", [], [], {"prompt": held}),
    ]
    cases = {r.case.name: Made(translation=Made(cluster=cluster)) for r in results}
    made = autoscale.figure(results, cases, metrics.Slo(ttft=0.5), bins=4)
    panels = {ax.get_title(loc="left"): ax for ax in made.axes}
    drawn = {line.get_label(): line for line in panels["Prompt engines"].lines}
    assert drawn["demand"].get_ydata().tolist() == [4.5, 3.0]
    assert drawn["scaled"].get_ydata().tolist() == [4, 3]
    assert set(panels) == {
        "Prompt engines",
        "Arrivals per second",
        "Share of arrivals within the objectives",
    }
    savings = autoscale.saving_rows(results)
    assert [row["of all held"] for row in savings] == ["100 %", "50 %"]
    (row,) = autoscale.promise_rows(results[1:], cases)
    assert row["engines"] == "3 to 4, mean 3.50" and row["grew by more than a step"] == 0
