"""The race detector of the TPU interpreter, as a context."""

from __future__ import annotations

import contextlib

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def no_races():
    """Fail if a kernel that ran inside, under "simulate", raced; jax 0.10 only notes it."""
    try:
        yield
        assert not simulator.races.races_found, "the kernel's memory accesses race"
    finally:
        pltpu.reset_tpu_interpret_mode_state()
