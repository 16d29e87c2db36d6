"""Sections 11 and 15: which blocks of the shared store can be read, and reads as flows at storage nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tests.simulator.oracle import steps
from tests.simulator.oracle.cache import ROOT
from tests.simulator.oracle.clock import ceil_divide, ceil_ticks
from tests.simulator.oracle.world import Request, World

MASK = 2**64 - 1


def stripe_key(segment: int, stripe: int) -> int:
    """The key of a stripe of a segment."""
    return steps.mix((steps.GOLDEN * (segment + 1) + stripe) & MASK)


def node_key(key: int, node: int) -> int:
    """A hash of a key and a node."""
    return steps.mix((key + steps.GOLDEN * (node + 1)) & MASK)


def holders(nodes: int, segment: int, stripe: int) -> list[int]:
    """The 12 nodes with a fragment of a stripe, in its order."""
    key = stripe_key(segment, stripe)
    return sorted(range(nodes), key=lambda n: (node_key(key, n) >> 1, n))[:12]


def live(world: World, segment: int, stripe: int) -> list[int]:
    """The holders that are up."""
    nodes = holders(world.cluster.storage_nodes, segment, stripe)
    return [n for n in nodes if world.nodes_up_at[n] <= world.now]


def readable(world: World, request: Request, blocks: int, deepest: int) -> tuple[int, int]:
    """(leading blocks that can be read, deepest segment they reach) of a match."""
    size = world.cluster.stripe_blocks
    last = ROOT
    for segment in world.trie.path(deepest):
        for block in range(world.trie.start[segment], min(world.trie.end[segment], blocks)):
            if len(live(world, segment, block // size)) < 10:
                world.counters["unreadable"] += blocks - block
                world.counters["cut"] += 1
                return block, last if block == world.trie.start[segment] else segment
        last = segment
    return blocks, deepest


def stripes(world: World, deepest: int, blocks: int) -> Iterator[tuple[int, int, int]]:
    """(segment, stripe, blocks needed of it) of the leading blocks."""
    size = world.cluster.stripe_blocks
    for segment in world.trie.path(deepest):
        needed: dict[int, int] = {}
        for block in range(world.trie.start[segment], min(world.trie.end[segment], blocks)):
            needed[block // size] = needed.get(block // size, 0) + 1
        for stripe, count in needed.items():
            yield segment, stripe, count


def share_mean(part: int, parts: int) -> float:
    """Mean of the unit exponential between two of its quantiles, by integrating x exp(-x)."""

    def below(probability: float) -> float:
        """Integral of x exp(-x) from 0 to the quantile: 1 - (1 + x) exp(-x)."""
        if probability == 1:
            return 1.0
        x = -math.log1p(-probability)
        return 1 - (1 + x) * (1 - probability)

    return parts * (below((part + 1) / parts) - below(part / parts))


TABLE = [round(2**20 * share_mean(i, 4096)) for i in range(4096)]


def read(world: World, request: Request) -> int:
    """When the reads of a placed request end."""
    cluster = world.cluster
    blocks = request.block_hit // cluster.block_tokens
    number = ((MASK - cluster.seed) + steps.GOLDEN * world.placements) & MASK
    stream = steps.mix(number)
    asked: list[list[int]] = []
    flows: dict[int, int] = {}
    for segment, stripe, count in stripes(world, request.pinned, blocks):
        nodes = live(world, segment, stripe)
        first = (steps.mix((stripe_key(segment, stripe) + stream) & MASK) >> 33) % len(nodes)
        chosen = (nodes[first:] + nodes[:first])[: cluster.storage_asked]
        asked.append(chosen)
        for node in chosen:
            fragment = ceil_divide(count * cluster.block_bytes, 10)
            flows[node] = flows.get(node, 0) + fragment
    for node, size in flows.items():
        access = cluster.storage_read_ticks * TABLE[node_key(stream, node) >> 52] // 2**20
        lasts = access + ceil_ticks(size * cluster.storage_femtoseconds_per_byte)
        world.nodes_free[node] = max(world.now, world.nodes_free[node]) + lasts
        world.nodes_busy[node] += lasts
    world.storage_bytes += sum(flows.values())
    world.storage_reads += bool(flows)
    ends = [sorted(world.nodes_free[node] for node in chosen)[9] for chosen in asked]
    end = max(ends, default=world.now)
    world.storage_ticks += end - world.now
    return end
