"""Prefix hits against cold prompts, at the model: what is loaded, replayed, frozen, or missing.

Scaled from the released numbers: window 8 for 128, rings of 14 for 134, keep 20 for 140.
"""

import dataclasses
import functools

import numpy as np
import pytest

from deepinfer_jax.cache.allocator import BlockPool
from deepinfer_jax.config import CacheConfig, EngineConfig
from deepinfer_jax.engine.plan import PlanRow, RowOutcome
from deepinfer_jax.engine.prefix import check_hit
from deepinfer_jax.engine.prefix_cache import PrefixCache
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.policy.prefix import Image, chain
from tests.engine.modelled import IMAGES, LOOKBACK, MODEL, TINY, Device, Scale, kept_start, prompt
from tests.engine.scripted import Loop

EQUAL = CacheConfig(block_tokens=8, nextn=0, backtracking=6, truncation="mask", keep=20)
LESS = dataclasses.replace(EQUAL, keep=14)  # keep = reserve = rings
GAP = dataclasses.replace(EQUAL, reserve=14, unsafe_reserve=True)
POISON = float("nan")


class Service:
    """One engine with a prefix cache, or without; requests one after the other."""

    def __init__(
        self, cache: CacheConfig, source: bool = True, poison: float = 0.0, scale: Scale = TINY
    ) -> None:
        config = EngineConfig(
            cache=cache,
            max_model_len=scale.table * cache.block_tokens - 20,
            max_num_seqs=3,
            max_num_batched_tokens=scale.width,
            chunked_prefill=True,
            overlap=False,
            num_blocks=scale.blocks,
        )
        self.device = Device(config, scale)
        self.device.poison(poison)
        self.cache = PrefixCache(scale.model, cache)
        self.scheduler = Scheduler(
            config, MODEL.vocab_size, source=self.cache if source else None, lookback=LOOKBACK
        )
        self.cache.attach(self.scheduler.roster.storage.blocks, self.device.snapshot)
        self.loop = Loop(self.scheduler, self.device)
        self.count = 0

    def ask(self, tokens: list[int], outputs: int = 4) -> np.ndarray:
        """Logits [outputs, V] of a request, run to its end."""
        self.count += 1
        points = self.cache.checkpoints(len(tokens))
        self.scheduler.add(Request(self.count, tokens, max_tokens=outputs, checkpoints=points))
        self.loop.run()
        return np.array(self.device.logits[self.count])

    @property
    def rows(self) -> int:
        """Prompt rows that the newest request computed."""
        return self.device.computed[self.count]


def distance(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@functools.cache
def cold(cache: CacheConfig, length: int) -> np.ndarray:
    return Service(cache, source=False).ask(prompt(length, 0))


@pytest.mark.parametrize("cache", [EQUAL, LESS])
@pytest.mark.parametrize("length", [46, 64])
def test_a_hit_with_state_equals_a_cold_prompt(cache: CacheConfig, length: int) -> None:
    """The same prompt again, in another slot and in part other blocks; all memory poisoned before."""
    service = Service(cache, poison=POISON)
    first = service.ask(prompt(length, 0))
    np.testing.assert_array_equal(first, cold(cache, length))
    again = service.ask(prompt(length, 0))
    assert service.rows == length - (length - cache.keep) // 8 * 8
    assert distance(again, cold(cache, length)) < 1e-5
    programs = IMAGES._load._cache_size(), IMAGES._select._cache_size()
    service.ask(prompt(length - 9, 0))  # another position and slot, no other program
    assert programs == (IMAGES._load._cache_size(), IMAGES._select._cache_size())


def test_keep_140_with_reserve_134_has_a_gap() -> None:
    """L = 46: the hit ends at 32, decoder windows begin at 26, and nobody restored 26 .. 31."""
    with pytest.raises(ValueError, match="set unsafe_reserve to study the gap"):
        PrefixCache(MODEL, dataclasses.replace(EQUAL, reserve=14))
    service = Service(GAP)
    service.ask(prompt(46, 0))
    again = service.ask(prompt(46, 0))
    assert service.rows == 14 and distance(again, cold(EQUAL, 46)) > 1e-3


def test_a_hit_without_state_replays_one_block() -> None:
    """As a prompt whose window begins at L1 - 8 and whose global rows below L1 are the cached ones."""
    service = Service(EQUAL)
    service.ask(prompt(46, 0))
    service.cache.images.clear()
    hit = service.cache.match(Request(9, prompt(46, 0)))
    assert (hit.block_hit, hit.compute_hit) == (24, 16)
    assert (hit.swa_valid_start, hit.store_from, hit.image) == (16, 24, None)
    before = pages(service.device, hit.blocks)
    again = service.ask(prompt(46, 0), outputs=1)
    assert service.rows == 30
    for old, new in zip(before, pages(service.device, hit.blocks), strict=True):
        np.testing.assert_array_equal(old, new)
    # One shot over all 46 rows in a free slot: rows before 16 see no window and store no group.
    row = PlanRow(0, 46, 46, tuple(prompt(46, 0)), (), (*hit.blocks, 31, 32, 33), 3, total=46)
    row = dataclasses.replace(row, swa_valid_start=16, store_from=24)
    want = service.device.run(row, kept_start(EQUAL, row))
    assert distance(again[0], want) < 1e-5
    assert 1e-5 < distance(again[0], cold(EQUAL, 46)[0]) < 1


def pages(device: Device, blocks: tuple[int, ...]) -> list[np.ndarray]:
    memory = device.memory
    pools = (*memory.rows.values(), *memory.keys.values())
    return [np.asarray(pool)[list(blocks)] for pool in pools]


def test_the_next_turn_reuses_output_and_leaves_shared_blocks_alone() -> None:
    """Output blocks are published once committed and full: 46 + 11 rows are 7 blocks."""
    service = Service(EQUAL)
    service.ask(prompt(46, 0), outputs=12)
    assert len(service.cache.blocks) == 7
    history = [*prompt(46, 0), *answer(service)]
    hit = service.cache.match(Request(9, history + prompt(30, 5)))
    assert hit.block_hit == 56 and len(hit.blocks) == 7
    before = pages(service.device, hit.blocks)
    found = service.ask(history + prompt(30, 5))
    for old, new in zip(before, pages(service.device, hit.blocks), strict=True):
        np.testing.assert_array_equal(old, new)
    want = Service(EQUAL, source=False).ask(history + prompt(30, 5))
    assert service.rows == len(history) + 30 - hit.compute_hit
    assert hit.image is not None and distance(found, want) < 1e-5


def answer(service: Service) -> list[int]:
    return [int(logits.argmax()) for logits in service.device.logits[service.count]]


@functools.cache
def model_free() -> EngineConfig:
    return EngineConfig(
        cache=dataclasses.replace(EQUAL, nextn=3, keep=14),
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        chunked_prefill=True,
        prefill_interval=2,
        prefill_any_interval=3,
        overlap=True,
        num_blocks=20,
    )


def test_full_prompts_short_prompts_and_images() -> None:
    cache, request = bookkeeping(), Request(1, [5] * 64)
    request.blocks, request.slot, request.proc = cache.pool.allocate(8), 1, 64
    cache.publish(request, 8)
    for length, want in ((64, 48), (62, 48), (61, 40), (22, 8), (21, None), (8, None)):
        hit = cache.match(Request(2, [5] * length))
        assert (hit.block_hit if hit else None) == want, length
    # Images at 64 (newest) and at 48 (anchor, 16 rows back: too late for rings of 14).
    assert list(cache.images.values()) == [(1, 64)]
    assert cache.match(Request(2, [5] * 78)).image == (1, 64)
    assert cache.match(Request(2, [5] * 77)).compute_hit == 48
    picture = Image(50, 60, b"x")  # its pixels enter the keys of blocks 6 and 7
    assert cache.match(Request(2, [5] * 78, images=(picture,))).block_hit == 48


def test_a_restart_inside_an_image_steps_back() -> None:
    """A hit of 32 tokens without a state would restart at 24, inside an image at [20, 28)."""
    cache, picture = bookkeeping(images=0), Image(20, 28, b"x")
    request = Request(1, [5] * 32, images=(picture,))
    request.blocks, request.slot, request.proc = cache.pool.allocate(4), 1, 32
    cache.publish(request, 4)
    hit = cache.match(Request(2, [5] * 60, images=(picture,)))
    assert (hit.block_hit, hit.compute_hit, hit.swa_valid_start) == (32, 16, 16)
    check_hit(hit, Request(2, [5] * 60, images=(picture,)), 8)


def bookkeeping(images: int = 64) -> PrefixCache:
    cache = PrefixCache(MODEL, model_free().cache, images=images)
    cache.attach(BlockPool(20), lambda slot, position: (slot, position))
    return cache


def test_the_oldest_go_first_and_chains_shrink_from_their_end() -> None:
    cache = bookkeeping(images=2)
    for number, length in ((1, 24), (2, 32), (3, 16)):
        request = Request(number, [number] * length)
        request.blocks, request.slot = cache.pool.allocate(length // 8), number
        for proc in range(8, length + 1, 8):
            request.proc = proc
            cache.publish(request, proc // 8)
        cache.pool.free(request.blocks)
    assert list(cache.images.values()) == [(3, 8), (3, 16)]
    assert cache.match(Request(9, [1] * 38)).block_hit == 24  # used again: now the newest
    cache.reclaim(3)
    assert cache.match(Request(9, [2] * 46)).block_hit == 8
    cache.pool.pin(cache.match(Request(9, [3] * 30)).blocks)
    cache.reclaim(99)
    assert len(cache.blocks) == 2 and cache.pool.used_count == 2
    assert cache.match(Request(9, [1] * 38)) is None


def test_keys_do_not_depend_on_when_blocks_were_hashed() -> None:
    """Block by block, across an image, or all at once."""
    cache, tokens = bookkeeping(), prompt(64, 0)
    pictures = (Image(10, 30, b"x"),)
    slow, fast = Request(1, tokens, images=pictures), Request(2, tokens, images=pictures)
    for count in range(9):
        keys = cache._chain(slow, count)
    assert keys == cache._chain(fast, 8) == list(chain(tokens, (), 8, b"", pictures))
    assert keys[0] == chain(tokens, (), 8)[0] and keys[1] != chain(tokens, (), 8)[1]


def test_any_traffic_leaves_no_block_behind() -> None:
    """Overlap, drafts, aborts, preemption and a pool that is too small; hits of both kinds."""
    config, rng = model_free(), np.random.default_rng(0)
    cache = PrefixCache(MODEL, config.cache, images=3)
    scheduler = Scheduler(config, 10, source=cache, lookback=2)
    taken: list[int] = []
    cache.attach(
        scheduler.roster.storage.blocks, lambda slot, position: taken.append(position) or position
    )

    def outcome(plan, i):
        row = plan.rows[i]
        request = scheduler.roster.requests[row.request_id]
        first = max(request.proc, row.store_from) // 8
        assert not set(row.blocks[first:]) & set(cache.held())  # nobody stores into a cached block
        hits.append(row.hit) if row.hit else None
        count = 1 if plan.is_prompt else 1 + int(rng.integers(0, row.q))
        return RowOutcome(tuple(rng.integers(0, 2, count).tolist()), (1,) * 3)

    hits: list = []
    loop = Loop(scheduler, outcome)
    for number in range(120):
        length = int(rng.choice([5, 30, 50, 80]))
        tokens = [int(rng.integers(0, 3))] * 40 + [1] * 40
        scheduler.add(Request(number, tokens[:length], max_tokens=int(rng.integers(1, 16))))
        for _ in range(int(rng.integers(0, 5))):
            loop.call()
        if rng.random() < 0.2:
            scheduler.abort(int(rng.integers(0, number + 1)))
    loop.run()
    replays = sum(h.image is None for h in hits)
    assert len(hits) > 20 and 0 < replays < len(hits) and len(set(taken)) > 3
    cache.reclaim(99)
    assert scheduler.roster.storage.blocks.used_count == 0 and not cache.images
