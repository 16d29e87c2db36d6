"""The comparison: one program for all policies decides like each alone; intervals by hand."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import metrics
from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import DecodeView, PolicyParameters, PrefillView, RequestView
from experiments import compare_policies, policy_choice
from experiments.policy_findings import Findings, difference
from experiments.settings import load, resolve_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parameters() -> dict[str, Any]:
    values = resolve_config(load(f"{ROOT}/configs/compare_policies.py:smoke"))
    values["workload"]["path"] = f"{ROOT}/{values['workload']['path']}"
    values["engines"] = {"prompt": 2, "completion": 2, "slots": 8}
    return {**values, "replicates": 2, "requests": 60}


def drawn_prefill(generator: np.random.Generator) -> tuple[PrefillView, RequestView]:
    draw = lambda top: generator.integers(0, top, 5)  # noqa: E731
    view = PrefillView(
        eligible=draw(4) > 0,
        quota_used=draw(9) * 100,
        quota_cap=np.full(5, 10**6),
        requests=draw(200),
        tokens=draw(4000),
        reading_tokens=draw(3),
        decode_requests=draw(5),
        decode_blocks=draw(60),
        hit_tokens=128 * draw(8),
        hit_cost=1000 - draw(8) * 100,
        cached_tokens=draw(9),
    )
    numbers = dict.fromkeys(("index", "decisions", "draw", "cost", "shared_hit_tokens"), 7)
    return view, RequestView(input_tokens=1024, context_tokens=1024, **numbers)


@pytest.mark.parametrize("seed", range(8))
def test_choice_is_the_named_policys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    view, request = drawn_prefill(generator)
    ranks = generator.integers(0, 9, (3, 6))
    decode = DecodeView(ranks[0] > 0, ranks[1] > 2, ranks[1], 1000 * ranks[2], np.arange(6) // 2)
    known = {"token_beta": 3000, "reading_alpha": 1, "transfer_ticks_per_token": 1}
    plain = PolicyParameters(**known)
    for which, name in enumerate(policy_choice.PREFILL):
        chosen = policy_choice.Chosen(**known, prefill_choice=which)
        alone = registry.resolve("prefill", name)(view, request, plain)
        assert policy_choice.prefill(view, request, chosen) == alone, name
    for which, name in enumerate(policy_choice.DECODE):
        chosen = policy_choice.Chosen(**known, decode_choice=which)
        alone = registry.resolve("decode", name)(decode, request, plain)
        assert policy_choice.decode(decode, request, chosen) == alone, name


def test_a_policy_in_the_common_program_runs_as_in_its_own(parameters: dict[str, Any]) -> None:
    own = "deepinfer_jax.policy.{}:{}"
    wanted = {**parameters["compare"], "prefill": ["dynamo_cost", "random"], "decode": []}
    compared = compare_policies.arms({**parameters, "compare": wanted, "baselines": {}}, 3)
    compared = [a for a in compared if a.group == "prefill"]
    alone = dataclasses.replace(
        compared[0].cluster,
        prefill_policy=own.format("prefill", "dynamo_cost"),
        decode_policy=own.format("decode", "two_load"),
    )
    compared.append(compare_policies.Arm("prefill", "own", alone))
    traces = compare_policies.stretches(parameters, 0)
    slo = metrics.Slo(ttft=1.0, tpot=0.02)
    found = compare_policies.measure(
        compared,
        traces,
        lambda run: compare_policies.reduce(run, slo=slo, warmup=0.0),
        quick=True,
    )
    assert np.all(found["completed"] == 60)
    for name, values in found.items():
        assert values.shape == (3, 2)
        assert np.array_equal(values[0], values[2]), name  # padded trie and all
    assert not np.array_equal(found["ttft_mean"][0], found["ttft_mean"][1])
    assert not np.array_equal(found["ttft_mean"][:, 0], found["ttft_mean"][:, 1])


def test_replicates_are_disjoint_stretches_from_zero(parameters: dict[str, Any]) -> None:
    first, second = compare_policies.stretches(parameters, 0)
    assert first.row.tolist() == list(range(60)) and second.row.tolist() == list(range(60, 120))
    assert first.arrival[0] == second.arrival[0] == 0
    with pytest.raises(ValueError, match="need 1200000: lower replicates"):
        compare_policies.stretches({**parameters, "requests": 600_000}, 0)
    with pytest.raises(ValueError, match="replicates=1"):
        compare_policies.stretches({**parameters, "replicates": 1}, 0)


def test_synthetic_replicates_are_drawn_anew(parameters: dict[str, Any]) -> None:
    load_of = {"kind": "synthetic", "requests": 5, "rate": 1.0}
    first, second = compare_policies.stretches({**parameters, "workload": load_of}, 1)
    assert len(first) == len(second) == 60 and not np.array_equal(first.arrival, second.arrival)


def test_baseline_that_is_not_compared_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"baselines\.prefill is mooncake"):
        compare_policies.arms({**parameters, "baselines": {"prefill": "mooncake"}}, 0)


def test_pairs_cancel_what_replicates_share() -> None:
    base = np.array([1.0, 5.0, 9.0, 13.0])
    mean, half, apart = difference(base + np.array([1.0, 1.2, 0.8, 1.0]), base)
    # t(3) = 3.182446; the differences' standard deviation is sqrt(0.08 / 3).
    assert mean == pytest.approx(1.0)
    assert half == pytest.approx(3.182446 * np.sqrt(0.08 / 3) / 2, rel=1e-6)
    assert apart > 20 * half


def made_up() -> Findings:
    share = np.array([[0.5, 0.6, 0.7], [0.7, 0.79, 0.91], [0.3, 0.41, 0.5], [0.4, 0.7, 0.7]])
    names = ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "token_hits")
    values = {"goodput_share": share} | dict.fromkeys(names, 1 - share)
    arms = [("prefill", name) for name in ("base", "up", "down", "same")]
    return Findings(arms, values, {"prefill": "base"})


def test_verdicts_need_an_interval_that_excludes_zero() -> None:
    assert made_up().verdict("prefill") == {
        "better": ["up"], "worse": ["down"], "undecided": ["same"],
    }  # fmt: skip
    rows = made_up().rows("prefill")
    assert [row["policy"] for row in rows] == ["up", "base", "same", "down"]
    assert rows[0]["within, difference"].startswith("+20.0 ± ")
    assert rows[1]["within, difference"] == "0"


def test_page_is_written(tmp_path: pathlib.Path) -> None:
    made_up().write(tmp_path, {"title": "t", "replicates": 3, "requests": 9}, [])
    assert (tmp_path / "plots" / "policies_prefill.png").stat().st_size > 10_000
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 12
    assert "undecided: same" in (tmp_path / "report.html").read_text()
