"""State images of a running engine: taken for a prefix cache, loaded when a prompt hits one.

The engine's memory is one tree that each step replaces; an image is taken from the newest, and
loaded before the first step of the prompt is queued. Neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from deepinfer_jax.cache import snapshots
from deepinfer_jax.cache.paged import PagedMemory
from deepinfer_jax.engine.plan import PlanRow


class Images:
    """Two programs, compiled once each for any slot and position."""

    def __init__(self) -> None:
        self._select = jax.jit(snapshots.select, static_argnums=3)
        self._load = jax.jit(snapshots.load, donate_argnums=0)

    def take(self, memory: PagedMemory, slot: int, position: int) -> snapshots.Image:
        """The stored image of a slot as of `position`; `snapshots.check_select` has its rules."""
        return self._select(memory, np.int32(slot), np.int32(position), "stored")

    def restore(self, memory: PagedMemory, rows: Iterable[PlanRow]) -> PagedMemory:
        """The memory, donated, with the image of each hit among a prompt step's rows in its slot."""
        for row in rows:
            if row.first and row.hit is not None and row.hit.image is not None:
                memory = self._load(memory, np.int32(row.slot), row.hit.image)
        return memory
