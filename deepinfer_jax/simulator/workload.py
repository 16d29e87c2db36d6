"""`Workload`: a trace and its prefix trie as the arrays that the jitted simulator reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from deepinfer_jax.simulator.prefixes import Trie, build
from deepinfer_jax.simulator.sessions import Dependencies, of_trace
from deepinfer_jax.simulator.traces import LARGEST_LENGTH, Trace, in_arrival_order

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order (arrival, index of the source), and the segments of their prefixes.

    Letters: `Q` requests, `N` trie nodes; node 0 is the empty prefix and its own parent, and a
    parent's number is smaller than its children's. Numpy arrays until the simulator moves them.
    """

    arrival: Array  # [Q] int64 ticks; of a request that follows another, only its number counts
    input_tokens: Array  # [Q] int32, image tokens included
    output_tokens: Array  # [Q] int32
    image_tokens: Array  # [Q] int32, all images of the request
    match_node: Array  # [Q] int32, ends where the longest allowed hit ends
    publish_node: Array  # [Q] int32, ends with the prompt's last full block
    output_node: Array  # [Q] int32, ends with the last block that a later turn repeats
    node_parent: Array  # [N] int32
    node_start: Array  # [N] int32 blocks
    node_end: Array  # [N] int32 blocks
    after: Dependencies | None = None  # requests that wait for another's end, if any
    traffic: Array | None = None  # [Q] int32 traffic class (retention); None: all in class 0

    @property
    def requests(self) -> int:
        return len(self.arrival)

    @property
    def nodes(self) -> int:
        return len(self.node_parent)


def with_nodes(load: Workload, nodes: int) -> Workload:
    """`load` with empty trie nodes at the end, `nodes` in all, so that loads may share a program."""
    more = (0, nodes - load.nodes)
    return dataclasses.replace(
        load,
        node_parent=np.pad(load.node_parent, more),
        node_start=np.pad(load.node_start, more),
        node_end=np.pad(load.node_end, more),
    )


def _nothing_shared(requests: int) -> Trie:
    root, nowhere = np.zeros(1, np.int32), np.zeros(requests, np.int32)
    return Trie(root, root, root, nowhere, nowhere, nowhere)


def workload(
    trace: Trace,
    block_tokens: int = 128,
    reserve: int = 134,
    share_prefixes: bool = True,
    *,
    private_blocks: bool | None = None,
    outputs: bool = True,
    closed_loop: bool = False,
) -> Workload:
    """The simulator's input.

    Args:
      trace: requests; sorted here if they are not.
      block_tokens: tokens per cache block.
      reserve: tokens at the prompt's end that no hit may cover.
      share_prefixes: False leaves the root as the only node: nothing is matched or published.
      private_blocks: whether prompts of a trace without any block ids get nodes of their own, which
        nobody can hit but which fill caches. None: only where the trace has ids.
      outputs: see `prefixes.build`.
      closed_loop: a session's requests wait for its earlier answers (`sessions.of_trace`); their
        recorded arrivals only number them.

    Raises:
      ValueError: for an empty trace or for lengths out of the int32 range.
    """
    if not len(trace):
        raise ValueError(
            f"{trace.source}: the trace has 0 requests, but a workload needs at least one; widen "
            "the window or check the file"
        )
    for name in ("input_tokens", "output_tokens"):
        lengths = getattr(trace, name)
        wrong = np.flatnonzero((lengths < 1) | (lengths > LARGEST_LENGTH))
        if len(wrong):
            raise ValueError(
                f"{trace.source} row {trace.row[wrong[0]]} (from 0): {name} = {lengths[wrong[0]]}, "
                f"but it must be from 1 to {LARGEST_LENGTH}; drop the request or set its length"
            )
    ordered = in_arrival_order(trace)
    if ordered.arrival[0] < 0:
        raise ValueError(
            f"{trace.source}: arrival = {ordered.arrival[0]} ticks, but time starts at 0; shift it"
        )
    private = bool(trace.block_tokens) if private_blocks is None else private_blocks
    shared = share_prefixes and (bool(trace.block_tokens) or private)
    trie = (
        build(ordered, block_tokens, reserve, outputs=outputs)
        if shared
        else _nothing_shared(len(ordered))
    )
    return Workload(
        arrival=ordered.arrival,
        input_tokens=ordered.input_tokens.astype(np.int32),
        output_tokens=ordered.output_tokens.astype(np.int32),
        image_tokens=ordered.image_tokens_per_request.astype(np.int32),
        match_node=trie.match_node,
        publish_node=trie.publish_node,
        output_node=trie.output_node,
        node_parent=trie.node_parent,
        node_start=trie.node_start,
        node_end=trie.node_end,
        after=of_trace(ordered) if closed_loop else None,
        traffic=None if ordered.traffic is None else ordered.traffic.astype(np.int32),
    )
