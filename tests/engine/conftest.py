"""One warm device for all tests of this room that need one: programs compile once per process."""

from __future__ import annotations

import pytest

from deepinfer_jax.engine.device import Device
from tests.engine import small_engine


@pytest.fixture(scope="session")
def device() -> Device:
    """The micro model, three drafts, one bucket of each kind."""
    model = small_engine.micro()
    made = Device(
        small_engine.parameters(model),
        model,
        small_engine.config(),
        buckets=small_engine.BUCKETS,
    )
    made.warm_up()
    return made
