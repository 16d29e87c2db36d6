"""Prompt engine and completion engine against one engine that does both, bitwise; ends on the way."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.cache.paged import create_paged
from deepinfer_jax.config import CacheConfig, EngineConfig, Role
from deepinfer_jax.engine.handoff import HandOff
from deepinfer_jax.engine.plan import RowOutcome
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.modelled import LOOKBACK, MODEL, Device, prompt
from tests.engine.scripted import Loop

CACHE = CacheConfig(block_tokens=8, nextn=0, backtracking=6)  # truncation off
NORMAL = EngineConfig(
    cache=CACHE,
    max_model_len=80,
    max_num_seqs=3,
    max_num_batched_tokens=24,
    chunked_prefill=True,
    prefill_interval=1,
    prefill_any_interval=1,
    overlap=False,
    num_blocks=40,
)
PROMPT = dataclasses.replace(NORMAL, role=Role.PROMPT)
COMPLETION = dataclasses.replace(  # two seats, and as many slots as the others
    NORMAL, role=Role.COMPLETION, stop_preempted=True, max_num_seqs=2, slots_percent=150
)
LENGTHS = {1: 5, 2: 24, 3: 37, 4: 16}


def requests() -> list[Request]:
    return [Request(i, prompt(n, i), max_tokens=6 + i) for i, n in LENGTHS.items()]


def engine(config: EngineConfig) -> tuple[Scheduler, Loop, Device]:
    scheduler, device = Scheduler(config, MODEL.vocab_size, lookback=LOOKBACK), Device(config)
    return scheduler, Loop(scheduler, device), device


def tokens(news) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for n in news:
        found.setdefault(n.request_id, []).extend(n.tokens)
    return found


def test_prompt_and_completion_engines_equal_one_engine_bitwise() -> None:
    """The same executable for all; slots and blocks differ, and one request waits for a slot."""
    scheduler, loop, device = engine(NORMAL)
    for request in requests():
        scheduler.add(request)
    loop.run()
    first, before, source = engine(PROMPT)
    second, after, target = engine(COMPLETION)
    link = HandOff(MODEL, first, second, width=3)
    programs = [f._cache_size() for f in (link._blocks, link._state)]  # of other users
    for request in requests():
        first.add(request)
    longest = 0
    for _ in range(100):
        if first.unfinished:
            before.call()
        target.memory, _ = link.move(source.memory, target.memory)
        longest = max(longest, len(link.waiting))
        first.check_integrity()
        second.check_integrity()
        if second.unfinished:
            after.call()
        if not (first.unfinished or first.roster.handover or second.unfinished):
            break
    assert tokens(before.news + after.news) == tokens(loop.news)
    assert longest > 0 and {i: len(t) for i, t in tokens(loop.news).items()} == {
        i: 6 + i for i in LENGTHS
    }
    for i, found in device.logits.items():
        np.testing.assert_array_equal(source.logits[i] + target.logits[i], found)
    for one in (first, second):
        assert one.roster.storage.blocks.used_count == one.roster.storage.slots.used_count == 0
    assert [f._cache_size() for f in (link._blocks, link._state)] == [n + 1 for n in programs]


@pytest.mark.parametrize("side", ["prompt", "completion"])
def test_an_end_on_one_side_ends_the_other(side: str) -> None:
    """Request 2 waits for storage that request 1 holds, and is aborted meanwhile."""
    small = dataclasses.replace(COMPLETION, num_blocks=10, max_model_len=48)
    first, second = (Scheduler(c, MODEL.vocab_size) for c in (PROMPT, small))
    before, after = (Loop(s, lambda p, i: RowOutcome((5,))) for s in (first, second))
    source, memory = (
        create_paged(MODEL, c.cache, blocks=c.num_blocks, slots=c.num_slots)
        for c in (PROMPT, small)
    )
    link = HandOff(MODEL, first, second)
    for i in (1, 2):
        first.add(Request(i, prompt(40, i), max_tokens=4))
    while first.unfinished:
        before.call()
    memory, taken = link.move(source, memory)
    assert [r.request_id for r in taken] == [1] and list(link.waiting) == [2]
    assert first.roster.storage.slots.used_count == 1
    output = (first if side == "prompt" else second).abort(2)
    assert output is not None and output.finish_reason == Status.ABORTED
    memory, taken = link.move(source, memory)
    assert not taken and not link.waiting and len(second.roster.requests) == 1
    before.run()
    after.run()
    for one in (first, second):
        assert one.roster.storage.blocks.used_count == 0 and not one.roster.requests


def test_engines_that_do_not_fit_are_refused() -> None:
    def schedulers(*configs: EngineConfig) -> list[Scheduler]:
        return [Scheduler(c, MODEL.vocab_size) for c in configs]

    with pytest.raises(ValueError, match="from a prompt engine to one that completes"):
        HandOff(MODEL, *schedulers(NORMAL, COMPLETION))
    other = dataclasses.replace(CACHE, backtracking=7)
    with pytest.raises(ValueError, match="images have 14 and 15 ring rows"):
        HandOff(MODEL, *schedulers(PROMPT, dataclasses.replace(COMPLETION, cache=other)))
