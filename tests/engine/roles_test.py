"""Prompt and completion engines: what they take, and a hand-over that leaves both pools empty."""

import pytest

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.plan import RowOutcome
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop

PROMPT = EngineConfig(role=Role.PROMPT, overlap=False, num_blocks=64)
COMPLETION = EngineConfig(role=Role.COMPLETION, stop_preempted=True, num_blocks=64)


def test_a_request_passes_from_one_engine_to_the_other() -> None:
    first, second = Scheduler(PROMPT, 10), Scheduler(COMPLETION, 10)
    request = Request(1, [3] * 200, max_tokens=10)
    first.add(request)
    loop = Loop(first, lambda p, i: RowOutcome((5,)))
    loop.run()
    assert request.status == Status.HANDOVER and len(request.blocks) == 2
    passed = Request(1, request.tokens[:200], request.tokens[200:], max_tokens=10)
    passed.proc = request.proc
    second.add(passed)
    assert second.take_in() == (passed,) and passed.has_storage and second.take_in() == ()
    first.handed_over(1)
    after = Loop(second, lambda p, i: RowOutcome((5,) * 6, (6,) * 5))
    plan = after.call()
    assert not plan.is_prompt and plan.rows[0].k == 206 and plan.rows[0].tokens == (5,)
    after.run()
    assert sum(len(n.tokens) for n in after.news) == 9
    for scheduler in (first, second):
        assert scheduler.roster.storage.blocks.used_count == 0 and not scheduler.roster.requests


def test_a_hand_over_can_be_aborted_once() -> None:
    scheduler = Scheduler(PROMPT, 10)
    scheduler.add(Request(1, [3] * 200))
    loop = Loop(scheduler, lambda p, i: RowOutcome((5,)))
    loop.run()
    assert scheduler.abort(1) is not None and scheduler.abort(1) is None
    with pytest.raises(ValueError, match="is not being handed over"):
        scheduler.handed_over(1)
    loop.run()
    assert scheduler.roster.storage.blocks.used_count == 0


def test_roles_refuse_what_is_not_theirs() -> None:
    with pytest.raises(ValueError, match="is a prompt and this is a completion engine"):
        Scheduler(COMPLETION, 10).add(Request(1, [3]))
    with pytest.raises(ValueError, match="is prefilled and this is a prompt engine"):
        Scheduler(PROMPT, 10).add(Request(1, [3], [4]))
    with pytest.raises(ValueError, match="no output but 1 computed"):
        request = Request(1, [3])
        request.proc = 1
        Scheduler(EngineConfig(), 10).add(request)
