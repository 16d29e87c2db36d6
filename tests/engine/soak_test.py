"""Random traffic with faults: everything ends, every pool is empty, nothing is lost or doubled."""

import random
from collections import Counter

import pytest

from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import RowOutcome, StepPlan
from deepinfer_jax.engine.request import Request, Status
from deepinfer_jax.engine.scheduler import Scheduler
from tests.engine.scripted import Loop

CACHE = CacheConfig(block_tokens=8, nextn=3)


def random_config(rng: random.Random) -> EngineConfig:
    """A small engine whose pool holds little more than one long request."""
    return EngineConfig(
        cache=CACHE,
        max_model_len=80,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([32, 64]),
        chunked_prefill=True,
        min_chunk=rng.choice([1, 5]),
        chunk_multiple=rng.choice([1, 4]),
        prefill_interval=3,
        prefill_any_interval=5,
        overlap=rng.random() < 0.7,
        stop_preempted=rng.random() < 0.3,
        num_blocks=rng.choice([16, 20, 40]),
    )


def soak(total: int, seed: int) -> Counter[str]:
    """Serve `total` requests with faults; how often each finish reason and fault was met."""
    rng = random.Random(seed)
    reasons: Counter[str] = Counter()
    for first in range(0, total, 50):
        scheduler = Scheduler(random_config(rng), vocab_size=20)

        def script(plan: StepPlan, i: int) -> RowOutcome:
            row = plan.rows[i]
            count = 1 if plan.is_prompt else rng.randint(1, row.q)
            drafts = tuple(rng.randrange(20) for _ in range(3)) if rng.random() < 0.9 else ()
            return RowOutcome(tuple(rng.randrange(20) for _ in range(count)), drafts)

        loop = Loop(scheduler, script)
        requests: dict[int, Request] = {}
        for number in range(first, first + 50):
            prompt = [rng.randrange(20) for _ in range(rng.randint(1, 60))]
            if rng.random() < 0.05:
                prompt[rng.randrange(len(prompt))] = 20
            stops = frozenset({0}) if rng.random() < 0.5 else frozenset()
            request = Request(number, prompt, max_tokens=rng.randint(1, 40), stop_ids=stops)
            try:
                scheduler.add(request)
                requests[number] = request
            except ValueError:
                reasons["invalid"] += 1
            while rng.random() < 0.6 and scheduler.unfinished:
                loop.call()
            if requests and rng.random() < 0.2:
                status = rng.choice([Status.ABORTED, Status.GRAMMAR_FAILED])
                output = scheduler.abort(rng.choice(list(requests)), status)
                loop.news += [output] if output else []
        loop.run()
        _check_end(scheduler, loop, requests)
        reasons.update(n.finish_reason for n in loop.news if n.finish_reason)
        reasons["recomputed"] += sum(
            r.preemptions > 0 and r.status != Status.PREEMPTED for r in requests.values()
        )
    return reasons


def _check_end(scheduler: Scheduler, loop: Loop, requests: dict[int, Request]) -> None:
    storage = scheduler.roster.storage
    used = (storage.blocks.used_count, storage.slots.used_count, storage.draft_slots.used_count)
    assert used == (0, 0, 0) and not scheduler.roster.requests
    ended = [n.request_id for n in loop.news if n.finish_reason]
    assert sorted(ended) == sorted(requests)  # each once
    emitted: dict[int, list[int]] = {number: [] for number in requests}
    for news in loop.news:
        emitted[news.request_id] += news.tokens
    for number, request in requests.items():
        assert emitted[number] == request.tokens[request.prompt_length :]


def test_a_thousand_requests_with_faults() -> None:
    reasons = soak(1000, seed=1)
    assert sum(reasons.values()) - reasons["recomputed"] == 1000
    for reason in ("stop", "length", "abort", "grammar_error", "invalid", "recomputed"):
        assert reasons[reason] > 5, reasons
    assert reasons["insufficient_system_resource"] > 0, reasons


@pytest.mark.slow
def test_twenty_thousand_requests_with_faults() -> None:
    reasons = soak(20_000, seed=2)
    assert sum(reasons.values()) - reasons["recomputed"] == 20_000
