"""Section 4: the trie of segments, a cache of leading blocks per segment, and SWA anchors."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer_jax.simulator.cluster import FOREVER

ROOT = 0


class Trie:
    """Segments [start, end) in blocks; node 0 is the empty prefix, its own parent."""

    def __init__(self, workload: Any) -> None:
        self.parent = [int(x) for x in workload.node_parent]
        self.start = [int(x) for x in workload.node_start]
        self.end = [int(x) for x in workload.node_end]

    def length(self, node: int) -> int:
        """Blocks of one segment."""
        return self.end[node] - self.start[node]

    def path(self, node: int) -> list[int]:
        """Segments from below the root down to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parent[node]
        return path[::-1]

    def ending_at(self, node: int, blocks: int) -> int | None:
        """The segment on the path to `node` that ends at `blocks`; None without one."""
        for segment in self.path(node):
            if self.end[segment] == blocks:
                return segment
        return None


@dataclasses.dataclass
class Anchor:
    """The one copy of a sliding-window state: live while now < expiry."""

    expiry: int
    host: int


class Cache:
    """How many leading blocks of every segment are present, who was used last, who is pinned."""

    def __init__(self, trie: Trie, capacity: int, ttl: int) -> None:
        self.trie = trie
        self.capacity = capacity
        self.ttl = ttl
        self.present = [0] * len(trie.parent)
        self.pins = [0] * len(trie.parent)
        self.least_recent_first: list[int] = []
        self.anchors: dict[int, Anchor] = {}
        self.uses: dict[int, tuple[int, int, int]] = {}  # last use, expiry, lowest class
        self.published = 0
        self.evicted = 0
        self.anchors_written = 0

    def used(self) -> int:
        """Blocks present."""
        return sum(self.present)

    def match(self, node: int) -> tuple[int, int]:
        """(leading present blocks on the path to `node`, the deepest segment they reach)."""
        blocks, deepest = 0, ROOT
        for segment in self.trie.path(node):
            if self.present[segment] > 0:
                deepest = segment
            blocks += self.present[segment]
            if self.present[segment] < self.trie.length(segment):
                break
        return blocks, deepest

    def touch(self, node: int) -> None:
        """Move the path to the most recent end, deepest first."""
        for segment in reversed(self.trie.path(node)):
            if segment in self.least_recent_first:
                self.least_recent_first.remove(segment)
            self.least_recent_first.append(segment)

    def pin(self, node: int) -> None:
        """Hold a segment and its ancestors."""
        for segment in self.trie.path(node):
            self.pins[segment] += 1

    def unpin(self, node: int) -> None:
        """Undo one `pin`."""
        for segment in self.trie.path(node):
            self.pins[segment] -= 1

    def publish(self, node: int) -> None:
        """Make the path fully present, touch it, then trim the least recent segments."""
        for segment in self.trie.path(node):
            self.published += self.trie.length(segment) - self.present[segment]
            self.present[segment] = self.trie.length(segment)
        self.touch(node)
        while self.used() > self.capacity:
            victims = [
                s for s in self.least_recent_first if self.present[s] > 0 and self.pins[s] == 0
            ]
            if not victims:
                return
            lost = min(self.present[victims[0]], self.used() - self.capacity)
            self.present[victims[0]] -= lost
            self.evicted += lost

    def _expiry(self, now: int) -> int:
        return FOREVER if self.ttl == FOREVER else now + self.ttl

    def write_anchor(self, segment: int, host: int, now: int) -> None:
        """Replace the former copy."""
        self.anchors[segment] = Anchor(self._expiry(now), host)
        self.anchors_written += 1

    def live_anchor(self, node: int, blocks: int, now: int) -> Anchor | None:
        """The live anchor exactly at `blocks` on the path to `node`, its segment fully present."""
        segment = self.trie.ending_at(node, blocks)
        if segment is None or segment not in self.anchors:
            return None
        if self.present[segment] < self.trie.length(segment):
            return None
        anchor = self.anchors[segment]
        return anchor if now < anchor.expiry else None

    def renew(self, anchor: Anchor, now: int) -> None:
        """Using an anchor starts its time to live again."""
        anchor.expiry = self._expiry(now)
