"""Pools of ids: order of reuse, owners, refusals, and a random walk beside a plain model."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer_jax.cache.allocator import BlockPool, SlotPool


def test_ids_are_reused_in_the_order_they_came_back() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3) == (1, 2, 3)
    pool.free((1, 2, 3))  # the last block of a table goes first
    assert pool.allocate(5) == (4, 5, 3, 2, 1)


def test_an_exhausted_pool_gives_none_and_keeps_what_it_has() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == (1, 2)
    assert pool.allocate(2) is None
    assert pool.free_count == 1 and pool.allocate(1) == (3,)
    assert pool.allocate(0) == ()


def test_what_can_never_be_served_is_an_error() -> None:
    with pytest.raises(ValueError, match="4 blocks asked of a pool with 3"):
        BlockPool(4).allocate(4)
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(4).allocate(-1)
    with pytest.raises(ValueError, match="none beside the reserved"):
        BlockPool(1)


def test_a_block_lives_as_long_as_its_last_owner() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.pin(table)
    pool.free(table)
    assert pool.free_count == 1 and [pool.references(i) for i in table] == [1, 1]
    pool.free(table)
    assert pool.free_count == 3


def test_wrong_ids_are_named() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="block 2 is freed but nobody owns it"):
        pool.free((2,))
    with pytest.raises(ValueError, match="block 2 is pinned but nobody owns it"):
        pool.pin((2,))
    for number in (0, -1, 4):
        with pytest.raises(ValueError, match=f"block {number} is not of this pool"):
            pool.free((number,))
    slots = SlotPool(3)
    taken = slots.allocate()
    slots.free(taken)
    with pytest.raises(ValueError, match="slot 1 is freed"):
        slots.free(taken)


def test_slots_run_out_and_come_back() -> None:
    slots = SlotPool(3)
    assert [slots.allocate() for _ in range(3)] == [1, 2, None]
    slots.free(1)
    assert slots.allocate() == 1 and slots.used_count == 2


@pytest.mark.parametrize("damage", ["lost", "twice", "owned", "reserved"])
def test_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    if damage == "lost":
        pool._free.pop()
    elif damage == "twice":
        pool._free.append(2)
    elif damage == "owned":
        pool._free.append(1)
    else:
        pool._free.append(0)
    with pytest.raises(AssertionError):
        pool.check_integrity()


class Walk(RuleBasedStateMachine):
    """Tables taken, pinned and freed at random, counted by a Counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        used = {i for table in self.held for i in table}
        taken = self.pool.allocate(count)
        if count > 11 - len(used):
            assert taken is None
        else:
            assert len(set(taken)) == count and not used & set(taken) and 0 not in taken
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.held))
        self.pool.pin(table)
        self.held.append(table)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(self.held.pop(index))

    @invariant()
    def counts(self) -> None:
        self.pool.check_integrity()
        owners = Counter(i for table in self.held for i in table)
        assert [self.pool.references(i) for i in range(1, 12)] == [owners[i] for i in range(1, 12)]


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
