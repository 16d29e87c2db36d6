"""Derivatives and differences against a queue written as a recursion, with its derivative."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator.source import source
from experiments import sensitivity
from experiments.sensitivity_findings import Findings, central
from experiments.settings import load, resolve_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = (1e-6, 0.1)


def batch_server(arrival: np.ndarray, base: float, token: float, most: int, axis: str) -> Any:
    """(TTFT [Q], its derivative by the log of one cost [Q]) of a server that takes up to `most`.

    A step of n prompts of 1,000 tokens lasts base + 1,000 n token; it takes along whoever has come.
    """
    ttft, slope = np.zeros(len(arrival)), np.zeros(len(arrival))
    free = d_free = 0.0
    i = 0
    while i < len(arrival):
        waiting = free > arrival[i]
        start, d_start = (free, d_free) if waiting else (arrival[i], 0.0)
        n = int(np.sum(arrival[i : i + most] <= start))
        free = start + base + 1000 * n * token
        d_free = d_start + (base if axis == "prefill_step" else 1000 * n * token)
        ttft[i : i + n], slope[i : i + n] = free - arrival[i : i + n], d_free
        i += n
    return ttft, slope


@pytest.fixture(scope="module")
def batches() -> tuple[dict[str, Any], dict[str, Any], Any]:
    values = resolve_config(load(f"{ROOT}/configs/sensitivity.py:smoke"))
    one = values["scenarios"]["batched"]
    return values, one, sensitivity.measure(values, one, seed=5)


def test_values_and_slopes_are_those_of_the_recursion(batches: Any) -> None:
    values, one, found = batches
    cost = one["cost"]
    for axis, numbers in found.items():
        for k in range(values["draws"]):
            arrival = source(one["workload"]).trace(5 * values["draws"] + k).arrival / 1e9
            kept = slice(int(values["warmup_share"] * len(arrival)), None)

            def at(x: float, arrival: Any = arrival, axis: str = axis) -> Any:
                f = {"prefill_step": 1.0, "prefill_token": 1.0} | {axis: np.exp(x)}
                scaled = [f[name] * cost[name] for name in f]
                return batch_server(arrival, *scaled, 4, axis)

            ttft, slope = at(0.0)
            assert numbers["value TTFT"][k] == pytest.approx(ttft[kept].mean(), rel=1e-9)
            assert numbers["slope TTFT"][k] == pytest.approx(slope[kept].mean(), rel=1e-9)
            assert numbers["slope within"][k] == 0
            for side, sign in (("above", 1), ("below", -1)):
                moved = at(0.1 * sign)[0][kept]
                assert numbers[f"{side} TTFT"][k, 1] == pytest.approx(moved.mean(), rel=1e-6)
                share = np.mean(moved <= one["ttft"])
                assert numbers[f"{side} within"][k, 1] == pytest.approx(share, abs=1e-9)


def test_tiny_steps_give_the_derivative_and_large_ones_change_batches(batches: Any) -> None:
    values, _, found = batches
    for numbers in found.values():
        assert not numbers["changed"][:, 0].any() and numbers["changed"][:, 1].all()
        small = central(numbers, "TTFT", STEPS)
        assert small[:, 0] == pytest.approx(numbers["slope TTFT"], rel=1e-6)
        assert np.all(np.abs(small[:, 1] / numbers["slope TTFT"] - 1) > 0.05)
    made = Findings({"batched": found}, values["steps"], values["compared_step"], "t")
    total, equal = made.exact_share()
    assert total == equal == 2 * 2 * 3  # costs, latencies, draws


def test_scaling_touches_one_cost() -> None:
    cost = StepCost(10.0, 20.0, 0.0, 0.0, 0.0, 0.0, np.ones((2, 3)), 0.0, 0.0)
    for k in range(4):
        made = sensitivity.scaled(cost, np.log(3.0) * np.eye(4)[k])
        found = [made.prefill_base, made.prefill_token, *np.asarray(made.decode_forms).T[:2, 0]]
        wanted = np.asarray([10.0, 20.0, 1.0, 1.0]) * np.where(np.arange(4) == k, 3.0, 1.0)
        assert np.asarray(found) == pytest.approx(wanted, rel=1e-6)
        assert np.all(np.asarray(made.decode_forms)[:, 2] == 1.0)


def made_up(bias: float) -> Findings:
    """Four draws in which differences exceed derivatives by `bias` and scatter by a tenth."""
    slope = np.asarray([1.0, 2.0, 3.0, 4.0])
    apart = slope + bias + 0.1 * np.asarray([1, -1, 1, -1])
    numbers: dict[str, Any] = {"changed": np.ones((4, 2), bool)}
    for metric in ("TTFT", "E2E", "within"):
        numbers |= {f"slope {metric}": slope, f"value {metric}": 5 * slope}
        numbers[f"above {metric}"] = np.outer(apart, STEPS)
        numbers[f"below {metric}"] = -np.outer(apart, STEPS)
    return Findings(
        {"a": {"prefill_step": numbers}, "b": {"prefill_token": numbers}}, STEPS, 0.1, "t"
    )


def test_bias_is_paired_and_judged_by_its_interval() -> None:
    first = made_up(0.5).comparisons()[0]
    # t(3) = 3.182446 times the standard error of +-0.1 about its mean, per percent.
    assert first.bias[0] == pytest.approx(-0.005)
    assert first.bias[1] == pytest.approx(0.01 * 3.182446 * np.sqrt(0.04 / 3) / 2, rel=1e-6)
    assert not first.agrees and made_up(0.0).comparisons()[0].agrees
    assert "part: TTFT by prefill_step (0.83)" in made_up(0.5).sentences()[1]


def test_page_is_written(tmp_path: pathlib.Path) -> None:
    made_up(0.5).write(tmp_path, [])
    for name in ("tangents", "by_step"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 10_000
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6
