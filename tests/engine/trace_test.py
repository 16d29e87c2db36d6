"""One request, end to end: the chapter's section 11.8, number by number, on a scripted device."""

from deepinfer_jax.config import EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop

A, COMPANION, EOS = 1, 2, 7


def lengths(scheduler: Scheduler) -> tuple[int, int]:
    request = scheduler.roster.requests[A]
    return request.proc, request.length


def test_request_a_from_admission_to_release() -> None:
    scheduler = Scheduler(EngineConfig(num_blocks=64), vocab_size=100)
    # Before call 1, A stands at 300/301; its decode steps accept these many drafts.
    accepted = {1: 5, 2: 5, 3: 5, 4: 1, 5: 2, 6: 2, 7: 1, 8: 3, 9: 4}

    def script(plan: StepPlan, i: int) -> RowOutcome:
        if plan.is_prompt:
            return RowOutcome((50,))
        drafts = (60, 61, 62, 63, 64)
        if plan.rows[i].request_id == COMPANION:
            return RowOutcome((50,), drafts)
        tokens = [51] * (accepted[plan.number] + 1)
        if plan.number == 8:  # step M: three accepted, the second of them ends the request
            tokens[1] = EOS
        return RowOutcome(tuple(tokens), drafts)

    loop = Loop(scheduler, script)
    scheduler.add(Request(A, [3] * 300, max_tokens=1000, stop_ids=frozenset({EOS})))
    scheduler.add(Request(COMPANION, [4] * 20, max_tokens=1000))

    plan = loop.call()
    row = plan.rows[plan.index[A]]
    assert plan.is_prompt and (row.q, row.k) == (300, 300)
    assert len(row.blocks) == 3 and row.slot and row.draft_slot  # ceil(300 / 128)
    assert lengths(scheduler) == (300, 301)

    # Fully accepted steps subtract nothing; each call commits the step before.
    for call, k, after in (
        (1, 306, (300, 301)),
        (2, 312, (306, 307)),
        (3, 318, (312, 313)),
        (4, 324, (318, 319)),
    ):
        plan = loop.call()
        row = plan.rows[plan.index[A]]
        assert (row.q, row.k, loop.device[A]) == (6, k, k) and plan.number == call
        assert (row.remap is None) == (call == 1) and bool(row.read_slot) == (call > 1)
        assert lengths(scheduler) == after

    for call, k, on_device, after in (
        (5, 330, 326, (320, 321)),  # N: its predecessor accepted one draft
        (6, 332, 329, (323, 324)),  # N + 1: 332 - (5 - 2)
        (7, 335, 332, (326, 327)),
        (8, 338, 334, (328, 329)),  # M
    ):
        plan = loop.call()
        row = plan.rows[plan.index[A]]
        assert (plan.number, row.q, row.k, loop.device[A]) == (call, 6, k, on_device)
        assert len(row.blocks) == 3 and lengths(scheduler) == after

    free = scheduler.roster.storage.blocks.free_count
    plan = loop.call()  # M + 1: A's extra forward is queued before the host learns of its end
    assert (plan.rows[plan.index[A]].k, loop.device[A]) == (340, 338)
    assert lengths(scheduler) == (330, 331)  # the host counts up to EOS
    news = [n for n in loop.news if n.request_id == A][-1]
    assert (news.tokens, news.finish_reason, news.accepted) == ((51, EOS), "stop", 3)
    request = scheduler.roster.requests[A]
    assert request.draft_slot == 0 and request.has_storage  # the seat goes before the storage

    plan = loop.call()  # M + 2: removed when planned, freed once M + 1 was waited for
    assert A not in plan.index and plan.finished == (A,)
    assert A not in scheduler.roster.requests
    assert scheduler.roster.storage.blocks.free_count == free + 3
    assert [n for n in loop.news if n.request_id == A][-1] is news  # the obsolete step is silent


def test_without_overlap_nothing_is_subtracted_and_no_step_is_obsolete() -> None:
    scheduler = Scheduler(EngineConfig(num_blocks=64, overlap=False), vocab_size=100)
    scheduler.add(Request(A, [3] * 100, max_tokens=8))
    loop = Loop(scheduler, lambda p, i: RowOutcome((5,) if p.is_prompt else (5,) * 6, (6,) * 5))
    loop.call()
    plan = loop.call()
    assert plan.rows[0].remap is None and plan.rows[0].k == 106 and lengths(scheduler) == (106, 107)
    loop.call()
    assert [len(n.tokens) for n in loop.news] == [1, 6, 1]
    assert loop.news[-1].finish_reason == "length" and lengths(scheduler) == (107, 108)
    assert loop.call().finished == (A,) and not scheduler.unfinished
