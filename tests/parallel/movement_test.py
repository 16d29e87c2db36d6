"""Moves of experts' weights: the released rules by hand, and any placement to any other."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from deepinfer_jax.parallel.mesh import ENGINE, make_mesh
from deepinfer_jax.parallel.movement import Moves, move, plan, transfers

RANKS, SIZE, EXPERTS = 4, 3, 8


def test_senders_share_the_work_as_released() -> None:
    """Expert 0 on ranks 0 and 1 goes to ranks 2 .. 6: two each in equal runs, the fifth in turn."""
    old = [0, 1, 0, 2, 3, 1, 4, 2, 5, 3, 6, 4, 7, 5]  # seven ranks of two slots
    new = [0, 1, 0, 2, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0]
    assert transfers(old, new, 7) == [(0, 0, 2), (0, 0, 3), (0, 1, 4), (0, 1, 5), (0, 0, 6)]


def test_an_expert_travels_to_a_rank_once() -> None:
    """Both slots of rank 1 take expert 0; rank 0 keeps it and copies it to its other slot."""
    moves = plan([0, 1, 2, 3, 1, 2, 3, 1], [0, 0, 0, 0, 1, 2, 3, 1], 4)
    assert transfers([0, 1, 2, 3, 1, 2, 3, 1], [0, 0, 0, 0, 1, 2, 3, 1], 4) == [(0, 0, 1)]
    assert moves.local.tolist() == [0, 0, 0, 1, 0, 1, 0, 1]
    assert (moves.outgoing < 2).sum() == 1 and moves.outgoing[0, 0, 1] == 0
    assert moves.incoming.tolist() == [8, 8, 0, 0, 8, 8, 8, 8]


def test_an_expert_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no slot holds experts \[9\]"):
        plan([0, 1], [0, 9], 2)


@functools.cache
def mover():  # type: ignore[no-untyped-def]
    parts = Moves(local=P(ENGINE), outgoing=P(), incoming=P(ENGINE))
    step = jax.shard_map(
        functools.partial(move, axes=(ENGINE,)),
        mesh=make_mesh(1, RANKS),
        in_specs=(P(ENGINE), parts),
        out_specs=P(ENGINE),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=0)


@st.composite
def placements(draw):  # type: ignore[no-untyped-def]
    extra = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=4, max_size=4))
    return draw(st.permutations([*range(EXPERTS), *extra]))


@settings(deadline=None, max_examples=40)
@given(placements(), placements())
def test_slots_hold_their_experts_after_any_move(old: list[int], new: list[int]) -> None:
    """Weights name their expert; one program for all moves."""
    weights = np.stack([np.full((2, 3), expert, np.float32) for expert in old])
    found = mover()(weights, plan(old, new, RANKS))
    np.testing.assert_array_equal(found[:, 0, 0], np.array(new, np.float32))
    assert mover()._cache_size() == 1
    for expert, sender, receiver in transfers(old, new, RANKS):
        assert expert in old[sender * SIZE : (sender + 1) * SIZE]
        assert expert not in old[receiver * SIZE : (receiver + 1) * SIZE]
