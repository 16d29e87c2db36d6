"""The segment trie of a trace's prefixes: every block that requests share, a few nodes per request.

Where a trace's prefixes are known in advance, no cache need ever look at single blocks: between two
points where some request branches off or ends, blocks are matched, published, touched and evicted
together, or trimmed from the tail.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer_jax.simulator.traces import Int64, Trace, offsets

Int32 = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class Trie:
    """Maximal segments of blocks. Letters: `N` nodes, `Q` requests.

    Node 0 is the empty prefix, its own parent. A parent's number is smaller than its children's.
    """

    node_parent: Int32  # [N]
    node_start: Int32  # [N] blocks before the segment
    node_end: Int32  # [N] blocks up to its end
    match_node: Int32  # [Q] ends where the longest allowed hit ends, 0 if there can be none
    publish_node: Int32  # [Q] ends with the prompt's last full block
    output_node: (
        Int32  # [Q] ends with the last block of prompt and output that a later turn repeats
    )


class _Atoms(NamedTuple):
    """Stretches of ids that every request traverses whole, cut short, or not at all. Letter `A`.

    Atom `A + q` is the private rest of request `q`, for which the trace has no ids.
    """

    parent: Int64  # [A + Q], -1 below the root
    start: Int64  # [A + Q] blocks
    end: Int64  # [A + Q] blocks


class _Chains(NamedTuple):
    """Merged runs of every request, cut to what its prompt covers. Letter `R`."""

    first: Int64  # [R] id
    depth: Int64  # [R] trace blocks before the run
    length: Int64  # [R]
    request: Int64  # [R]
    blocks: Int64  # [Q] trace blocks in total


def _chains(trace: Trace, covered: Int64) -> _Chains:
    """Runs within the first `covered` [Q] trace blocks; runs that continue each other joined."""
    request = np.repeat(np.arange(len(trace)), np.diff(trace.run_offsets))
    total = offsets(trace.run_count)
    depth = total[:-1] - total[trace.run_offsets[request]]
    count = np.minimum(trace.run_count, covered[request] - depth)
    kept = count > 0
    first, depth, count, request = (a[kept] for a in (trace.run_first, depth, count, request))
    blocks = np.bincount(request, count, len(trace)).astype(np.int64)
    fresh = np.ones(len(first), bool)
    fresh[1:] = (request[1:] != request[:-1]) | (first[1:] != first[:-1] + count[:-1])
    heads = np.flatnonzero(fresh)
    counts = np.add.reduceat(count, heads) if len(heads) else count
    return _Chains(first[heads], depth[heads], counts, request[heads], blocks)


def _check_chained(trace: Trace, chains: _Chains, at: Int64, before: Int64, inside: Int64) -> None:
    """Every id must have one predecessor; `at`, `before` are atoms per run, `inside` per atom."""
    order = np.lexsort((before, at))
    clash = (at[order][1:] == at[order][:-1]) & (before[order][1:] != before[order][:-1])
    wrong = np.concatenate([np.flatnonzero(inside[at] > 0), order[1:][clash]])
    if len(wrong):
        run = int(wrong[0])
        raise ValueError(
            f"{trace.source} row {trace.row[chains.request[run]]} (from 0): block id "
            f"{chains.first[run]} follows different blocks in different requests, but equal ids "
            "must mean equal whole prefixes; number the blocks by their hash chain"
        )


def _shared_atoms(trace: Trace, chains: _Chains) -> tuple[Int64, Int64, Int64, Int64]:
    """(id boundaries, parent, start, end) of the atoms; depths in trace blocks."""
    ids = np.unique(np.concatenate([chains.first, chains.first + chains.length]))
    at = np.searchsorted(ids, chains.first)
    until = np.searchsorted(ids, chains.first + chains.length)
    opened = chains.depth == 0
    before = np.where(opened, -1, np.roll(until, 1) - 1)
    edge = np.zeros(len(ids) + 1, np.int64)
    np.add.at(edge, at + 1, 1)
    np.add.at(edge, until, -1)
    _check_chained(trace, chains, at, before, np.cumsum(edge))
    parent = np.arange(len(ids)) - 1
    parent[at] = before
    shift = np.zeros(len(ids), np.int64)
    shift[at] = chains.depth - chains.first
    is_start = np.zeros(len(ids), bool)
    is_start[at] = True
    source = np.maximum.accumulate(np.where(is_start, np.arange(len(ids)), 0))
    start = ids + shift[source]
    length = np.diff(ids, append=ids[-1:])
    covered = np.cumsum(edge)[: len(ids)] + is_start > 0
    return ids, parent, np.where(covered, start, 0), np.where(covered, start + length, 0)


def _climb(parent: Int64, skip: npt.NDArray[np.bool_]) -> Int64:
    """Every element's nearest ancestor-or-self that `skip` does not hold for; -1 is the root."""
    jump = np.append(np.where(skip, parent, np.arange(len(parent))), -1)
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump[:-1]
        jump = further


def _atoms(
    trace: Trace, chains: _Chains, full: Int64, block_tokens: int
) -> tuple[Int64, _Atoms, Int64]:
    """(id boundaries, atoms in blocks, private depth [Q])."""
    ids, parent, start, end = _shared_atoms(trace, chains)
    known = np.minimum(chains.blocks * trace.block_tokens // block_tokens, full)
    last = np.full(len(trace), -1)
    last[chains.request] = np.searchsorted(ids, chains.first + chains.length) - 1
    atoms = _Atoms(
        np.concatenate([parent, last]),
        np.concatenate([start * trace.block_tokens // block_tokens, known]),
        np.concatenate([end * trace.block_tokens // block_tokens, full]),
    )
    # An atom shorter than a block may hold none: its children hang from its parent instead.
    above = _climb(atoms.parent, atoms.start == atoms.end)
    parents = np.append(above, -1)[atoms.parent]
    return ids, atoms._replace(parent=parents), known


def _locate(
    trace: Trace, ids: Int64, chains: _Chains, known: Int64, which: Int64, cut: Int64, block: int
) -> Int64:
    """The atom of request `which` [K] in which its first `cut` [K] >= 1 blocks end."""
    private = len(ids) + which
    if not len(chains.first):
        return private
    depth = (cut * block - 1) // trace.block_tokens
    stride = int(max(chains.blocks.max(), depth.max(initial=0))) + 1
    run = np.searchsorted(chains.request * stride + chains.depth, which * stride + depth, "right")
    run = np.maximum(run - 1, 0)
    atom = np.searchsorted(ids, chains.first[run] + depth - chains.depth[run], "right") - 1
    return np.where(cut <= known[which], atom, private)


def _pieces(atoms: _Atoms, atom: Int64, cut: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Cut atoms at (atom, cut) [K]: (parent, start, end) of the pieces, and every cut's piece."""
    stride = int(atoms.end.max(initial=0)) + 1
    inner = atoms.parent[(atoms.start < atoms.end) & (atoms.parent >= 0)]
    wanted = atom * stride + cut
    keys = np.unique(
        np.concatenate([wanted, np.unique(inner) * stride + atoms.end[np.unique(inner)]])
    )
    owner, end = keys // stride, keys % stride
    heads = np.ones(len(keys), bool)
    heads[1:] = owner[1:] != owner[:-1]
    above = atoms.parent[owner]
    last_of_above = np.searchsorted(keys, above * stride + atoms.end[above])
    parent = np.where(heads, np.where(above < 0, -1, last_of_above), np.arange(len(keys)) - 1)
    start = np.where(heads, atoms.start[owner], np.roll(end, 1))
    return parent, start, end, np.searchsorted(keys, wanted)


def _join(parent: Int64, start: Int64, end: Int64, ends_here: Int64) -> tuple[Int64, ...]:
    """Join pieces where nothing ends and only one continues; number by depth, the root first.

    Returns (parent, start, end) of the nodes and the node of every `ends_here` piece.
    """
    size = len(parent)
    cut = np.zeros(size, bool)
    cut[ends_here] = True
    children = np.bincount(parent[parent >= 0], minlength=size)
    through = ~cut & (children == 1)
    passed = np.append(through, False)[parent]
    top = _climb(np.where(passed, parent, -1), passed)
    kept = np.flatnonzero(~through)
    kept = kept[np.argsort(start[top[kept]], kind="stable")]
    number = np.zeros(size + 1, np.int64)
    number[kept] = np.arange(1, len(kept) + 1)
    above = number[parent[top[kept]]]
    nodes = tuple(np.concatenate([[0], a]) for a in (above, start[top[kept]], end[kept]))
    return (*nodes, number[ends_here])


def _next_turn(trace: Trace) -> tuple[Int64, Int64]:
    """(requests, the request that follows each in its session)."""
    if trace.session is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    turn = np.arange(len(trace)) if trace.turn is None else trace.turn
    order = np.lexsort((np.arange(len(trace)), turn, trace.session))
    same = trace.session[order][1:] == trace.session[order][:-1]
    return order[:-1][same], order[1:][same]


def build(
    trace: Trace,
    block_tokens: int = 128,
    reserve: int = 134,
    *,
    count_partial_block: bool = False,
    outputs: bool = True,
) -> Trie:
    """The segment trie of `trace`, whose blocks of any length are converted to `block_tokens`.

    A block is known to be shared if the trace's block that contains its last token is. The blocks
    of a prompt for which the trace has no ids are private to the request.

    Args:
      trace: requests in arrival order.
      block_tokens: tokens per block of the cache.
      reserve: tokens at the prompt's end that no hit may cover; a hit ends at or before
        `floor((input - reserve) / block_tokens)` blocks (134 in the chapter, section 11).
      count_partial_block: count a prompt's partial tail as a block, as the published Mooncake hit
        ratios do; otherwise only full blocks exist.
      outputs: find the blocks of outputs that the next turn of the session repeats; without it, or
        without sessions, `output_node` is `publish_node` and the trie has fewer cuts.

    Raises:
      ValueError: for an empty trace, sizes out of range, or ids that are not prefix-chained.
    """
    if not len(trace):
        raise ValueError(f"{trace.source}: the trace is empty; give at least one request")
    if block_tokens < 1 or reserve < 0:
        raise ValueError(
            f"block_tokens={block_tokens}, reserve={reserve}: a block needs a token and a reserve "
            "may not be negative; the defaults are 128 and 134"
        )
    rounding = block_tokens - 1 if count_partial_block else 0
    full = (trace.input_tokens + rounding) // block_tokens
    cap = np.maximum(trace.input_tokens - reserve + rounding, 0) // block_tokens
    per_block = max(trace.block_tokens, 1)
    chains = _chains(trace, -(-full * block_tokens // per_block))
    ids, atoms, known = _atoms(trace, chains, full, block_tokens)
    everyone = np.arange(len(trace))

    def atom_of(which: Int64, cut: Int64) -> Int64:
        return _locate(trace, ids, chains, known, which, cut, block_tokens)

    turn, later = _next_turn(trace) if outputs else (everyone[:0], everyone[:0])
    fits = (full[turn] > 0) & (full[turn] <= full[later])
    turn, later = turn[fits], later[fits]
    # Only a next turn that repeats the whole prompt can repeat its output.
    repeats = atom_of(turn, full[turn]) == atom_of(later, full[turn])
    turn, later = turn[repeats], later[repeats]
    answered = (trace.input_tokens + trace.output_tokens)[turn] // block_tokens
    reach = np.maximum(np.minimum(answered, full[later]), full[turn])

    which = np.concatenate([everyone, everyone, later])
    depth = np.concatenate([cap, full, reach])
    some = np.asarray(depth > 0)
    pieces = _pieces(atoms, atom_of(which[some], depth[some]), depth[some])
    parent, start, end, found = (a.astype(np.int32) for a in _join(*pieces))
    node = np.zeros(len(depth), np.int32)
    node[some] = found
    match, publish, answered_node = np.split(node, [len(trace), 2 * len(trace)])
    output = publish.copy()
    output[turn] = answered_node
    return Trie(parent, start, end, match, publish, output)
