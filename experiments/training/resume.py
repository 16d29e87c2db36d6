"""Training states on disk: the last one of each phase, from which a killed run goes on.

A state is written beside the one before and then takes its name, so that a kill at any moment
leaves one of the two. Batches are drawn from (seed, phase, step), so a run that went on ends with
the very weights of one that was never interrupted.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]


class States:
    """States of one phase under `directory`; without one nothing is kept."""

    def __init__(self, directory: pathlib.Path | None, every: int) -> None:
        self.every = every
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self._manager = (
            ocp.CheckpointManager(directory.resolve(), options=options) if directory else None
        )

    def latest(self, state: Any) -> tuple[int, Any]:
        """(steps done, state): the last one on disk, or (0, `state`), whose form it has."""
        done = self._manager.latest_step() if self._manager else None
        if self._manager is None or done is None:
            return 0, state
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return done, self._manager.restore(done, args=ocp.args.StandardRestore(like))

    def keep(self, done: int, state: Any, last: bool) -> None:
        """Write the state after `done` steps if its turn has come, or it is the last."""
        if self._manager and (last or done % self.every == 0):
            self._manager.save(done, args=ocp.args.StandardSave(state), force=True)
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Release the directory."""
        if self._manager:
            self._manager.close()
