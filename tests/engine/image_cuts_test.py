"""Chunks of prompts with images: none is cut, nothing is left out, and every prompt gets through."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome
from deepinfer_jax.engine.prefill import uncut
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.policy.prefix import Image
from tests.engine.scripted import Loop

BUDGET = 24


@st.composite
def prompts(draw: st.DrawFn) -> Request:
    """Runs of text and images by turns; no image is larger than the budget."""
    at, images = 0, []
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 20))
        end = at + draw(st.integers(1, BUDGET))
        images.append(Image(at, end, bytes([len(images)])))
        at = end
    length = max(1, at + draw(st.integers(0, 20)))
    outside = [p for p in range(1, length + 1) if not any(i.start < p < i.end for i in images)]
    points = draw(st.lists(st.sampled_from(outside), max_size=3, unique=True))
    request = Request(draw(st.integers(0, 2**30)), [3] * length, max_tokens=2)
    request.images, request.checkpoints = tuple(images), tuple(sorted(points))
    return request


@settings(deadline=None, max_examples=150)
@given(
    requests=st.lists(prompts(), min_size=1, max_size=4, unique_by=lambda r: r.request_id),
    multiple=st.sampled_from([1, 4, 5]),
    least=st.sampled_from([1, 8]),
    overlap=st.booleans(),
)
def test_chunks_cover_prompts_and_cut_no_image(
    requests: list[Request], multiple: int, least: int, overlap: bool
) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_tokens=8, nextn=3),
        max_model_len=250,
        max_num_seqs=3,
        max_num_batched_tokens=BUDGET,
        chunked_prefill=True,
        chunk_multiple=multiple,
        min_chunk=least,
        prefill_interval=1,
        prefill_any_interval=2,
        overlap=overlap,
        num_blocks=150,
    )
    scheduler = Scheduler(config, 10)
    loop = Loop(scheduler, lambda plan, i: RowOutcome((5,), (6,) * 3))
    for request in requests:
        scheduler.add(request)
    done = {request.request_id: 0 for request in requests}
    by_id = {request.request_id: request for request in requests}
    calls = 0
    while scheduler.unfinished:
        plan = loop.call()
        calls += 1
        assert calls < 400, f"a prompt waits for ever: {done}"
        assert plan.total_q <= BUDGET
        for row in plan.rows if plan.is_prompt else ():
            request = by_id[row.request_id]
            assert row.start == done[row.request_id] < row.k  # where the last one ended
            assert not any(i.start < row.k < i.end for i in request.images)
            assert not any(row.start < c < row.k for c in request.checkpoints)
            touched = [i for i in request.images if set(range(i.start, i.end)) & set(row.positions)]
            assert list(row.images) == touched
            done[row.request_id] = row.k
    assert done == {request.request_id: request.prompt_length for request in requests}


@given(start=st.integers(0, 40), size=st.integers(0, 40), room=st.integers(0, 20))
def test_uncut_is_the_nearest_place_outside(start: int, size: int, room: int) -> None:
    """By search: the end of the image if it may be reached, else the last place before it."""
    images = (Image(10, 20, b"a"), Image(20, 26, b"b"), Image(33, 50, b"c"))
    end, limit = start + size, start + size + room
    free = [p for p in range(81) if not any(i.start < p < i.end for i in images)]
    ahead = min(p for p in free if p >= end)
    behind = max(p for p in free if p <= end)
    wanted = end if end in free else ahead if ahead <= limit else max(start, behind)
    assert uncut(images, start, end, limit) == wanted
