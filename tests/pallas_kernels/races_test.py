"""The race detector finds a planted race, so that its silence elsewhere means something."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choice
from tests.pallas_kernels.races import no_races


def copied(x: jax.Array, waits: bool) -> jax.Array:
    def kernel(x_hbm, o_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_hbm, buffer, semaphore)
        copy.start()
        if waits:
            copy.wait()
        o_ref[...] = buffer[...]
        if not waits:
            copy.wait()

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=choice.interpretation("simulate"),
    )(x)


def test_a_copy_that_is_waited_for_is_clean():
    x = jnp.ones((8, 128))
    with no_races():
        assert (copied(x, waits=True) == x).all()


def test_a_copy_read_before_its_end_is_found():
    with pytest.raises(AssertionError, match="race"), no_races():
        jax.block_until_ready(copied(jnp.ones((8, 128)), waits=False))
