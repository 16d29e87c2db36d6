"""The simulator's cache, where service takes no time, finds the published Mooncake hit ratios."""

import dataclasses
import pathlib

import numpy as np
import pytest

from deepinfer_jax.cost.steps import StepCost
from deepinfer_jax.simulator import loading, prefixes, replay
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.workload import Workload
from tests.simulator.reuse import Reusable

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "traces"
ENOUGH = 2**40  # blocks; a limit all the same, so that every capacity has one shape
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)  # of 512 tokens


@pytest.fixture(scope="module")
def trace():
    return loading.load(FOLDER / "mooncake_conversation_trace.jsonl.gz")


def cluster(block_tokens, blocks, write_back=0):
    """One engine to which nothing takes time; a prompt is stored once it has been served."""
    return ClusterConfig(
        modes=(Mode.MIXED,),
        slots=1,
        block_tokens=block_tokens,
        cost=StepCost(0, 0, 0, 0, 0, 0, ((0, 0, 0),), 0, 0),
        cache_scope="shared",
        cache_blocks=blocks,
        write_back_ticks=write_back,
    )


def one_after_the_other(trie, input_tokens):
    """Prompts that arrive ten ticks apart, because those of one tick would all miss each other."""
    count = len(input_tokens)
    zeros, ones = np.zeros(count, np.int32), np.ones(count, np.int32)
    return Workload(
        arrival=10 * np.arange(count),
        input_tokens=input_tokens.astype(np.int32),
        output_tokens=ones,
        image_tokens=zeros,
        match_node=trie.match_node,
        publish_node=trie.publish_node,
        output_node=trie.publish_node,
        node_parent=trie.node_parent,
        node_start=trie.node_start,
        node_end=trie.node_end,
    )


def hit_blocks(run, load, block_tokens):
    assert np.array_equal(run.requests.finish, load.arrival)
    assert np.array_equal(run.requests.block_hit_tokens, run.requests.compute_hit_tokens)
    return run.requests.block_hit_tokens // block_tokens


def test_published_convention_and_lru(trace):
    """Blocks of 512 tokens, partial tails counted, no reserve, stored at once.

    A token is added to the rounded prompts, since a hit never covers a whole prompt here.
    """
    trie = prefixes.build(trace, 512, 0, count_partial_block=True)
    blocks = -(-trace.input_tokens // 512)
    load = one_after_the_other(trie, 512 * blocks + 1)
    service = Reusable(cluster(512, ENOUGH), load)
    hits = hit_blocks(service.run(cluster(512, ENOUGH), load), load, 512)
    assert hits.sum() / blocks.sum() == pytest.approx(0.36641, abs=6e-6)
    tokens = np.minimum(512 * hits, trace.input_tokens)
    assert tokens.sum() / trace.input_tokens.sum() == pytest.approx(0.37362, abs=6e-6)
    assert (tokens / trace.input_tokens).mean() == pytest.approx(0.4094, abs=6e-5)
    published = (0.0445, 0.2116, 0.3257, 0.3546, 0.3637)
    for capacity, expected in zip(CAPACITIES, published, strict=True):
        run = service.run(cluster(512, capacity), load)
        hits = hit_blocks(run, load, 512)
        assert hits.sum() / blocks.sum() == pytest.approx(expected, abs=6e-5)
        assert np.array_equal(hits, replay.lru_hits(trie, capacity))
        assert run.blocks_present == min(capacity, blocks_of(trie))


def blocks_of(trie):
    return int((trie.node_end - trie.node_start).sum())


def test_full_blocks_of_128_stored_now_or_later(trace):
    """Full blocks, 134 tokens of reserve; after half a minute of write-back fewer hit."""
    trie = prefixes.build(trace)
    load = one_after_the_other(trie, trace.input_tokens)
    soon = cluster(128, ENOUGH, write_back=1)
    service = Reusable(soon, load)
    full = (trace.input_tokens // 128).sum()

    hits = hit_blocks(service.run(soon, load), load, 128)
    assert 128 * hits.sum() / trace.input_tokens.sum() == pytest.approx(0.37338, abs=6e-6)
    assert hits.sum() / full == pytest.approx(0.37528, abs=6e-6)  # 0.37546 without a reserve

    late = cluster(128, ENOUGH, write_back=30 * 10**9)
    real = dataclasses.replace(load, arrival=trace.arrival)
    hits = hit_blocks(service.run(late, real), real, 128)
    assert 128 * hits.sum() / trace.input_tokens.sum() == pytest.approx(0.36739, abs=6e-6)
    assert np.array_equal(hits, replay.infinite_hits(trie, trace.arrival, 30 * 10**9))

    for capacity in CAPACITIES:
        run = service.run(cluster(128, 4 * capacity, write_back=1), load)
        assert np.array_equal(hit_blocks(run, load, 128), replay.lru_hits(trie, 4 * capacity))
