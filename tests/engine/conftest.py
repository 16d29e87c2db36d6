"""One warm device for all tests of this room that need one: programs compile once per process."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.engine.device import Device
from tests.engine import small_engine


@pytest.fixture(scope="session")
def device() -> Device:
    """The micro model, three drafts, one bucket of each kind."""
    model = small_engine.micro()
    elsewhere = NamedSharding(jax.make_mesh((1,), ("all",)), PartitionSpec())
    made = Device(
        jax.device_put(small_engine.parameters(model), elsewhere),  # as a checkpoint restores them
        model,
        small_engine.config(),
        buckets=small_engine.BUCKETS,
    )
    made.warm_up()
    return made
