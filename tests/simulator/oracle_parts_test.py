"""Parts of the readable model against public vectors and brute force."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from deepinfer_jax.simulator.cluster import FOREVER, ClusterConfig, Mode
from tests.simulator.oracle import policies, steps
from tests.simulator.oracle.cache import Cache, Trie
from tests.simulator.oracle.hand import cost, workload
from tests.simulator.oracle.prompts import Dice, random_requests, workload_of


def test_splitmix64_vectors() -> None:
    # The generator's first outputs from seed 0 (Steele, Lea, Flood 2014; the reference C code).
    outputs = [steps.mix((k * steps.GOLDEN) % 2**64) for k in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_acceptance_follows_its_survival() -> None:
    cluster = ClusterConfig(modes=(Mode.NORMAL,), cost=cost(), nextn=2, acceptance=(0.8, 0.5))
    counts = [steps.accepted(cluster, i, s) for i in range(100) for s in range(100)]
    share = np.bincount(counts, minlength=3) / len(counts)
    assert share == pytest.approx([0.2, 0.4, 0.4], abs=0.02)  # 4 standard deviations


def test_steps_go_on_counting_over_a_life() -> None:
    cluster = ClusterConfig(modes=(Mode.NORMAL,), cost=cost(), nextn=1, acceptance=(0.5,))
    tokens = [1 + steps.accepted(cluster, 7, s) for s in range(40)]
    for life in (0, 5):
        for owed in (1, 10, 30):
            n = steps.steps_needed(cluster, 7, life, owed)
            assert sum(tokens[life : life + n - 1]) < owed <= sum(tokens[life : life + n])


class BlockLru:
    """Single blocks by their whole prefix: the definition that segments must reproduce."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def match(self, chain: tuple[int, ...]) -> int:
        hit = 0
        while hit < len(chain) and chain[: hit + 1] in self.blocks:
            hit += 1
        self.touch(chain[:hit])
        return hit

    def touch(self, chain: tuple[int, ...]) -> None:
        for n in range(len(chain), 0, -1):
            self.blocks[chain[:n]] = None
            self.blocks.move_to_end(chain[:n])

    def publish(self, chain: tuple[int, ...]) -> None:
        self.touch(chain)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


@pytest.mark.parametrize("seed", range(40))
def test_segments_are_a_block_lru(seed: int) -> None:
    dice = Dice(seed)
    planned = random_requests(dice, 4, 3)
    requests = workload_of(planned)
    capacity = dice.one_of(1, 5, 20, 50)
    cache, blocks = Cache(Trie(requests), capacity, FOREVER), BlockLru(capacity)
    for i, p in enumerate(planned * 2):
        i %= len(planned)
        hit, deepest = cache.match(int(requests.match_node[i]))
        cache.touch(deepest)
        assert hit == blocks.match(p.chain[: p.match])
        cache.publish(int(requests.publish_node[i]))
        blocks.publish(p.chain[: p.publish])
        if i % 3 == 0:
            cache.publish(int(requests.output_node[i]))
            blocks.publish(p.chain[: p.output])
        assert cache.used() == len(blocks.blocks)
        assert cache.published == cache.used() + cache.evicted


def test_pins_hold_and_overflow_stays() -> None:
    trie = Trie(workload([0], [9], [1], [(0, 0, 2), (0, 0, 3)]))
    cache = Cache(trie, 2, FOREVER)
    cache.publish(1)
    cache.pin(1)
    cache.publish(2)  # 5 blocks for 2: only the new ones may go
    assert (cache.present, cache.evicted) == ([0, 2, 0], 3)
    cache.pin(2)
    cache.publish(2)
    assert cache.used() == 5
    cache.unpin(1)
    cache.publish(2)
    assert cache.present == [0, 0, 3]


def side(engines: int, **columns: list[int]) -> policies.PrefillSide:
    names = policies.PrefillSide.__dataclass_fields__
    zero = {name: [0] * engines for name in names} | {"eligible": [True] * engines}
    return policies.PrefillSide(**(zero | columns))


def test_dynamos_documented_example() -> None:
    # 8 + 10 = 18, 5 + 5 = 10, 2 + 9 = 11 blocks: the second is taken.
    view = side(3, hit_tokens=[2 * 16, 5 * 16, 8 * 16], decode_blocks=[10, 5, 9])
    asked = policies.Asked(0, 0, 160)
    assert policies.prefill("dynamo_cost", view, asked, {"block_tokens": 16}) == 1


def test_cache_aware_thresholds() -> None:
    # SGLang's 64 / 1.5 / 0.3: balance only when both limits are passed; strictly above 0.3.
    for requests, hits, taken in (
        ([65, 0], [100, 0], 1),
        ([64, 0], [100, 0], 0),
        ([200, 130], [100, 0], 1),
        ([200, 135], [100, 0], 0),
        ([2, 1], [30, 0], 1),
        ([2, 1], [31, 0], 0),
    ):
        view = side(2, requests=requests, hit_tokens=hits)
        assert policies.prefill("cache_aware", view, policies.Asked(0, 0, 100), {}) == taken


def test_mooncake_weighs_transfer_against_the_queue() -> None:
    view = side(2, hit_tokens=[100, 0], quota_used=[50, 0], hit_cost=[10, 90])
    asked = policies.Asked(0, 0, 200)
    for ticks, taken in ((0, 1), (1, 0)):  # 0 + 10 or 100 + 10 against 50 + 10
        parameters = {"transfer_ticks_per_token": ticks}
        assert policies.prefill("mooncake", view, asked, parameters) == taken


def test_dualpath_prefers_short_reading_queues() -> None:
    view = side(3, tokens=[5, 20, 99], reading_tokens=[50, 10, 0])
    parameters = {"reading_alpha": 10, "token_beta": 30}
    assert policies.prefill("dualpath", view, policies.Asked(0, 0, 1), parameters) == 1
    parameters["token_beta"] = 10
    assert policies.prefill("dualpath", view, policies.Asked(0, 0, 1), parameters) == 0
    parameters["token_beta"] = 4
    assert policies.prefill("dualpath", view, policies.Asked(0, 0, 1), parameters) is None


def test_two_load_and_dualpath_z_differ() -> None:
    # Concurrency [1, 10], held [100K, 20K], length 1K: Z = 1.05 * 121K / 2 = 63.5K.
    view = policies.DecodeSide([True] * 2, [True] * 2, [1, 10], [100_000, 20_000], [0, 0])
    asked = policies.Asked(0, 0, 1_000)
    assert policies.decode("two_load", view, asked, {}) == 0
    assert policies.decode("dualpath_z", view, asked, {}) == 1
    assert policies.decode("two_load", view, asked, {"short_below": 1_000}) == 1


def test_tier_shares() -> None:
    assert policies.tier_shares([100, 1, 0, 0], 4) == [3, 1, 0, 0]
    assert policies.tier_shares([1, 3, 3], 2) == [0, 1, 1]
    assert policies.tier_shares([1, 1, 1], 4) == [2, 1, 1]
    assert policies.tier_shares([3, 5], 4) == [2, 2]  # 1.5 and 2.5: remainders tie
    assert policies.tier_shares([100, 397, 1, 1, 1], 5) == [1] * 5
