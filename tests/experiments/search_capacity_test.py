"""The capacity search: a queue whose answer is arithmetic, and choices against brute force."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.simulator.cluster import Mode
from experiments import batch, search_capacity
from experiments.capacity_findings import Candidate, Findings
from experiments.settings import load, resolve_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parameters() -> dict[str, Any]:
    """One request a second; a prompt takes 2.5 s, an answer holds the only slot of a rank 3.2 s."""
    values = resolve_config(load(f"{ROOT}/configs/search_capacity.py:smoke"))
    return values | {
        "prices": {"cheap": 1.0},
        "engines": {"ranks": 1, "slots": 1},
        "cost": {
            "kind": "seconds",
            "prefill_step": 0.0,
            "prefill_token": 2.5e-3,
            "decode_forms": ((0.1, 0.0, 0.0),),
        },
        "links": {},
        "quota_seconds": 2.5,  # one prompt at a time
        "prefill": {"chunk_multiple": 1e19},
        "workload": {
            "kind": "synthetic",
            "requests": 40,
            "rate": 1.0,
            "arrivals": "deterministic",
            "input_median": 1000.0,
            "input_sigma": 0.0,
            "output_median": 33.0,
            "output_sigma": 0.0,
        },
        "rate": 0.0,
        "draws": 2,
        "search": {"prompt_engines": 4, "decode_engines": 5},
        "slo": {"ttft": 2.55, "tpot": 0.101},
        "attainment": 1.0,
    }


@pytest.fixture(scope="module")
def searched(parameters: dict[str, Any]) -> tuple[Findings, Any, Any]:
    tried, made = search_capacity.candidates(parameters, 0)
    loads = search_capacity.draws(parameters, 0)
    values = search_capacity.measure(parameters, made, loads)
    values |= search_capacity.engines_busy(values, tried)
    return Findings(tried, values, parameters), made, loads


def test_cheapest_cluster_is_the_one_arithmetic_wants(searched: Any) -> None:
    """ceil(1 * 2.5) prompt and ceil(1 * 3.2) decode servers: nobody waits, and one less overflows."""
    found = searched[0]
    best = found.candidates[found.winner()]
    assert (best.prompt_engines, best.decode_engines, best.price) == (3, 4, 7.0)
    for i, one in enumerate(found.candidates):
        enough = one.prompt_engines >= 3, one.decode_engines >= 4
        assert found.meets()[i] == all(enough)
        if enough == (False, True):
            assert "first tokens late" in found.why(i)
        if enough == (True, False):
            assert "answers slow" in found.why(i)


def test_work_is_conserved_whoever_does_it(searched: Any) -> None:
    found = searched[0]
    for i, one in enumerate(found.candidates):
        prompt = found.values["prompt_busy"][i] * one.prompt_engines * 2.5**-1
        decode = found.values["decode_busy"][i] * one.decode_engines * 3.2**-1
        assert prompt == pytest.approx(decode, rel=1e-9)  # 40 requests of 2.5 s and of 3.2 s


@pytest.mark.slow
def test_parked_engines_change_nothing(searched: Any, parameters: dict[str, Any]) -> None:
    found, made, loads = searched
    i = next(
        k for k, c in enumerate(found.candidates) if (c.prompt_engines, c.decode_engines) == (2, 3)
    )
    alone = dataclasses.replace(
        made[i],
        modes=(Mode.PROMPT,) * 2 + (Mode.COMPLETION,) * 3,
        tier_edges=(),
        tier_engines=(),
        tier_quota=made[i].tier_quota[:1],
    )
    runs = batch.run({"parked": (made[i], loads[0]), "alone": (alone, loads[0])})
    parked, plain = runs["parked"], runs["alone"]
    assert len(parked.busy) == 10 and parked.busy[2:7].sum() == 0
    for name in ("pulled", "first_token", "decode_start", "finish"):
        one, other = (getattr(r.requests, name) for r in (parked, plain))
        assert np.array_equal(one, other), name


def test_candidates_combine_hardware_and_rise_in_price(parameters: dict[str, Any]) -> None:
    changed = {**parameters, "prices": {"cheap": 1.0, "dear": 3.0}}
    tried, made = search_capacity.candidates(changed, 0)
    assert len(tried) == len({c.name for c in tried}) == 4 * 5 * 4
    prices = [c.price for c in tried]
    assert prices == sorted(prices)
    for one, cluster in zip(tried, made, strict=True):
        own = changed["prices"]
        wanted = (
            one.prompt_engines * own[one.prompt_hardware]
            + one.decode_engines * own[one.decode_hardware]
        )
        assert one.price == wanted
        assert cluster.modes.count(Mode.COMPLETION) == one.decode_engines
        assert cluster.tier_engines[0] == one.prompt_engines and len(cluster.modes) == 10


def test_prefill_is_one_hardwares_and_decode_the_others() -> None:
    values = resolve_config(load(f"{ROOT}/configs/search_capacity.py"))
    made = search_capacity.clusters({**values, "memory": {}}, 0)
    both = search_capacity.combined(made["H200"], made["B200"], 6)
    assert both.prefill_token == made["H200"].cost.prefill_token > made["B200"].cost.prefill_token
    rows = np.asarray([[1, 1, 1000], [1, 64, 10**6], [1, 128, 10**7]]).T
    forms = [np.asarray(f) @ rows for f in (both.decode_forms, made["B200"].cost.decode_forms)]
    assert len(forms[0]) == 6 and np.array_equal(forms[0].max(axis=0), forms[1].max(axis=0))


def made_up(seed: int) -> Findings:
    """Candidates of few prices and shares, so that ties occur."""
    generator = np.random.default_rng(seed)
    tried = [
        Candidate("a", p, "b", d, p, d, float(p + 2 * d)) for p in (1, 2, 3) for d in (1, 2, 3)
    ]
    share = generator.choice([0.5, 0.8, 0.9, 1.0], (9, 1)) + np.zeros((9, 3))
    names = ("within", "within_ttft", "within_tpot", "prompt_busy", "decode_busy")
    values = dict.fromkeys(names, share) | {"good_tokens_per_second": 100 * share}
    parameters = {"attainment": 0.9, "slo": {"ttft": 1.0}, "title": "t", "engines": {"ranks": 1},
                  "search": {"prompt_engines": 3, "decode_engines": 3}}  # fmt: skip
    return Findings(tried, values, parameters)


@pytest.mark.parametrize("seed", range(8))
def test_winner_and_runner_up_by_brute_force(seed: int) -> None:
    found = made_up(seed)
    share = found.values["within"][:, 0]
    good = [c.price for c, s in zip(found.candidates, share, strict=True) if s >= 0.9]
    best, second = found.winner(), found.runner_up()
    assert (best is None) == (not good)
    if best is not None:
        assert found.candidates[best].price == min(good) and share[best] >= 0.9
    limit = min(good, default=np.inf)
    cheaper = [s for c, s in zip(found.candidates, share, strict=True) if c.price < limit]
    assert (second is None) == (not cheaper)
    if second is not None:
        assert share[second] == max(cheaper) and found.candidates[second].price < limit
    assert {i for i in (best, second) if i is not None} <= set(found.shown())


def test_a_share_that_scatters_below_the_mark_does_not_meet_it() -> None:
    found = made_up(0)
    scattered = np.tile([0.82, 0.94, 1.0], (9, 1))
    values = {**found.values, "within": scattered}
    assert not dataclasses.replace(found, values=values).meets().any()
    assert (
        dataclasses.replace(found, values={**values, "within": scattered * 0 + 0.92}).meets().all()
    )


def test_page_is_written(tmp_path: pathlib.Path) -> None:
    made_up(1).write(tmp_path, [])
    for name in ("prices", "engines"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 10_000
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 9
