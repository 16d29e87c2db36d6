"""Defects of the released scheduler that must not come back (D1 - D7), one test each."""

import pytest

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepOutcome, StepPlan
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler, plan_group
from deepinfer_jax.engine.validation import check_request
from tests.engine.scripted import Loop


def engine(**changes: object) -> EngineConfig:
    fields = {
        "cache": CacheConfig(block_tokens=8, nextn=3),
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 16,
    }
    return EngineConfig(**{**fields, **changes})


class Hoard:
    """A prefix source that hits nothing, publishes nothing, and sits on blocks."""

    blocks: tuple[int, ...] = ()

    def match(self, request: Request) -> None:
        return None

    def publish(self, request: Request, count: int) -> None:
        pass

    def reclaim(self, count: int) -> None:
        pass

    def held(self) -> tuple[int, ...]:
        return self.blocks

    def take(self, scheduler: Scheduler, leave: int) -> None:
        """All free blocks but so many."""
        pool = scheduler.roster.storage.blocks
        self.blocks += pool.allocate(pool.free_count - leave)


def all_accepted(plan: StepPlan, i: int) -> RowOutcome:
    return RowOutcome((5,) * (1 if plan.is_prompt else plan.rows[i].q), (6,) * 3)


def none_accepted(plan: StepPlan, i: int) -> RowOutcome:
    return RowOutcome((5,), (6,) * 3)


def test_d1_an_abort_between_chunks_leaks_nothing() -> None:
    scheduler = Scheduler(engine(chunked_prefill=True, max_num_batched_tokens=16), 10)
    loop = Loop(scheduler, none_accepted)
    request = Request(1, [3] * 40)
    scheduler.add(request)
    assert not loop.call().rows[0].last_chunk and len(request.blocks) == 5
    scheduler.abort(1)
    loop.run()
    storage = scheduler.roster.storage
    assert storage.blocks.used_count == storage.slots.used_count == 0


def test_d2_a_refused_admission_keeps_the_checkpoint() -> None:
    hoard = Hoard()
    scheduler = Scheduler(engine(chunked_prefill=True), 10, source=hoard)
    hoard.take(scheduler, leave=3)
    request = Request(1, [3] * 40, checkpoints=(16,))
    scheduler.add(request)
    loop = Loop(scheduler, none_accepted)
    assert not loop.call().rows  # no room
    loop.commit()
    scheduler.roster.storage.blocks.free(hoard.blocks)
    hoard.blocks = ()
    ends = []
    while request.status == Status.WAITING:
        plan = scheduler.plan()
        ends.append(plan.rows[0].k)
        scheduler.launch(plan)
        scheduler.commit(scheduler.roster.flying[0], _one(plan))
        scheduler.release(plan)
    assert ends == [16, 40]


def _one(plan: StepPlan) -> StepOutcome:
    return StepOutcome(tuple(none_accepted(plan, i) for i in range(len(plan.rows))))


def test_d3_who_needs_no_block_is_not_preempted_for_lack_of_one() -> None:
    scheduler = Scheduler(engine(overlap=False), 10)
    request = Request(1, [3] * 10)
    scheduler.add(request)
    loop = Loop(scheduler, none_accepted)
    loop.call()
    scheduler.roster.storage.blocks.allocate(scheduler.roster.storage.blocks.free_count)
    plan = scheduler.plan()  # 10 + 4 positions lie in the two blocks it has
    assert plan.index == {1: 0} and not plan.preempted


def test_d4_tokens_in_flight_survive_a_preemption() -> None:
    scheduler = Scheduler(engine(num_blocks=11, max_model_len=56), 10)
    requests = [Request(n, [3] * 30, max_tokens=20) for n in (1, 2)]
    for request in requests:
        scheduler.add(request)
    loop = Loop(scheduler, all_accepted)
    loop.run()
    assert sum(r.preemptions for r in requests) > 0
    for request in requests:
        told = [t for n in loop.news if n.request_id == request.request_id for t in n.tokens]
        assert len(told) == 20 and told == request.tokens[30:]


def test_d5_rows_keep_their_order_whatever_their_lengths() -> None:
    scheduler = Scheduler(engine(max_num_batched_tokens=64), 10)
    for number, length in ((1, 9), (2, 20), (3, 9), (4, 20)):
        scheduler.add(Request(number, [3] * length))
    loop = Loop(scheduler, none_accepted)
    orders = [list(loop.call().index) for _ in range(6)]
    assert orders == [[1, 2, 3, 4]] * 6


def test_d6_the_victim_is_the_longest_output() -> None:
    hoard = Hoard()
    scheduler = Scheduler(engine(overlap=False), 10, source=hoard)
    for number in (1, 2):
        scheduler.add(Request(number, [3] * 15))
    speed = {1: 1, 2: 2}
    loop = Loop(
        scheduler,
        lambda p, i: RowOutcome((5,) * (1 if p.is_prompt else speed[p.rows[i].request_id]), ()),
    )
    loop.call()
    loop.call()
    hoard.take(scheduler, leave=0)
    victims: tuple[int, ...] = ()
    while not victims:
        victims = loop.call().preempted
    assert victims == (2,)


def test_d7_a_prompt_step_without_prompts_does_not_happen() -> None:
    hoard = Hoard()
    config = engine(prefill_interval=3, prefill_any_interval=5, prefill_usage_percent=100)
    scheduler = Scheduler(config, 10, source=hoard)
    loop = Loop(scheduler, none_accepted)
    scheduler.add(Request(1, [3] * 30))
    loop.call()
    loop.call()
    hoard.take(scheduler, leave=6)
    scheduler.add(Request(2, [3] * 60))  # 8 blocks: refused at each attempt
    steps = []
    for _ in range(5):
        assert not loop.call().is_prompt
        steps.append(scheduler.decode_step)
    assert steps == [2, 3, 4, 5, 6]


def test_a_prompt_waits_for_the_vote() -> None:
    config = EngineConfig(num_blocks=64)
    for idle_rank, expected in ((False, 67), (True, 97)):
        ranks = tuple(Scheduler(config, 10) for _ in range(2 if idle_rank else 1))
        loop = Loop(ranks[0], none_accepted)
        ranks[0].add(Request(1, [3] * 10, max_tokens=4000))
        loop.call()
        ranks[0].decode_step = 3
        ranks[0].add(Request(2, [3] * 10))
        waited = 0
        while True:
            plans = plan_group(ranks)
            for rank, plan in zip(ranks, plans, strict=True):
                rank.launch(plan)
                rank.commit(plan, _one(plan))
                rank.release(plan)
            if plans[0].is_prompt:
                break
            waited += 1
        assert waited == expected and all(p.is_prompt for p in plans)


def test_errors_at_the_door() -> None:
    config = engine()
    broken = {
        "empty prompt": Request(1, []),
        "token id 10 at position 1": Request(1, [3, 10]),
        "has 65 tokens": Request(1, [3] * 65),
        "max_tokens 0": Request(1, [3], max_tokens=0),
    }
    for message, request in broken.items():
        with pytest.raises(ValueError, match=message):
            check_request(request, config, 10)
