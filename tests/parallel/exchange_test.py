"""Rows to their experts and back on virtual devices, against a loop in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepinfer_jax.parallel.exchange import exchange, fair_capacity, look_up
from deepinfer_jax.parallel.mesh import AXES, ENGINE, make_mesh

WIDTH, LOCAL = 4, 3


def send(rows, slots, weight, ranks: int, capacity: int):  # type: ignore[no-untyped-def]
    """Rows [ranks * N, W]; expert s multiplies by s + 1 and adds the weight."""
    mesh = make_mesh(1, ranks)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(ENGINE),
        out_specs=P(ENGINE),
        check_vma=False,
    )
    def run(rows, slots, weight):  # type: ignore[no-untyped-def]
        first = jax.lax.axis_index(ENGINE) * LOCAL

        def compute(x, slot, scale):  # type: ignore[no-untyped-def]
            return x * (first + slot + 1)[:, None].astype(jnp.float32) + scale[:, None]

        return exchange(
            rows, slots, weight, compute, axes=(ENGINE,), local_slots=LOCAL, capacity=capacity
        )

    return np.asarray(run(rows, slots, weight))


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
@pytest.mark.parametrize("routing", ["random", "one", "nobody", "last rank only"])
def test_every_row_meets_its_expert(capacity: int, routing: str) -> None:
    """Any capacity gives the same bits: it takes more rounds, and drops nothing."""
    ranks, count = 4, 7
    rng = np.random.default_rng(0)
    rows = rng.integers(-99, 99, (ranks * count, WIDTH)).astype(np.float32)
    weight = rng.integers(-99, 99, ranks * count).astype(np.float32)
    slots = {
        "random": rng.integers(0, ranks * LOCAL + 1, ranks * count),
        "one": np.full(ranks * count, 5),
        "nobody": np.full(ranks * count, ranks * LOCAL),
        "last rank only": rng.integers((ranks - 1) * LOCAL, ranks * LOCAL, ranks * count),
    }[routing].astype(np.int32)
    found = send(rows, slots, weight, ranks, capacity)
    want = rows * (slots + 1)[:, None].astype(np.float32) + weight[:, None]
    want = np.where((slots < ranks * LOCAL)[:, None], want, np.float32(0))
    np.testing.assert_array_equal(found, want)


def test_capacity_is_the_fair_share_and_half_more() -> None:
    assert fair_capacity(384, 8) == 72 and fair_capacity(1, 8) == 1 and fair_capacity(3, 1) == 3


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (8, 1)])
def test_a_divided_table_reads_as_a_whole_one(shape: tuple[int, int]) -> None:
    mesh, count = make_mesh(*shape), shape[0] * shape[1]
    rng = np.random.default_rng(1)
    table = rng.normal(size=(count * 5, WIDTH)).astype(np.float32)
    rows = rng.integers(-1, count * 5, (count, 3, 2)).astype(np.int32)
    run = jax.shard_map(
        functools.partial(look_up, axes=AXES),
        mesh=mesh,
        in_specs=(P(AXES), P(AXES)),
        out_specs=P(AXES),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(run)(table, rows), table[np.maximum(rows, 0)])


def test_a_mesh_needs_a_device_for_each_rank() -> None:
    with pytest.raises(ValueError, match=r"on \d+ devices; give each of them a device"):
        make_mesh(100, 1)
