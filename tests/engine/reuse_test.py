"""Prefix reuse in the whole engine: drafts, overlap, batches, text; against an engine without it."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.prefix_cache import PrefixCache
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.statistics import StepRecord
from tests.engine.small_engine import BUCKETS, config, micro, parameters, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
CONFIG = config(truncation="mask", keep=14, num_blocks=60)


@pytest.fixture(scope="module")
def masked() -> Device:
    """A device whose prompts may start from a stored prefix, all memory NaN before."""
    model = micro()
    made = Device(parameters(model), model, CONFIG, buckets=BUCKETS)

    def poison(x: jax.Array) -> jax.Array:
        return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    memory = made.state.memory
    names = ("windows", "raw", "rows", "keys")
    bad = {name: jax.tree.map(poison, getattr(memory, name)) for name in names}
    made.state = dataclasses.replace(made.state, memory=dataclasses.replace(memory, **bad))
    made.warm_up(images=True)
    return made


def llm(device: Device, cache: PrefixCache | None = None, **changes: object) -> LLM:
    """An LLM over the warm device, and the rows of each prompt step in `llm.rows`."""
    rows: list[int] = []

    def record(step: StepRecord) -> None:
        rows.extend([step.rows] if step.is_prompt else [])

    made = dataclasses.replace(CONFIG, **changes)
    one = LLM(device.params, device.model, made, buckets=BUCKETS, prefix_cache=cache, record=record)
    one.engine.device = device
    if cache is not None:
        cache.attach(one.engine.scheduler.roster.storage.blocks, device.snapshot)
    one.rows = rows  # type: ignore[attr-defined]
    return one


def cache_of(device: Device, **changes: int) -> PrefixCache:
    return PrefixCache(device.model, CONFIG.cache, **changes)


def answers(one: LLM, given: list[list[int]], wish: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(result.answers[0].tokens) for result in one.generate(given, wish)]


@pytest.mark.parametrize("overlap", [True, False])
def test_turns_of_a_conversation_reuse_what_came_before(masked: Device, overlap: bool) -> None:
    """Each turn computes its new tokens and a rest of the old ones, and answers as without a cache."""
    (history,) = prompts(1, seed=31, longest=40)
    history = (history * 9)[:37]
    cache = cache_of(masked)
    plain, reusing = llm(masked, overlap=overlap), llm(masked, cache, overlap=overlap)
    for _turn in range(3):
        before = len(reusing.rows)
        (want,) = answers(plain, [history])
        (found,) = answers(reusing, [history])
        assert found == want
        computed = sum(reusing.rows[before:])
        hit = 0 if _turn == 0 else (len(history) - cache.reserve) // 16 * 16
        assert hit > 0 or _turn == 0
        assert len(history) - hit <= computed <= len(history) - hit + 16 * (_turn > 0)
        history = [*history, *found, 7, 8, 9]
    reusing.engine.scheduler.check_integrity()


def test_a_hit_starts_at_the_anchor_of_the_same_prompt(masked: Device) -> None:
    """L = 60, reserve 14: chunks end at 32 as the budget has it, and at 32 again as the anchor."""
    (ids,) = ([i % 290 + 3 for i in range(60)],)
    cache = cache_of(masked)
    one = llm(masked, cache)
    first = answers(one, [ids])
    assert one.rows == [32, 28]
    assert answers(one, [ids]) == first
    assert one.rows[2:] == [28]


def test_random_traffic_with_a_crowded_pool(masked: Device) -> None:
    """Shared heads, preemption, ends inside drafts; every hit has its image, so answers are the same."""
    rng = random.Random(4)
    head = prompts(1, seed=40, longest=48)[0] * 48
    given = []
    for _ in range(14):
        tail = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 24))]
        given.append(head[: rng.choice([20, 32, 48])] + tail)
    cache = cache_of(masked)
    hits = []
    match = cache.match

    def noted(request):  # type: ignore[no-untyped-def]
        hit = match(request)
        if hit is not None and hit.image is None:
            return None  # replays are approximate by design; here they are computed whole
        hits.extend([hit] if hit else [])
        return hit

    cache.match = noted  # type: ignore[method-assign]
    wish = dataclasses.replace(GREEDY, max_tokens=20)
    want = answers(llm(masked), given, wish)
    one = llm(masked, cache, num_blocks=14)
    assert answers(one, given, wish) == want
    assert len(hits) >= 3
    cache.reclaim(99)
    assert one.engine.scheduler.roster.storage.blocks.used_count == 0


def test_nothing_compiles_once_images_are_warm(masked: Device) -> None:
    one = llm(masked, cache_of(masked))
    ids = [i % 270 + 3 for i in range(61)]
    answers(one, [ids])
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: events.append(name))
    answers(one, [ids, ids[:40], ids + [4] * 9])
    assert not [name for name in events if "compile" in name or "trace" in name]


def test_truncation_off_is_refused(masked: Device) -> None:
    with pytest.raises(ValueError, match="truncation is 'off'"):
        PrefixCache(masked.model, config().cache)
