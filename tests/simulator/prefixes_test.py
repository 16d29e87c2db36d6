"""The segment trie against block-by-block brute force, and against published hit ratios."""

import collections
import dataclasses
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from deepinfer_jax.simulator import loading, prefixes, replay, traces

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "traces"


def make_trace(requests, block_tokens):
    """requests: (ids, input, output, session) each, one second apart."""
    ids = [r[0] for r in requests]
    trace = traces.plain(
        "made", np.arange(len(ids)) * 10**9, [r[1] for r in requests], [r[2] for r in requests]
    )
    return dataclasses.replace(
        trace,
        block_tokens=block_tokens,
        run_first=np.array([i for chain in ids for i in chain], np.int64),
        run_count=np.ones(sum(map(len, ids)), np.int64),
        run_offsets=traces.offsets([len(chain) for chain in ids]),
        session=np.array([r[3] for r in requests]),
    )


@st.composite
def cases(draw):
    """Random prompts over a two-letter alphabet of blocks, numbered by their whole prefix."""
    size = draw(st.integers(1, 5))
    number: dict = {}
    jump = draw(st.sampled_from([1, 3, 100]))  # how many ids follow each other
    requests = []
    for _ in range(draw(st.integers(1, 9))):
        letters = draw(st.lists(st.integers(0, 1), max_size=7))
        tail = draw(st.integers(1, size))  # tokens in the last block
        unnamed = draw(st.sampled_from([0, 0, 3, 8]))  # tokens for which the trace has no id
        if unnamed:
            tail = size
        keys = [tuple(letters[: i + 1]) for i in range(len(letters))]
        if keys and tail < size:
            keys[-1] = (*keys[-1], "partial", tail)
        ids = [number.setdefault(k, len(number) + len(number) // jump * 1000) for k in keys]
        prompt = max((len(letters) - 1) * size + tail if letters else 0, 0) + unnamed
        requests.append((ids, max(prompt, 1), draw(st.integers(1, 9)), draw(st.integers(0, 2))))
    block = draw(st.integers(1, 5))
    return make_trace(requests, size), block, draw(st.integers(0, 4))


def block_keys(trace, block):
    """The identity of every full block of every request, straight from the definition."""
    keys = []
    for q in range(len(trace)):
        ids, named = trace.blocks(q), trace.run_offsets[q + 1] - trace.run_offsets[q]
        keys.append([])
        for b in range(trace.input_tokens[q] // block):
            holder = ((b + 1) * block - 1) // trace.block_tokens
            keys[q].append(("id", ids[holder], b) if holder < named else ("own", q, b))
    return keys


def block_nodes(trie, node):
    """The node of every block on the path to `node`."""
    nodes = []
    for n in reversed(replay.path(trie, node)):
        assert trie.node_start[n] == len(nodes) < trie.node_end[n]
        nodes += [n] * (trie.node_end[n] - trie.node_start[n])
    return nodes


def naive_lru(keys, caps, capacity):
    cache, hits = collections.OrderedDict(), []
    for chain, cap in zip(keys, caps, strict=True):
        found = 0
        while found < cap and chain[found] in cache:
            found += 1
        hits.append(found)
        for key in reversed(chain):
            cache[key] = None
            cache.move_to_end(key)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(cases())
def test_nodes_are_the_maximal_stretches_of_equal_blocks(case):
    trace, block, reserve = case
    trie = prefixes.build(trace, block, reserve)
    keys = block_keys(trace, block)
    seen, back = {}, {}
    for q, chain in enumerate(keys):
        cap = max(trace.input_tokens[q] - reserve, 0) // block
        nodes = block_nodes(trie, int(trie.publish_node[q]))
        assert len(nodes) == len(chain) == trie.node_end[trie.publish_node[q]]
        assert trie.node_end[trie.match_node[q]] == cap
        assert trie.match_node[q] in [0, *nodes]
        for key, node in zip(chain, nodes, strict=True):
            assert seen.setdefault(key, node) == node
            assert back.setdefault((node, key[-1]), key) == key
    ends = set(trie.match_node) | set(trie.publish_node) | set(trie.output_node)
    children = collections.Counter(trie.node_parent[1:].tolist())
    assert trie.node_parent[0] == trie.node_start[0] == trie.node_end[0] == 0
    for node in range(1, len(trie.node_parent)):
        assert trie.node_parent[node] < node
        assert node in ends or children[node] > 1
        assert node in ends or children[node] > 0


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(cases(), st.integers(0, 12))
def test_replays_equal_block_by_block_caches(case, capacity):
    trace, block, reserve = case
    trie = prefixes.build(trace, block, reserve)
    keys = block_keys(trace, block)
    caps = [max(n - reserve, 0) // block for n in trace.input_tokens]
    assert replay.lru_hits(trie, capacity).tolist() == naive_lru(keys, caps, capacity)
    endless = replay.infinite_hits(trie, trace.arrival)
    assert endless.tolist() == naive_lru(keys, caps, 10**9)
    # A block published two seconds after its request, one request a second: two requests later.
    for q, found in enumerate(replay.infinite_hits(trie, trace.arrival, 2 * 10**9)):
        present = {key for chain in keys[: max(q - 1, 0)] for key in chain}
        expected = 0
        while expected < caps[q] and keys[q][expected] in present:
            expected += 1
        assert found == expected


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(cases())
def test_an_output_reaches_as_far_as_the_next_turn_repeats_it(case):
    trace, block, reserve = case
    trie = prefixes.build(trace, block, reserve)
    keys = block_keys(trace, block)
    for q in range(len(trace)):
        own = block_nodes(trie, int(trie.output_node[q]))
        later = [r for r in range(q + 1, len(trace)) if trace.session[r] == trace.session[q]]
        reach = len(keys[q])
        if later and reach and keys[later[0]][:reach] == keys[q]:
            held = int(trace.input_tokens[q] + trace.output_tokens[q]) // block
            reach = max(min(held, len(keys[later[0]])), reach)
            assert own == block_nodes(trie, int(trie.publish_node[later[0]]))[:reach]
        else:
            assert trie.output_node[q] == trie.publish_node[q]
        assert len(own) == reach


def test_without_outputs_only_prompts_cut():
    trace = make_trace([([0], 4, 6, 0), ([0, 1, 2], 12, 1, 0)], 4)
    with_outputs = prefixes.build(trace, 4, 0)
    assert with_outputs.node_end[with_outputs.output_node].tolist() == [2, 3]
    bare = prefixes.build(trace, 4, 0, outputs=False)
    assert bare.node_end.tolist() == [0, 1, 3] and bare.output_node.tolist() == [1, 2]


def test_ids_must_be_chained_to_their_prefix():
    for bad in ([1, 2], [9, 2]), ([1, 2], [2]), ([3, 4, 5], [7, 4]), ([5, 6, 5],):
        trace = make_trace([(ids, len(ids), 1, 0) for ids in bad], 1)
        with pytest.raises(ValueError, match=r"block id \d follows different .* hash chain$"):
            prefixes.build(trace, 1, 0)


def test_build_refuses_sizes_out_of_range():
    trace = make_trace([([1], 1, 1, 0)], 1)
    for size, reserve in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="block_tokens="):
            prefixes.build(trace, size, reserve)
    with pytest.raises(ValueError, match="capacity_blocks=-1"):
        replay.lru_hits(prefixes.build(trace, 1, 0), -1)


def ratios(trace, hits, block, full):
    tokens = np.minimum(hits * block, trace.input_tokens)
    return hits.sum() / full.sum(), tokens.sum() / trace.input_tokens.sum()


# Replays of the Mooncake FAST'25 traces: 512-token blocks with partial tails, no reserve, instant
# publication; a request's blocks touched from the tail to the head.
PUBLISHED = {
    "conversation": (0.36641, 0.37362, 0.4094, (0.0445, 0.2116, 0.3257, 0.3546, 0.3637)),
    "synthetic": (0.63960, 0.65124, 0.4315, (0.0841, 0.4239, 0.6242, 0.6396, 0.6396)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_mooncake_in_the_published_convention(name):
    blocks, tokens, per_request, lru = PUBLISHED[name]
    trace = loading.load(FOLDER / f"mooncake_{name}_trace.jsonl.gz")
    trie = prefixes.build(trace, 512, 0, count_partial_block=True)
    full = -(-trace.input_tokens // 512)
    hits = replay.infinite_hits(trie, trace.arrival)
    assert ratios(trace, hits, 512, full) == pytest.approx((blocks, tokens), abs=6e-6)
    share = np.minimum(hits * 512, trace.input_tokens) / trace.input_tokens
    assert share.mean() == pytest.approx(per_request, abs=6e-5)
    for capacity, expected in zip((1_000, 10_000, 30_000, 50_000, 100_000), lru, strict=True):
        found = replay.lru_hits(trie, capacity).sum() / full.sum()
        assert found == pytest.approx(expected, abs=6e-5)


def test_mooncake_in_full_blocks_of_128():
    trace = loading.load(FOLDER / "mooncake_conversation_trace.jsonl.gz")
    full = trace.input_tokens // 128
    expected = {0: (0.37546, 0.37338), 30: (0.36940, 0.36739)}
    for delay, (blocks, tokens) in expected.items():
        bare, reserved = prefixes.build(trace, 128, 0), prefixes.build(trace)
        found = replay.infinite_hits(bare, trace.arrival, delay * 10**9)
        assert ratios(trace, found, 128, full)[0] == pytest.approx(blocks, abs=6e-6)
        found = replay.infinite_hits(reserved, trace.arrival, delay * 10**9)
        assert ratios(trace, found, 128, full)[1] == pytest.approx(tokens, abs=6e-6)
    assert len(replay.path(reserved, int(reserved.publish_node[-1]))) < 10


def test_sessions_reuse_what_the_source_counts():
    trace = loading.load(FOLDER / "claude_code_sessions_sample.jsonl.gz", on_invalid="reject")
    trie = prefixes.build(trace, 64, 0, count_partial_block=True)
    hits = replay.infinite_hits(trie, trace.arrival)
    assert (hits > 0).mean() == pytest.approx(0.982, abs=5e-4)
    assert ratios(trace, hits, 64, trace.input_tokens)[1] == pytest.approx(0.9587, abs=1e-4)
    trie = prefixes.build(trace)
    hits = replay.infinite_hits(trie, trace.arrival)
    assert ratios(trace, hits, 128, trace.input_tokens)[1] == pytest.approx(0.9584, abs=1e-4)
