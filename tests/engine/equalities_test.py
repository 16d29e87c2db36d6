"""Answers that do not depend on how they came about: drafts, chunks, preemption, aborts, garbage.

Where programs or row counts differ, numbers agree to rounding only; tokens agree wherever the
margin between the two likeliest ids exceeds MARGIN.
"""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.logprobs import Logprobs
from deepinfer_jax.engine.sampling_params import SamplingParams
from tests.engine.small_engine import BUCKETS, config, engine, prompts, requests, serve

MARGIN = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def reports(device: Device, ids: list[list[int]], **changes: object) -> list[list[Logprobs]]:
    """The model's own report on each id behind the first, computed as prompts."""
    wish = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    asked = requests(ids, [wish] * len(ids))
    for request in asked:
        request.checkpoints = tuple(changes.get("checkpoints", ()))  # type: ignore[arg-type]
    serve(engine(device), asked)
    return [request.sampling.prompt_report for request in asked]


def test_drafts_change_no_greedy_token(device: Device) -> None:
    """Each token is the model's own first choice after those before it, computed as a prompt."""
    given = prompts(6, seed=11)
    made = serve(engine(device), requests(given, [GREEDY] * 6))
    wholes = [prompt + made[i] for i, prompt in enumerate(given)]
    compared = close = 0
    for prompt, report in zip(given, reports(device, wholes), strict=True):
        for token in report[len(prompt) - 1 :]:
            margin = token.values[0] - token.values[1]
            close += margin <= MARGIN
            compared += 1
            assert token.rank == 0 or margin <= MARGIN
    assert compared == 6 * 24 and close < compared // 10


def test_chunks_change_a_prompt_by_rounding_only(device: Device) -> None:
    given = prompts(4, seed=12, longest=32)
    given = [ids for ids in given if len(ids) > 8]
    whole = reports(device, given)
    parts = reports(device, given, checkpoints=(3, 8))
    for one, two in zip(whole, parts, strict=True):
        a, b = (np.array([token.chosen for token in report]) for report in (one, two))
        assert len(a) > 6
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())


def test_preemption_changes_no_token(device: Device) -> None:
    """Greedy only: a sampled answer keeps its law, but other drafts may decide it."""
    given = prompts(4, seed=13)
    penalised = dataclasses.replace(GREEDY, max_tokens=40, repetition_penalty=1.5)
    wishes = [dataclasses.replace(GREEDY, max_tokens=40), penalised] * 2
    roomy, scarce = requests(given, wishes), requests(given, wishes)
    plenty = serve(engine(device), roomy)
    assert serve(engine(device, num_blocks=10), scarce) == plenty
    assert sum(r.preemptions for r in scarce) > 0 == sum(r.preemptions for r in roomy)


@pytest.mark.parametrize("overlap", [True, False])
def test_aborts_free_everything_and_change_nobody(device: Device, overlap: bool) -> None:
    given = prompts(8, seed=14)
    wishes = [dataclasses.replace(GREEDY, max_tokens=20)] * 8
    calm = serve(engine(device, overlap=overlap), requests(given, wishes))
    disturbed = engine(device, overlap=overlap)
    rng = random.Random(3)
    when = {rng.randrange(25): victim for victim in (1, 2, 4, 7)}

    def between(call: int) -> None:
        if call in when:
            disturbed.scheduler.abort(when[call])

    found = serve(disturbed, requests(given, wishes), between)
    for number, tokens in found.items():
        assert tokens == calm[number][: len(tokens)]
        assert len(tokens) == 20 or number in when.values()
    assert any(len(tokens) < 20 for tokens in found.values())


def test_what_tenants_left_behind_changes_no_bit(device: Device) -> None:
    """NaN in every row, every proposal and the last step."""
    given = prompts(5, seed=15)
    wishes = [SamplingParams(temperature=t, max_tokens=15) for t in (0, 1, 0, 1, 2)]
    clean = serve(engine(device), requests(given, wishes))

    def filled(tree: Any, value: float) -> Any:
        def fill(x: jax.Array) -> jax.Array:
            return jnp.full_like(x, 37 if jnp.issubdtype(x.dtype, jnp.integer) else value)

        return jax.tree.map(fill, tree)

    state, memory = device.state, device.state.memory
    memory = dataclasses.replace(
        memory,
        windows=filled(memory.windows, jnp.nan),
        rows=filled(memory.rows, jnp.nan),
        raw=filled(memory.raw, jnp.nan),
        keys=filled(memory.keys, jnp.nan),
    )
    proposed, flight = filled(state.proposed, jnp.nan), filled(state.flight, jnp.nan)
    device.state = dataclasses.replace(
        state, memory=memory, proposed=proposed, flight=flight, history=filled(state.history, 0)
    )
    assert serve(engine(device), requests(given, wishes)) == clean


def test_nothing_compiles_after_warm_up(device: Device) -> None:
    """Random traffic of every wish that needs no grammar; the counter is the compiler's own."""
    reports(device, [[5, 6, 7]])  # the one optional program
    serve(engine(device), requests([[5]], [SamplingParams(repetition_penalty=2.0)]))
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _duration, **_: events.append(name)
    )
    rng = random.Random(5)
    for round in range(3):
        count = rng.randint(1, 9)
        wishes = [
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                presence_penalty=rng.choice([0.0, 1.0]),
                logprobs=rng.choice([None, 2]),
                max_tokens=rng.randint(1, 20),
            )
            for _ in range(count)
        ]
        serve(engine(device, overlap=rng.random() < 0.5), requests(prompts(count, round), wishes))
    assert not [name for name in events if "compile" in name or "trace" in name]


@pytest.mark.slow
def test_greedy_answers_without_a_drafter_are_the_same(device: Device) -> None:
    given = prompts(6, seed=11)
    plain = Device(device.params, device.model, config(nextn=0), buckets=BUCKETS)
    made = serve(engine(device), requests(given, [GREEDY] * 6))
    assert serve(engine(plain), requests(given, [GREEDY] * 6)) == made


@pytest.mark.slow
def test_compact_prompts_answer_as_masked_ones(device: Device) -> None:
    """Prompts shorter and longer than `keep`, in chunks and in one; packed memory too."""
    given = [*prompts(5, seed=17), *([7, 8, 9] * 20,)]
    answers = []
    for truncation, format in (("mask", "values"), ("compact", "values"), ("compact", "bytes")):
        made = Device(
            device.params,
            device.model,
            config(truncation=truncation, keep=14),
            buckets=BUCKETS,
            format=format,
        )
        answers.append(serve(engine(made), requests(given, [GREEDY] * 6)))
    assert answers[0] == answers[1] == answers[2]
