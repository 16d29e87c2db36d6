"""Who owns which block of global memory and which state slot: host bookkeeping, plain ints.

Id 0 is reserved: padding rows and unfilled table entries point there. Free ids wait in a queue that
starts ascending; a taken id leaves at its front, a freed one joins at its back. What was freed
first is thus written again last. Source: the released DeepInfer 0.1.0 keeps the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deepinfer_jax.rules import require


class BlockPool:
    """Ids 1 .. size - 1, each held by any number of owners; free again when the last lets go."""

    def __init__(self, size: int, kind: str = "block") -> None:
        """A pool of `size` ids, the reserved one included; `kind` names them in errors.

        Raises:
          ValueError: no id beside the reserved one.
        """
        require(
            size > 1, f"a pool of {size} {kind}s has none beside the reserved id 0; give 2 or more"
        )
        self.size = size
        self.kind = kind
        self._references = [0] * size
        self._free = deque(range(1, size))

    @property
    def free_count(self) -> int:
        """Ids that may be allocated now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Ids with at least one owner; the reserved one does not count."""
        return self.size - 1 - len(self._free)

    def references(self, number: int) -> int:
        """Owners of an id; 0 for a free one."""
        self._check_known(number)
        return self._references[number]

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` ids with one owner each, or None, with nothing taken, while too few are free.

        Raises:
          ValueError: a negative count, or more than the pool will ever have.
        """
        require(
            0 <= count < self.size,
            f"{count} {self.kind}s asked of a pool with {self.size - 1}; it can never serve that, "
            "so refuse the request or enlarge the pool",
        )
        if count > len(self._free):
            return None
        taken = tuple(self._free.popleft() for _ in range(count))
        for number in taken:
            self._references[number] = 1
        return taken

    def pin(self, numbers: Iterable[int]) -> None:
        """One more owner for each id, all of which must be in use."""
        numbers = tuple(numbers)
        for number in numbers:
            self._check_used(number, "pinned")
        for number in numbers:
            self._references[number] += 1

    def free(self, numbers: Iterable[int]) -> None:
        """One owner less for each id, the last of the table first.

        Raises:
          ValueError: an unknown id, or one that nobody owns (a double free).
        """
        for number in reversed(tuple(numbers)):
            self._check_used(number, "freed")
            self._references[number] -= 1
            if self._references[number] == 0:
                self._free.append(number)

    def check_integrity(self) -> None:
        """Every id but 0 is either owned or in the free queue once; AssertionError otherwise."""
        free = set(self._free)
        assert len(free) == len(self._free), f"a {self.kind} is in the free queue twice"
        assert 0 not in free and self._references[0] == 0, f"{self.kind} 0 is reserved"
        for number in range(1, self.size):
            owners = self._references[number]
            assert owners >= 0, f"{self.kind} {number} has {owners} owners"
            assert (owners == 0) == (number in free), (
                f"{self.kind} {number} has {owners} owners and is "
                f"{'free' if number in free else 'not free'}"
            )

    def _check_known(self, number: int) -> None:
        require(
            0 < number < self.size,
            f"{self.kind} {number} is not of this pool; its ids are 1 .. {self.size - 1}",
        )

    def _check_used(self, number: int, verb: str) -> None:
        self._check_known(number)
        require(
            self._references[number] > 0,
            f"{self.kind} {number} is {verb} but nobody owns it; look for a second release",
        )


class SlotPool:
    """Ids handed out one by one, with one owner each: state slots, or places for proposals."""

    def __init__(self, size: int, kind: str = "slot") -> None:
        """See `BlockPool`."""
        self._pool = BlockPool(size, kind)

    @property
    def size(self) -> int:
        """Slots, the reserved one included."""
        return self._pool.size

    @property
    def free_count(self) -> int:
        """Slots that may be allocated now."""
        return self._pool.free_count

    @property
    def used_count(self) -> int:
        """Slots with an owner."""
        return self._pool.used_count

    def allocate(self) -> int | None:
        """A slot, or None while all are in use."""
        taken = self._pool.allocate(1)
        return taken[0] if taken else None

    def free(self, number: int) -> None:
        """Give a slot back; ValueError if it is unknown or nobody's."""
        self._pool.free((number,))

    def check_integrity(self) -> None:
        """Every slot is owned once or free once; AssertionError otherwise."""
        self._pool.check_integrity()
        owned = [n for n in range(1, self.size) if self._pool.references(n) > 1]
        assert not owned, f"{self._pool.kind}s {owned} have several owners"
