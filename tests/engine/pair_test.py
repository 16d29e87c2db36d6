"""A prompt engine and a completion engine with drafts, sampling and overlap, against one engine."""

import dataclasses
import json

import jax
import pytest

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.handoff import HandOff
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.loops import Engine
from deepinfer_jax.engine.pair import Pair
from deepinfer_jax.engine.sampling_params import Grammar, SamplingParams
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.grammar_test import TOKENIZER
from tests.engine.small_engine import BUCKETS, config, engine, prompts, requests, serve

WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=25, logprobs=2),
    SamplingParams(temperature=0.8, repetition_penalty=1.5, max_tokens=15),
    SamplingParams(temperature=1.3, top_k=30, max_tokens=1),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, max_tokens=18, ignore_eos=True),
]
PROMPT = config(role=Role.PROMPT, overlap=False)
COMPLETION = config(role=Role.COMPLETION, stop_preempted=True)


@pytest.fixture(scope="module")
def devices(device: Device) -> tuple[Device, Device]:
    """Memory of their own; the programs are those of the one engine, compiled once."""
    made = []
    for one in (PROMPT, COMPLETION):
        new = Device(device.params, device.model, one, buckets=BUCKETS)
        new.programs = {**device.programs, "draft": new.programs["draft"]}
        new.compiled = device.compiled
        made.append(new)
    return made[0], made[1]


def pair(devices: tuple[Device, Device], **changes: object) -> Pair:
    """Two new engines over the warm devices; `changes` are the completion engine's."""

    def made(device: Device, one: EngineConfig) -> Engine:
        return Engine(Scheduler(one, device.model.vocab_size, lookback=reach(device.model)), device)

    return Pair(
        made(devices[0], PROMPT), made(devices[1], dataclasses.replace(COMPLETION, **changes))
    )


def tokens(one: Pair, asked: list) -> dict[int, list[int]]:
    """Run to the end; all tokens told of."""
    found: dict[int, list[int]] = {r.request_id: [] for r in asked}
    for request in asked:
        one.add(request)
    while one.unfinished:
        for news in one.call():
            found[news.request_id] += news.tokens
        for half in (one.prompt, one.completion):
            half.scheduler.check_integrity()
    one.land()
    for half in (one.prompt, one.completion):
        storage = half.scheduler.roster.storage
        pools = (storage.blocks, storage.slots, storage.draft_slots)
        assert [pool.used_count for pool in pools] == [0, 0, 0]
        assert not half.scheduler.roster.requests
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pair_answers_as_one_engine_bitwise(
    device: Device, devices: tuple[Device, Device], overlap: bool
) -> None:
    """Drafts, sampling, penalties; a request that ends with its prompt; two seats for five."""
    given = prompts(5, seed=51, longest=60)
    want = serve(engine(device), requests(given, WISHES))
    found = tokens(pair(devices, overlap=overlap, max_num_seqs=2), requests(given, WISHES))
    assert found == want
    assert len(found[3]) == 1 and len(found[0]) == 20


def test_drafts_of_the_first_step_are_those_of_one_engine(
    device: Device, devices: tuple[Device, Device]
) -> None:
    """A forced answer equal to the drafts: as many steps with the pair as with one engine."""
    given = prompts(1, seed=52)
    steps = []
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for one in (engine(device), pair(devices)):
        (request,) = requests(given, [greedy])
        one.add(request)
        count = 0
        while one.unfinished:
            count += len(one.call()) > 0
        one.land()
        steps.append(count)
    assert steps[0] == steps[1]


def test_aborts_anywhere_leave_nothing_behind(devices: tuple[Device, Device]) -> None:
    given = prompts(6, seed=53, longest=60)
    wish = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for moment in (0, 2, 3, 5, 9):
        one = pair(devices, max_num_seqs=2)
        asked = requests(given, [wish] * 6)
        for request in asked:
            one.add(request)
        ended = set()
        for call in range(1000):
            if call == moment:
                for number in range(0, 6, 2):
                    news = one.abort(number)
                    assert news is None or news.finish_reason == "abort"
            if not one.unfinished:
                break
            ended |= {n.request_id for n in one.call() if n.finish_reason}
        one.land()
        assert ended >= {1, 3, 5}
        for half in (one.prompt, one.completion):
            half.scheduler.check_integrity()
            assert not half.scheduler.roster.requests
            assert half.scheduler.roster.storage.blocks.used_count == 0


def test_generation_through_a_pair(devices: tuple[Device, Device], device: Device) -> None:
    """Text, grammars and several answers; the caller sees no difference."""
    one = LLM(device.params, device.model, device.config, TOKENIZER, buckets=BUCKETS)
    one.engine.device = device
    two = LLM(
        device.params, device.model, COMPLETION, TOKENIZER, prompt_config=PROMPT, buckets=BUCKETS
    )
    assert isinstance(two.engine, Pair)
    two.engine.prompt.device, two.engine.completion.device = devices
    wish = SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=2)
    assert one.generate(["abcd", "x"], wish) == two.generate(["abcd", "x"], wish)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    good = SamplingParams(max_tokens=60, seed=1, grammar=Grammar("json", json.dumps(schema)))
    bad = SamplingParams(max_tokens=60, grammar=Grammar("regex", "(ab"))
    results = two.generate(["x", "x"], [good, bad])
    assert results[1].answers[0].finish_reason == "grammar_error"
    answer = results[0].answers[0]
    assert answer.finish_reason == "length" or set(json.loads(answer.text)) >= {"a"}
    blind = Scheduler(PROMPT, device.model.vocab_size)
    with pytest.raises(ValueError, match="make it with lookback 3"):
        Engine(blind, device)
    with pytest.raises(ValueError, match="choose 'normal', or 'completion'"):
        LLM(device.params, device.model, config(), TOKENIZER, prompt_config=PROMPT)


def test_nothing_compiles_once_a_pair_is_warm(devices: tuple[Device, Device]) -> None:
    wish = SamplingParams(temperature=1.0, max_tokens=9)
    one = pair(devices)
    one.warm_up()
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: events.append(name))
    tokens(one, requests(prompts(4, seed=54), [wish] * 4))
    assert not [name for name in events if "compile" in name or "trace" in name]
    assert isinstance(one.link, HandOff)
