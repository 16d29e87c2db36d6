"""Which expert's weights move where when a placement changes, and the move itself.

A slot whose expert does not change is left alone. A slot whose new expert its rank holds already is
filled from there. Otherwise each expert is sent to each rank that lacks it once, its holders sharing
the work, and further copies on that rank are made there. Sources: the released DeepInfer 0.1.0.

R ranks, L slots of a rank; slot s lies on rank s // L.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # of either library, or its sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """One layer's moves in rounds, in each of which a rank sends each other one at most one slot.

    Arrays differ in no size between layers or rebalances, so that one program serves all.
    """

    local: Array  # int32 [R * L] local slot that a slot is filled from, its own if it stays
    outgoing: Array  # int32 [rounds, R, R] local slot that rank i sends rank j; L: nothing
    incoming: Array  # int32 [R * L] round * R + sender that a slot is filled from; none: rounds * R


def transfers(old: Sequence[int], new: Sequence[int], ranks: int) -> list[tuple[int, int, int]]:
    """(expert, sender, receiver), by expert and receiver, ascending.

    Senders are the ranks that hold the expert, receivers those that will and do not. Of n receivers
    for m senders the first m * (n // m) are served in equal runs, the rest in turn.

    Args:
      old, new: expert of each slot [R * L].
    """
    size = len(old) // ranks
    before, after = (
        [set(held[r * size : (r + 1) * size]) for r in range(ranks)] for held in (old, new)
    )
    found = []
    for expert in sorted(set(new)):
        senders = [r for r in range(ranks) if expert in before[r]]
        receivers = [r for r in range(ranks) if expert in after[r] and expert not in before[r]]
        each = len(receivers) // len(senders)
        for j, receiver in enumerate(receivers):
            even = j < each * len(senders)
            at = j // each if even else (j - each * len(senders)) % len(senders)
            found.append((expert, senders[at], receiver))
    return found


def plan(old: Sequence[int], new: Sequence[int], ranks: int) -> Moves:
    """The moves from slots that hold experts `old` to slots that hold `new`, both [R * L].

    Raises:
      ValueError: an expert that no slot holds.
    """
    size = len(old) // ranks
    missing = sorted(set(new) - set(old))
    if missing:
        raise ValueError(f"no slot holds experts {missing}; every expert keeps at least one copy")
    rounds = size  # a rank receives at most L experts, whoever sends them
    local = np.arange(len(new), dtype=np.int32) % size
    outgoing = np.full((rounds, ranks, ranks), size, np.int32)
    incoming = np.full(len(new), rounds * ranks, np.int32)
    used = np.zeros((ranks, ranks), np.int32)
    for slot, expert in enumerate(new):
        held = list(old[slot // size * size : (slot // size + 1) * size])
        if held[slot % size] != expert and expert in held:
            local[slot] = held.index(expert)
    for expert, sender, receiver in transfers(old, new, ranks):
        number = used[sender, receiver]
        used[sender, receiver] += 1
        held = list(old[sender * size : (sender + 1) * size])
        outgoing[number, sender, receiver] = held.index(expert)
        for slot in range(receiver * size, (receiver + 1) * size):
            if new[slot] == expert:
                incoming[slot] = number * ranks + sender
    return Moves(local, outgoing, incoming)


def move(weights: jax.Array, moves: Moves, axes: tuple[str, ...]) -> jax.Array:
    """This rank's slots [L, ...] with their new experts, under `jax.shard_map`.

    Args:
      weights: [L, ...]; donate it.
      moves: `local` and `incoming` this rank's part [L], `outgoing` whole.
      axes: mesh axes of the ranks.
    """
    ranks, me, size = jax.lax.axis_size(axes), jax.lax.axis_index(axes), weights.shape[0]
    outgoing = jnp.asarray(moves.outgoing)
    rounds = jnp.sum(jnp.any(outgoing < size, axis=(1, 2)))

    def carry(i: jax.Array, made: jax.Array) -> jax.Array:
        sent = weights[jnp.minimum(outgoing[i, me], size - 1)]  # [R, ...]
        got = jax.lax.all_to_all(sent, axes, 0, 0, tiled=True)
        sender = moves.incoming - i * ranks
        here = (sender >= 0) & (sender < ranks)
        mask = here.reshape(-1, *[1] * (weights.ndim - 1))
        return jnp.where(mask, got[jnp.clip(sender, 0, ranks - 1)], made)

    return jax.lax.fori_loop(0, rounds, carry, weights[moves.local])
