"""Overlap on and off give the same bits, whatever is asked of sampling; and so do batch-mates."""

import dataclasses

import jax
import numpy as np
import pytest

from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.loops import Engine, land
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from tests.engine.small_engine import engine, prompts, requests, serve

WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=60, stop_ids=(40,), logit_bias={40: 9.0}),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_tokens=25, seed=5, logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, max_tokens=16),
    SamplingParams(temperature=1.2, min_p=0.05, presence_penalty=1.0, max_tokens=30),
    SamplingParams(temperature=0.0, forced_tokens=(9, 8, 7, 6, 5, 4), max_tokens=11),
    SamplingParams(temperature=2.0, frequency_penalty=0.5, min_tokens=6, max_tokens=9),
    SamplingParams(logit_bias={40: 30.0, 41: 29.0}, max_tokens=12, processed_logprobs=True),
]


def collect(engine: Engine, asked: list[Request]) -> dict[int, list[np.ndarray]]:
    """Every token and every reported number, by request."""
    made: dict[int, list[np.ndarray]] = {r.request_id: [] for r in asked}
    for request in asked:
        engine.scheduler.add(request)
    while engine.scheduler.unfinished:
        for news in engine.call():
            made[news.request_id].append(np.array(news.tokens))
            made[news.request_id] += jax.tree.leaves(news.details)
    land(engine)
    return {number: [np.ravel(x) for x in parts] for number, parts in made.items()}


def joined(parts: list[np.ndarray]) -> bytes:
    return b"".join(x.tobytes() for x in parts)


def test_overlap_changes_no_bit(device: Device) -> None:
    given = prompts(len(WISHES), seed=1, longest=50)
    off = serve(engine(device, overlap=False), requests(given, WISHES))
    on = serve(engine(device, overlap=True), requests(given, WISHES))
    assert off == on
    assert on[1][-1] == 40 and len(on[1]) < 60
    assert on[5][:6] == [9, 8, 7, 6, 5, 4]
    assert set(on[7]) <= {40, 41}


def test_reported_numbers_are_the_same_bits_too(device: Device) -> None:
    given = prompts(4, seed=2)
    wishes = [dataclasses.replace(w, logprobs=2) for w in WISHES[:4]]
    off = collect(engine(device, overlap=False), requests(given, wishes))
    on = collect(engine(device, overlap=True), requests(given, wishes))
    assert {k: joined(v) for k, v in off.items()} == {k: joined(v) for k, v in on.items()}


@pytest.mark.parametrize("seed", [3, 4])
def test_neighbours_change_no_bit(device: Device, seed: int) -> None:
    """The same request alone, and among requests of other content and other lengths."""
    subject = dataclasses.replace(WISHES[seed - 3], logprobs=2)
    (mine,) = prompts(1, seed=9)
    alone = collect(engine(device), requests([mine], [subject]))
    others = requests(prompts(3, seed), WISHES[2:5], first=1)
    among = collect(engine(device), [*requests([mine], [subject]), *others])
    assert joined(alone[0]) == joined(among[0])
