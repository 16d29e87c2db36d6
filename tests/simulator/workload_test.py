"""The arrays handed to the simulator."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from deepinfer_jax.simulator import loading, prefixes, traces
from deepinfer_jax.simulator.workload import workload

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "traces"


@pytest.fixture(scope="module")
def mooncake():
    return traces.head(loading.load(FOLDER / "mooncake_conversation_trace.jsonl.gz"), 500)


def test_arrays_types_and_caps(mooncake):
    made = workload(mooncake)
    columns = {name: value for name, value in vars(made).items() if value is not None}
    for name, value in columns.items():
        assert value.dtype == (np.int64 if name == "arrival" else np.int32), name
    assert len(jax.tree.leaves(made)) == len(columns) == 10
    assert (made.requests, made.nodes) == (500, len(made.node_end))
    # The chapter's example: a prompt of 902 tokens may hit 768, one of 261 nothing.
    assert np.array_equal(
        made.node_end[made.match_node], np.maximum(mooncake.input_tokens - 134, 0) // 128
    )
    assert np.array_equal(made.node_end[made.publish_node], mooncake.input_tokens // 128)
    pair = workload(traces.plain("two", [0, 1], [902, 261], [1, 1]), private_blocks=True)
    assert (pair.node_end[pair.match_node] * 128).tolist() == [768, 0]


def test_options_reach_the_trie(mooncake):
    made, trie = workload(mooncake, 64, 10), prefixes.build(mooncake, 64, 10)
    assert np.array_equal(made.node_end, trie.node_end)
    assert np.array_equal(made.match_node, trie.match_node)
    assert np.array_equal(made.node_parent, trie.node_parent)


def test_nothing_shared_means_the_root_alone(mooncake):
    plain = traces.plain("plain", [0, 1], [1_000, 2_000], [1, 1])
    for made in (workload(mooncake, share_prefixes=False), workload(plain)):
        assert made.nodes == 1 and made.node_end.tolist() == [0]
        assert not made.match_node.any() and not made.publish_node.any()
        assert not made.output_node.any()
    private = workload(plain, private_blocks=True)
    assert private.nodes == 5 and sorted(private.node_end) == [0, 6, 7, 14, 15]


def test_a_million_plain_requests_need_one_node():
    n = 10**6
    made = workload(traces.plain("big", np.arange(n), np.full(n, 5_000), np.ones(n)))
    assert (made.requests, made.nodes) == (n, 1)


def test_order_is_arrival_then_index():
    made = workload(traces.plain("t", [5, 3, 5, 3], [1, 2, 3, 4], [1, 1, 1, 1]))
    assert made.input_tokens.tolist() == [2, 4, 1, 3]
    assert made.arrival.tolist() == [3, 3, 5, 5]
    times = np.random.default_rng(0).integers(0, 5, 1_000)
    made = workload(traces.plain("t", times, np.arange(1, 1_001), np.ones(1_000)))
    expected = sorted(range(1_000), key=lambda q: (times[q], q))
    assert (made.input_tokens - 1).tolist() == expected


def test_images_are_summed():
    trace = loading.load(FOLDER / "servegen_multimodal_mm-image_10rps_1200s.csv.gz")
    made = workload(trace)
    assert made.image_tokens[:4].tolist() == [630, 324, 756, 216]
    assert made.input_tokens[:4].tolist() == [709, 419, 1_230, 295]


def test_bad_traces_are_refused():
    good = traces.plain("good", [0, 1], [5, 5], [1, 1])
    for bad, message in (
        (traces.plain("none", [], [], []), "none: the trace has 0 requests, .*; widen"),
        (dataclasses.replace(good, input_tokens=np.array([5, 0])), r"row 1 .* input_tokens = 0"),
        (dataclasses.replace(good, output_tokens=np.array([2**31, 1])), "row 0 .* output_tokens"),
        (dataclasses.replace(good, arrival=np.array([-1, 0])), "arrival = -1 ticks"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            workload(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the trace is empty"):
        prefixes.build(traces.plain("none", [], [], []))
