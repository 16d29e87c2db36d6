"""Random traffic with faults on real engines, and the books that are kept of it.

A group of engines over copies of one device plans each step together, as data-parallel ranks do.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.grammar import Constraint
from deepinfer_jax.engine.loops import Engine, land, normal_call, overlap_call
from deepinfer_jax.engine.plan import RequestOutput
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.scheduler import plan_group
from tests.engine.grammar_test import CONSTRAINTS
from tests.engine.small_engine import engine

VOCABULARY, EOS = 300, 1


class Brittle(Constraint):
    """A grammar whose parser breaks down after some masks."""

    def __init__(self, sound: Constraint, left: int) -> None:
        super().__init__(sound._matcher, sound.vocab_size)
        self.left = left

    def masks(self, drafts: Sequence[int]):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left < 0:
            self.error = "the parser broke down"
        return super().masks(drafts)


def ranks(device: Device, count: int) -> list[Device]:
    """Devices with one set of weights and programs, and memory of their own."""
    others = [copy.copy(device) for _ in range(count - 1)]
    for other in others:
        other.state = jax.tree.map(jnp.copy, device.state)
    return [device, *others]


def group_call(engines: Sequence[Engine]) -> list[RequestOutput]:
    """One call of the configured loop on every rank, on plans of one kind."""
    news: list[RequestOutput] = []
    for rank in engines:
        if rank.scheduler.must_drain:
            news += land(rank)
    plans = plan_group(tuple(rank.scheduler for rank in engines))
    assert len({plan.is_prompt for plan in plans}) == 1
    for rank, plan in zip(engines, plans, strict=True):
        rank.scheduler.plan = lambda plan=plan: plan  # type: ignore[method-assign, misc]
        call = overlap_call if rank.scheduler.config.overlap else normal_call
        news += call(rank)
        rank.scheduler.check_integrity()
    return news


class Traffic:
    """Requests that come, go wrong and end; `ends` counts the reasons, faults among them."""

    def __init__(self, engines: Sequence[Engine], rng: random.Random, first: int = 0) -> None:
        self.engines, self.rng, self.number = engines, rng, first
        self.live: dict[int, tuple[Request, Engine, list[int]]] = {}
        self.ends: Counter[str] = Counter()

    def arrive(self, longest: int = 30, answer: int = 8) -> None:
        """One more request, for some rank: of any wishes, now and then with an id that is none."""
        rng, rank = self.rng, self.rng.choice(self.engines)
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.03:
            prompt[rng.randrange(len(prompt))] = VOCABULARY
        wish = self._wish(rng.randint(1, answer))
        self.number += 1
        request = Request(
            self.number,
            prompt,
            max_tokens=wish.max_tokens,
            stop_ids=frozenset({EOS} if rng.random() < 0.5 else {EOS, *range(100, 120)}),
            sampling=Answer(wish, rng.getrandbits(64)),
        )
        if rng.random() < 0.1:
            request.grammar = self._grammar()
        try:
            rank.scheduler.add(request)
        except ValueError as error:
            assert f"token id {VOCABULARY}" in str(error)
            self.ends["invalid"] += 1
        else:
            self.live[self.number] = request, rank, []

    def _wish(self, most: int) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice([0.0, 1.0, 2.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([-1, 20]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            logprobs=rng.choice([None, None, 2]),
            max_tokens=most,
        )

    def _grammar(self) -> Constraint:
        sound = self.rng.choice(CONSTRAINTS).fork()
        return sound if self.rng.random() < 0.5 else Brittle(sound, self.rng.randrange(3))

    def disturb(self) -> None:
        """Abort somebody, wherever it stands."""
        number = self.rng.choice(list(self.live))
        output = self.live[number][1].scheduler.abort(number)
        self.hear([output] if output else [])

    def call(self) -> None:
        """One call of the group."""
        self.hear(group_call(self.engines))

    def hear(self, news: Sequence[RequestOutput]) -> None:
        """Note what was emitted; who has ended is here no longer, and must have been told all."""
        for output in news:
            request, _, told = self.live[output.request_id]
            told += output.tokens
            if output.finish_reason:
                del self.live[output.request_id]
                assert told == request.tokens[request.prompt_length :]
                assert len(told) <= request.max_tokens
                assert not set(told[:-1]) & request.stop_ids
                self.ends[output.finish_reason] += 1
                again = request.preemptions > 0 and request.status != Status.PREEMPTED
                self.ends["recomputed"] += again

    def finish(self) -> None:
        """Serve what is left; then nobody is here and every pool is empty."""
        calls = 0
        while any(rank.scheduler.unfinished for rank in self.engines):
            self.call()
            calls += 1
            assert calls < 5000, "the engines do not come to an end"
        for rank in self.engines:
            self.hear(land(rank))
            storage = rank.scheduler.roster.storage
            pools = storage.blocks, storage.slots, storage.draft_slots
            assert [pool.used_count for pool in pools] == [0, 0, 0]
            assert not rank.scheduler.roster.requests
        assert not self.live


def group(devices: Sequence[Device], **changes: object) -> list[Engine]:
    """Fresh schedulers over devices."""
    return [engine(device, **changes) for device in devices]


def memory() -> tuple[int, int, int]:
    """Resident bytes of the process, and number and bytes of live device arrays."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    arrays = jax.live_arrays()
    return 4096 * pages, len(arrays), sum(a.nbytes for a in arrays)
