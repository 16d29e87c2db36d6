"""Ends of runs, lengths at their bounds and blocks across drains, by the released numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop


def accepting(count: int):  # type: ignore[no-untyped-def]
    """A device that accepts so many drafts of each row."""

    def script(plan: StepPlan, i: int) -> RowOutcome:
        tokens = 1 if plan.is_prompt else min(count + 1, plan.rows[i].q)
        return RowOutcome((5,) * tokens, (6,) * 5)

    return script


def kinds(overlap: bool) -> tuple[Loop, list[str]]:
    """The calls that serve one request of 8 tokens, alone."""
    scheduler = Scheduler(EngineConfig(overlap=overlap, num_blocks=64), 10)
    scheduler.add(Request(1, [3] * 100, max_tokens=8))
    loop, made = Loop(scheduler, accepting(5)), []
    while scheduler.unfinished:
        plan = loop.call()
        made.append("prompt" if plan.is_prompt else "decode" if plan.rows else "placeholder")
    return loop, made


def test_the_last_request_is_freed_by_a_placeholder_and_a_flush_follows() -> None:
    loop, made = kinds(overlap=True)
    assert made == ["prompt", "decode", "decode", "decode", "placeholder"]  # the third is obsolete
    pool = loop.scheduler.roster.storage.blocks
    assert pool.used_count == 0 and loop.previous is not None  # the placeholder still flies
    assert [len(n.tokens) for n in loop.news] == [1, 6, 1]
    loop.commit()
    assert loop.previous is None and not loop.scheduler.roster.flying and len(loop.news) == 3


def test_in_turn_it_takes_one_call_less_and_no_obsolete_step() -> None:
    loop, made = kinds(overlap=False)
    assert made == ["prompt", "decode", "decode", "placeholder"] and loop.previous is None
    assert [len(n.tokens) for n in loop.news] == [1, 6, 1]


@pytest.mark.parametrize("overlap, most", [(True, 110 + 3 * 5 + 1), (False, 110 + 2 * 5)])
def test_the_runtime_bound_is_reached_and_not_passed(overlap: bool, most: int) -> None:
    """A request as long as the model allows, and a step in flight: max + 3n + 1 positions."""
    config = EngineConfig(max_model_len=110, overlap=overlap, num_blocks=64)
    assert config.runtime_max_len == most
    scheduler = Scheduler(config, 10)
    scheduler.add(Request(1, [3] * 109, max_tokens=1000))
    loop, bounds = Loop(scheduler, accepting(0)), []
    while scheduler.unfinished:
        plan = loop.call()
        bounds += [row.k + 5 for row in plan.rows if not plan.is_prompt]  # the drafter's rows too
    assert max(bounds) == most


def test_abort_while_in_flight_is_silent_and_freed_by_the_next_call() -> None:
    scheduler = Scheduler(EngineConfig(num_blocks=64), 10)
    for number in (1, 2):
        scheduler.add(Request(number, [3] * 100, max_tokens=1000))
    loop = Loop(scheduler, accepting(1))
    for _ in range(3):
        loop.call()
    used, told = scheduler.roster.storage.blocks.used_count, len(loop.news)
    output = scheduler.abort(1)
    assert output is not None and output.finish_reason == "abort" and output.tokens == ()
    plan = loop.call()
    assert plan.finished == (1,) and list(plan.index) == [2]
    assert {n.request_id for n in loop.news[told:]} == {2}
    assert 1 not in scheduler.roster.requests
    assert scheduler.roster.storage.blocks.used_count < used


@settings(deadline=None, max_examples=30)
@given(
    accepts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    arrivals=st.frozensets(st.integers(3, 20), max_size=4),
    block=st.sampled_from([8, 16]),
)
def test_tables_are_as_long_as_their_bound_across_drains(
    accepts: list[int], arrivals: frozenset[int], block: int
) -> None:
    """I6: ceil((len + inflight + drafts) / block) blocks; a prompt step drains, and they shrink."""
    config = EngineConfig(
        cache=CacheConfig(block_tokens=block),
        max_model_len=200,
        prefill_interval=1,
        prefill_any_interval=2,
        num_blocks=200,
    )
    scheduler = Scheduler(config, 10)
    scheduler.add(Request(0, [3] * 50, max_tokens=40))

    def script(plan: StepPlan, i: int) -> RowOutcome:
        accepted = 0 if plan.is_prompt else accepts[(plan.number + i) % len(accepts)]
        return RowOutcome((5,) * (accepted + 1), (6,) * 5)

    loop, call = Loop(scheduler, script), 0
    before: dict[int, tuple[int, int]] = {}
    while scheduler.unfinished:
        call += 1
        if call in arrivals:
            scheduler.add(Request(call, [3] * 20, max_tokens=10))
        plan = loop.call()
        if plan.is_prompt:
            continue
        for row in plan.rows:
            # A row's k is length - 1 + in flight + 6 rows: all drafts behind the newest token.
            assert len(row.blocks) == -(-row.k // block)
            known = before.get(row.request_id)
            if known and known[0] == plan.number - 1:
                assert len(row.blocks) <= known[1] + 1
            before[row.request_id] = plan.number, len(row.blocks)
