"""Section 1: time, the clock of an engine, and the agenda of everything pending."""

from __future__ import annotations

import heapq
from typing import Any

FEMTOSECONDS_PER_TICK = 10**6
SUBS_PER_FEMTOSECOND = 256
SUBS_PER_TICK = SUBS_PER_FEMTOSECOND * FEMTOSECONDS_PER_TICK

STEP_END, TRANSFER_END, DYNAMICS, ROUND, MATCH_END, ROUTE, FORMATION = range(7)
START, GRACE_END, INCIDENT, DEPARTURE = range(4)
SCALING_ROUND, TIER_ROUND, SWEEP = range(3)
FETCH, HAND_OFF, WRITE_BACK = range(3)


def ceil_ticks(femtoseconds: int) -> int:
    """Ticks that cover `femtoseconds`, rounded up."""
    return -(-femtoseconds // FEMTOSECONDS_PER_TICK)


def ceil_divide(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class Clock:
    """A tick and the subs beyond it."""

    def __init__(self) -> None:
        self.tick = 0
        self.remainder = 0

    def restart(self, now: int) -> None:
        """A step that starts when the engine was idle starts at (now, 0)."""
        self.tick, self.remainder = now, 0

    def advance(self, subs: int) -> None:
        """Add a duration; the remainder is kept."""
        ticks, self.remainder = divmod(self.remainder + subs, SUBS_PER_TICK)
        self.tick += ticks


class Agenda:
    """Pending events in the order (time, phase, index, insertion)."""

    def __init__(self) -> None:
        self.heap: list[tuple[Any, ...]] = []
        self.inserted = 0

    def add(self, time: int, phase: int, index: tuple[int, ...], what: Any = None) -> None:
        """`index` orders events of one phase: (engine,), (request,) or (request, kind)."""
        heapq.heappush(self.heap, (time, phase, index, self.inserted, what))
        self.inserted += 1

    def pop(self) -> tuple[int, int, tuple[int, ...], Any]:
        """The first event as (time, phase, index, what)."""
        time, phase, index, _, what = heapq.heappop(self.heap)
        return time, phase, index, what

    def remove(self, unwanted: Any) -> None:
        """Forget the entries for which `unwanted(phase, index, what)` holds."""
        self.heap = [e for e in self.heap if not unwanted(e[1], e[2], e[4])]
        heapq.heapify(self.heap)
