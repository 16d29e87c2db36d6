"""Ranks of a data-parallel group take one kind of step, by the vote, and all come to their end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler, plan_group
from tests.engine.scripted import Loop, call_group

Arrival = tuple[int, int, int, int]
"""(call before which it comes, rank, prompt tokens, most tokens of the answer)."""
arrivals = st.lists(
    st.tuples(st.integers(0, 25), st.integers(0, 3), st.integers(1, 60), st.integers(1, 20)),
    max_size=14,
)


def config(**changes: object) -> EngineConfig:
    fields = {
        "cache": CacheConfig(block_tokens=8, nextn=3),
        "max_model_len": 80,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "chunked_prefill": True,
        "prefill_interval": 3,
        "prefill_any_interval": 5,
        "num_blocks": 18,
    }
    return EngineConfig(**{**fields, **changes})


class Group:
    """Ranks over scripted devices, and the rule of the vote written out once more."""

    def __init__(self, ranks: int, seed: int, **changes: object) -> None:
        self.config, self.rng = config(**changes), random.Random(seed)
        self.loops = [Loop(Scheduler(self.config, 20), self.outcome) for _ in range(ranks)]
        self.requests: dict[int, tuple[Request, Loop]] = {}
        self.kinds = ""

    def outcome(self, plan: StepPlan, i: int) -> RowOutcome:
        count = 1 if plan.is_prompt else self.rng.randint(1, plan.rows[i].q)
        tokens = tuple(self.rng.randrange(20) for _ in range(count))
        return RowOutcome(tokens, (1, 2, 3) if self.rng.random() < 0.9 else ())

    def arrive(
        self, rank: int, prompt: int, answer: int, stops: frozenset[int] = frozenset({0})
    ) -> None:
        number, loop = len(self.requests), self.loops[rank % len(self.loops)]
        request = Request(number, [1] * prompt, max_tokens=answer, stop_ids=stops)
        loop.scheduler.add(request)
        self.requests[number] = request, loop

    def abort(self, number: int) -> None:
        request, loop = self.requests[number]
        output = loop.scheduler.abort(request.request_id)
        loop.news += [output] if output else []

    def call(self) -> None:
        """One call; where it is a prompt step, the ranks had voted for it."""
        for loop in self.loops:
            loop.drain()
        schedulers = [loop.scheduler for loop in self.loops]
        step, c = schedulers[0].decode_step, self.config
        wants = [s.wants_prompt() for s in schedulers]
        busy = any(s.roster.running for s in schedulers)
        due = step % c.prefill_interval == 0 and all(wants)
        due |= step > 0 and step % c.prefill_any_interval == 0 and any(wants)
        due |= not busy and any(wants)
        plans = call_group(self.loops)
        prompts = {plan.is_prompt for plan in plans}
        assert len(prompts) == 1 and len({s.decode_step for s in schedulers}) == 1
        if prompts == {True}:
            assert due and any(plan.rows for plan in plans)
            assert schedulers[0].decode_step == 0
        else:
            assert schedulers[0].decode_step == step + 1
        self.kinds += "p" if prompts == {True} else "d"

    @property
    def unfinished(self) -> bool:
        return any(loop.scheduler.unfinished for loop in self.loops)

    def finish(self) -> None:
        """Nobody waits for ever; then every pool is empty and each request was told all, once."""
        calls = 0
        while self.unfinished:
            self.call()
            calls += 1
            assert calls < 3000, "the group does not come to an end"
        ended = []
        for loop in self.loops:
            loop.commit()
            storage = loop.scheduler.roster.storage
            pools = storage.blocks, storage.slots, storage.draft_slots
            assert [pool.used_count for pool in pools] == [0, 0, 0]
            assert not loop.scheduler.roster.requests
            ended += [n.request_id for n in loop.news if n.finish_reason]
        assert sorted(ended) == sorted(self.requests)
        for number, (request, loop) in self.requests.items():
            told = [t for n in loop.news if n.request_id == number for t in n.tokens]
            assert told == request.tokens[request.prompt_length :]


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.sampled_from([3, 4, 2]),
    traffic=arrivals,
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 13)), max_size=4),
    overlap=st.booleans(),
    stop=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_traffic_on_any_ranks(
    ranks: int,
    traffic: list[Arrival],
    aborts: list[tuple[int, int]],
    overlap: bool,
    stop: bool,
    seed: int,
) -> None:
    group = Group(ranks, seed, overlap=overlap, stop_preempted=stop)
    for call in range(31):
        for when, rank, prompt, answer in traffic:
            if when == call:
                group.arrive(rank, prompt, answer)
        for when, number in aborts:
            if when == call and number < len(group.requests):
                group.abort(number)
        group.call()
    group.finish()


def test_a_rank_alone_with_work_waits_for_the_longer_interval() -> None:
    """Four ranks, one decodes; a prompt comes right behind a prompt step: 5 decode steps later."""
    group = Group(4, 0)
    group.arrive(0, 10, 80)
    group.call()
    group.arrive(0, 10, 2)
    for _ in range(6):
        group.call()
    assert group.kinds == "pdddddp"


def test_ranks_that_all_want_it_prefill_at_the_shorter_interval() -> None:
    group = Group(3, 0)
    for rank in range(3):
        group.arrive(rank, 10, 80)
    group.call()
    group.call()  # one decode step since the prompts
    for rank in range(3):
        group.arrive(rank, 10, 2)
    for _ in range(3):
        group.call()
    assert group.kinds == "pdddp"


def test_idle_ranks_run_placeholders_of_the_same_kind() -> None:
    group = Group(3, 0)
    group.arrive(1, 30, 4)
    for loop in group.loops:
        loop.drain()
    plans = plan_group(tuple(loop.scheduler for loop in group.loops))
    assert [(p.is_prompt, len(p.rows), p.total_q) for p in plans] == [
        (True, 0, 0),
        (True, 1, 24),
        (True, 0, 0),
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_short_of_blocks_preempts_its_own_only(overlap: bool) -> None:
    group = Group(3, 1, overlap=overlap)
    group.arrive(1, 20, 8)
    for _ in range(5):
        group.arrive(0, 50, 30, stops=frozenset())
    group.finish()
    preempted = [request.preemptions for request, _ in group.requests.values()]
    assert preempted[0] == 0 < sum(preempted)
    assert all(
        r.output_length == 30 for r, loop in group.requests.values() if loop is group.loops[0]
    )
