"""Ranks of a mesh that step together, each request as on one device: drafts, overlap, idle ranks."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.engine.balancer import Balancer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.group import Group, make_group
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.mesh_device import MeshDevice
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.parallel.mesh import make_mesh
from tests.engine.small_engine import BUCKETS, engine, prompts, requests, serve

WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=31, frequency_penalty=0.6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=8, forced_tokens=(9, 8, 7), ignore_eos=True),
]


@pytest.fixture(scope="module")
def ranks(device: Device) -> MeshDevice:
    """Two ranks that divide the experts of the micro model, with two copies, and count routing."""
    made = MeshDevice(
        jax.tree.map(np.asarray, device.params),
        device.model,
        device.config,
        make_mesh(1, 2),
        buckets=BUCKETS,
        extra_experts=2,
        window=8,
    )
    made.warm_up()
    return made


def group(ranks: MeshDevice, **changes: Any) -> Group:
    """A new group over the warm device."""
    ranks.config = dataclasses.replace(ranks.config, **changes)
    return make_group(ranks, reach(ranks.model))


def answers(one: Group, asked: list[Request], on: list[int] | None = None) -> dict[int, list[int]]:
    """Run all to their end; `on` names the rank of each."""
    for i, request in enumerate(asked):
        one.add(request, on[i] if on else None)
    for _call in range(1000):
        if not one.unfinished:
            break
        one.call()
        for rank in one.engines:
            rank.scheduler.check_integrity()
    one.land()
    for rank in one.engines:
        storage = rank.scheduler.roster.storage
        assert storage.blocks.used_count == storage.slots.used_count == 0
    return {r.request_id: r.tokens[r.prompt_length :] for r in asked}


@pytest.mark.parametrize("overlap", [True, False])
def test_two_ranks_answer_as_one_device(device: Device, ranks: MeshDevice, overlap: bool) -> None:
    given = prompts(5, seed=71, longest=50)
    want = serve(engine(device), requests(given, WISHES))
    assert answers(group(ranks, overlap=overlap), requests(given, WISHES)) == want


def test_an_llm_on_a_mesh_answers_as_on_a_device(device: Device, ranks: MeshDevice) -> None:
    """Each request by itself: four of them on one rank and on two."""
    about = (jax.tree.map(np.asarray, device.params), device.model, device.config)
    one = LLM(*about, buckets=BUCKETS)
    one.engine.device = device
    many = LLM(*about, mesh=make_mesh(1, 2), buckets=BUCKETS, extra_experts=2, window=8)
    many.engine.device = ranks  # warm, of the same kind
    given, wishes = prompts(4, seed=77, longest=40), [*WISHES[:2], WISHES[3], WISHES[0]]
    want, found = one.generate(given, wishes), many.generate(given, wishes)
    assert [r.answers[0].tokens for r in found] == [r.answers[0].tokens for r in want]


def test_an_llm_on_a_mesh_chooses_no_draft_lengths(device: Device) -> None:
    hopeful = dataclasses.replace(device.config, verification="confidence")
    with pytest.raises(ValueError, match="verification is 'confidence' on a mesh"):
        LLM(device.params, device.model, hopeful, mesh=make_mesh(1, 2))


def test_an_idle_rank_steps_along(device: Device, ranks: MeshDevice) -> None:
    """All work on one rank: the other runs placeholders and keeps nothing."""
    given = prompts(3, seed=72)
    want = serve(engine(device), requests(given, WISHES[:3]))
    one = group(ranks, overlap=True)
    assert answers(one, requests(given, WISHES[:3]), on=[1, 1, 1]) == want


def test_aborts_and_new_requests_on_either_rank(device: Device, ranks: MeshDevice) -> None:
    given = prompts(6, seed=73)
    wish = dataclasses.replace(WISHES[0], max_tokens=15)
    want = serve(engine(device), requests(given, [wish] * 6))
    one, asked = group(ranks, overlap=True), requests(given, [wish] * 6)
    for call in range(400):
        if call < 6:
            one.add(asked[call])
        if call == 9:
            assert one.abort(2) is not None and one.abort(99) is None
        if call >= 6 and not one.unfinished:
            break
        one.call()
    one.land()
    for request in asked:
        found = request.tokens[request.prompt_length :]
        assert found == want[request.request_id][: len(found)]
        assert len(found) == 15 or request.request_id == 2


def test_nothing_compiles_after_warm_up(ranks: MeshDevice) -> None:
    one = group(ranks, overlap=True)
    answers(one, requests(prompts(2, seed=74), WISHES[1:3]))  # penalties: the one optional program
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: events.append(name))
    wishes = [SamplingParams(temperature=1.0, max_tokens=9, logprobs=1), *WISHES[:3]]
    answers(group(ranks, overlap=False), requests(prompts(4, seed=75), wishes))
    assert not [name for name in events if "compile" in name or "trace" in name]


def test_a_group_needs_a_scheduler_for_each_rank(ranks: MeshDevice) -> None:
    with pytest.raises(ValueError, match="1 schedulers for 2 ranks"):
        Group([engine_scheduler(ranks)], ranks)


def engine_scheduler(ranks: MeshDevice) -> Any:
    return make_group(ranks, reach(ranks.model)).engines[0].scheduler


def test_answers_survive_a_rebalance_bit_by_bit(ranks: MeshDevice) -> None:
    """Sampled answers with drafts, before, across and after moves of experts; loads do change."""
    given = prompts(4, seed=76, longest=40)
    wishes = [SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True), *WISHES[:3]]
    want = answers(group(ranks, overlap=True), requests(given, wishes))
    balancer, one = Balancer(ranks), group(ranks, overlap=True)
    asked = requests(given, wishes)
    for request in asked:
        one.add(request)
    found = []
    for call in range(200):
        if not one.unfinished:
            break
        one.call()
        if call in (6, 12):
            found.append(balancer.rebalance())
    one.land()
    assert {r.request_id: r.tokens[r.prompt_length :] for r in asked} == want
    assert found[0].moved > 0 and found[0].after > found[0].before
    held = balancer.held
    for layer, weights in enumerate(ranks.params["layers"]):
        table = np.asarray(weights["moe"]["placement"]["table"])
        assert all(held[layer][s] == e for e in range(4) for s in table[e] if s < held.shape[1])
    assert answers(group(ranks, overlap=False), requests(given, wishes)) == want
    counts = balancer.counts()
    assert counts.shape[1:] == (4, 4) and counts.sum() > 0


def test_a_balancer_needs_counts(ranks: MeshDevice) -> None:
    state = ranks.state
    ranks.state = dataclasses.replace(state, visits=state.visits[:, :0])
    with pytest.raises(ValueError, match="counts no routing"):
        Balancer(ranks)
    ranks.state = state
