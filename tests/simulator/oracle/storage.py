"""Section 11: which blocks of the shared store can be read while storage nodes are down."""

from __future__ import annotations

from tests.simulator.oracle import steps
from tests.simulator.oracle.cache import ROOT
from tests.simulator.oracle.world import Request, World

MASK = 2**64 - 1


def holders(nodes: int, segment: int, block: int) -> list[int]:
    """The 12 nodes with a fragment of a block."""
    key = steps.mix((steps.GOLDEN * (segment + 1) + block) & MASK)
    keys = [steps.mix((key + steps.GOLDEN * (n + 1)) & MASK) >> 1 for n in range(nodes)]
    return sorted(range(nodes), key=lambda n: (keys[n], n))[:12]


def readable(world: World, request: Request, blocks: int, deepest: int) -> tuple[int, int]:
    """(leading blocks that can be read, deepest segment they reach) of a match."""
    last = ROOT
    for segment in world.trie.path(deepest):
        for block in range(world.trie.start[segment], min(world.trie.end[segment], blocks)):
            nodes = holders(world.cluster.storage_nodes, segment, block)
            if sum(world.nodes_up_at[n] <= world.now for n in nodes) < 10:
                world.counters["unreadable"] += blocks - block
                world.counters["cut"] += 1
                return block, last if block == world.trie.start[segment] else segment
        last = segment
    return blocks, deepest
