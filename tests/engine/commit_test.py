"""What ends a request, in which order it is asked, and what becomes of the tokens behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.commit import append
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop


def engine(**changes: object) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 110, "num_blocks": 64, **changes})


def all_accepted(plan: StepPlan, i: int) -> RowOutcome:
    """Tokens 60, 61, ... of a decode step, every draft accepted."""
    row = plan.rows[i]
    tokens = (50,) if plan.is_prompt else tuple(range(60, 60 + row.q))
    return RowOutcome(tokens, (60,) * 5)


def serve(request: Request, **changes: object) -> tuple[Loop, str | None]:
    scheduler = Scheduler(engine(**changes), vocab_size=100)
    scheduler.add(request)
    loop = Loop(scheduler, all_accepted)
    loop.run()
    return loop, loop.news[-1].finish_reason


@pytest.mark.parametrize("overlap", [True, False])
def test_the_longest_request_ends_one_token_behind_the_limit(overlap: bool) -> None:
    """Released: max_model_len 110, prompt 105: 111 tokens, 5 of them in the last step."""
    request = Request(1, [3] * 105, max_tokens=1000)
    loop, reason = serve(request, overlap=overlap)
    assert reason == "length" and request.length == 111
    assert [len(n.tokens) for n in loop.news] == [1, 5]
    assert (loop.news[-1].verified, loop.news[-1].accepted) == (5, 5)


def test_stop_when_is_asked_after_each_token_and_drops_those_behind() -> None:
    seen: list[list[int]] = []

    def stop(request: Request) -> bool:
        seen.append(request.tokens[100:])
        return request.tokens[-1] == 62

    request = Request(1, [3] * 100, max_tokens=1000, stop_when=stop)
    loop, reason = serve(request)
    assert seen == [[50], [50, 60], [50, 60, 61], [50, 60, 61, 62]]
    assert reason == "stop" and request.tokens[100:] == [50, 60, 61, 62]
    assert [n.tokens for n in loop.news] == [(50,), (60, 61, 62)]
    assert loop.news[-1].accepted == 5  # on the device; the obsolete step is silent


def test_stop_when_may_end_a_request_with_its_first_token() -> None:
    request = Request(1, [3] * 100, stop_when=lambda r: True)
    loop, reason = serve(request)
    assert reason == "stop" and [n.tokens for n in loop.news] == [(50,)]


def test_a_stop_id_goes_before_stop_when_and_both_before_the_caps() -> None:
    asked: list[int] = []

    def stop(request: Request) -> bool:
        asked.append(request.tokens[-1])
        return request.tokens[-1] == 8

    def ended(tokens: list[int], **limits: int) -> tuple[Status, int]:
        asked.clear()
        request = Request(1, [3], stop_ids=frozenset({7}), stop_when=stop, **limits)
        status = append(request, tokens, engine())
        return status, request.output_length

    assert ended([5, 7, 6]) == (Status.STOPPED, 2) and asked == [5]
    assert ended([5, 8], max_tokens=2) == (Status.STOPPED, 2)
    assert ended([5, 7], max_tokens=2) == (Status.STOPPED, 2)
    assert ended([5, 6], max_tokens=2) == (Status.LENGTH_CAPPED, 2) and asked == [5, 6]
    assert ended([5, 6], max_tokens=3) == (Status.WAITING, 2)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    stops=st.frozensets(st.integers(0, 9), max_size=2),
    strange=st.integers(0, 9),
    most=st.integers(1, 12),
    longest=st.integers(8, 16),
)
def test_append_against_a_search_for_the_first_end(
    tokens: list[int], stops: frozenset[int], strange: int, most: int, longest: int
) -> None:
    """Independent: the least place at which any of the four rules holds."""
    request = Request(
        1, [3] * 4, max_tokens=most, stop_ids=stops, stop_when=lambda r: r.tokens[-1] == strange
    )
    config = EngineConfig(cache=CacheConfig(nextn=0), max_model_len=longest, num_blocks=64)
    status = append(request, tokens, config)
    stopping = [i for i, t in enumerate(tokens) if t in stops or t == strange]
    capping = [i for i in range(len(tokens)) if i + 1 == most or 4 + i + 1 > longest]
    end = min(stopping + capping, default=None)
    if end is None:
        assert status == Status.WAITING and request.tokens[4:] == tokens
    else:
        want = Status.STOPPED if end in stopping else Status.LENGTH_CAPPED
        assert status == want and request.tokens[4:] == tokens[: end + 1]
