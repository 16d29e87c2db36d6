"""Replay of a trace against one cache on the host: an infinite one, or block LRU, on the trie."""

from __future__ import annotations

import collections

import numpy as np

from deepinfer_jax.simulator.prefixes import Int32, Trie
from deepinfer_jax.simulator.traces import Int64


def _first_publisher(trie: Trie, publish: Int32) -> Int64:
    """The first request that publishes each node [N], the number of requests if none does."""
    first = np.full(len(trie.node_parent), len(publish), np.int64)
    np.minimum.at(first, publish, np.arange(len(publish)))
    for node in range(len(first) - 1, 0, -1):
        parent = trie.node_parent[node]
        first[parent] = min(first[parent], first[node])
    return first


def infinite_hits(
    trie: Trie, arrival: Int64, delay: int = 0, publish_node: Int32 | None = None
) -> Int64:
    """Blocks that each request finds in a cache that forgets nothing.

    Args:
      trie: of the trace.
      arrival: [Q] ticks, ascending.
      delay: ticks from a request's arrival until others see its blocks, that instant included.
      publish_node: [Q], `trie.publish_node` unless given (`trie.output_node` adds the outputs).

    Returns:
      [Q] leading blocks present, at most up to the match node.
    """
    publish = trie.publish_node if publish_node is None else publish_node
    first = _first_publisher(trie, publish)
    since = np.append(arrival + delay, np.iinfo(np.int64).max)[first]
    request = np.arange(len(arrival))
    node = trie.match_node.astype(np.int64)
    while True:
        absent = (node > 0) & ((first[node] >= request) | (since[node] > arrival))
        if not absent.any():
            return trie.node_end[node].astype(np.int64)
        node = np.where(absent, trie.node_parent[node], node)


def path(trie: Trie, node: int) -> list[int]:
    """Nodes from the deepest, `node`, up to but without the root."""
    nodes = []
    while node:
        nodes.append(node)
        node = int(trie.node_parent[node])
    return nodes


def lru_hits(trie: Trie, capacity_blocks: int, publish_node: Int32 | None = None) -> Int64:
    """Blocks that each request finds in a block LRU cache, the requests one after the other.

    A hit is the leading run of blocks present. Then all blocks of the request are touched from the
    tail to the head, so the head is the most recent and a prefix outlives what hangs from it. Of
    two blocks of a segment the later is then always the older one, so a segment is held up to some
    length and trimmed from its tail: equal to LRU over single blocks, without visiting them.

    Args:
      trie: of the trace.
      capacity_blocks: blocks that the cache holds.
      publish_node: [Q], `trie.publish_node` unless given.

    Returns:
      [Q] leading blocks present, at most up to the match node.
    """
    if capacity_blocks < 0:
        raise ValueError(f"capacity_blocks={capacity_blocks}: must not be negative; give 0 or more")
    publish = trie.publish_node if publish_node is None else publish_node
    length = (trie.node_end - trie.node_start).tolist()
    held: collections.OrderedDict[int, int] = collections.OrderedDict()
    total, hits = 0, np.zeros(len(publish), np.int64)
    for request, (match, node) in enumerate(zip(trie.match_node, publish, strict=True)):
        for segment in reversed(path(trie, int(match))):
            found = held.get(segment, 0)
            hits[request] += found
            if found < length[segment]:
                break
        for segment in path(trie, int(node)):
            total += length[segment] - held.get(segment, 0)
            held[segment] = length[segment]
            held.move_to_end(segment)
        while total > capacity_blocks:
            oldest = next(iter(held))
            trimmed = min(held[oldest], total - capacity_blocks)
            total, held[oldest] = total - trimmed, held[oldest] - trimmed
            if not held[oldest]:
                del held[oldest]
    return hits
