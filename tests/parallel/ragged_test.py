"""The ragged exchange under an emulation of its collective, and lowered and compiled as it is."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.parallel.exchange import exchange
from deepinfer_jax.parallel.mesh import ENGINE, EXPERTS, make_mesh
from deepinfer_jax.parallel.ragged import fair_room, ragged_exchange
from pallas_kernels import aot

WIDTH, LOCAL, RANKS, COUNT = 4, 3, 4, 7


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):  # type: ignore[no-untyped-def]
    """`jax.lax.ragged_all_to_all` by its documentation, with everything sent to everybody.

    Sizes that do not agree on both ends poison the result.
    """
    me = jax.lax.axis_index(axis_name)
    operands, starts, sizes, ends = (
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    for sender in range(operands.shape[0]):
        size, start, end = sizes[sender, me], starts[sender, me], ends[sender, me]
        at = jnp.arange(output.shape[0])
        inside = (at >= end) & (at < end + size)
        taken = operands[sender][jnp.clip(at - end + start, 0, operand.shape[0] - 1)]
        shown = inside.reshape(-1, *[1] * (output.ndim - 1))
        output = jnp.where(shown, taken, output)
        fine = (size == recv_sizes[sender]) & (end + size <= output.shape[0])
        fine &= (start >= 0) & (end >= 0) & (start + size <= operand.shape[0])
        output = jnp.where(fine, output, jnp.array(-7777).astype(output.dtype))
    return output


@functools.cache
def program(room: int):  # type: ignore[no-untyped-def]
    """Rows [RANKS * COUNT, W]; expert s multiplies by s + 1 and adds the weight."""
    mesh = make_mesh(1, RANKS)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(ENGINE), out_specs=P(ENGINE), check_vma=False
    )
    def run(rows, slots, weight):  # type: ignore[no-untyped-def]
        first = jax.lax.axis_index(ENGINE) * LOCAL

        def compute(x, slot, scale):  # type: ignore[no-untyped-def]
            made = x * (first + slot + 1)[:, None].astype(jnp.float32) + scale[:, None]
            return jnp.where((slot < LOCAL)[:, None], made, jnp.nan)  # nobody's must not return

        return ragged_exchange(
            rows,
            slots,
            weight,
            compute,
            axes=(ENGINE,),
            local_slots=LOCAL,
            room=room,
            collective=emulated,
        )

    return run


def check(slots: np.ndarray, room: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(-99, 99, (RANKS * COUNT, WIDTH)).astype(np.float32)
    weight = rng.integers(-99, 99, RANKS * COUNT).astype(np.float32)
    found = np.asarray(program(room)(rows, slots, weight))
    want = rows * (slots + 1)[:, None].astype(np.float32) + weight[:, None]
    want = np.where((slots < RANKS * LOCAL)[:, None], want, np.float32(0))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("room", [0, 1, 5, 1000])
@pytest.mark.parametrize("routing", ["one", "nobody", "last rank only"])
def test_every_row_meets_its_expert(room: int, routing: str) -> None:
    rng = np.random.default_rng(1)
    slots = {
        "one": np.full(RANKS * COUNT, 5),
        "nobody": np.full(RANKS * COUNT, RANKS * LOCAL),
        "last rank only": rng.integers((RANKS - 1) * LOCAL, RANKS * LOCAL, RANKS * COUNT),
    }[routing]
    check(slots.astype(np.int32), room)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, RANKS * LOCAL), min_size=RANKS * COUNT, max_size=RANKS * COUNT),
    st.sampled_from([1, 5]),
)
def test_any_routing(slots: list[int], room: int) -> None:
    check(np.array(slots, np.int32), room)


def test_the_emulation_does_as_documented() -> None:
    """The example of jax's own documentation: two devices, offsets and sizes as given there."""
    mesh = make_mesh(1, 2)
    run = jax.shard_map(
        functools.partial(emulated, axis_name=ENGINE),
        mesh=mesh,
        in_specs=P(ENGINE),
        out_specs=P(ENGINE),
        check_vma=False,
    )
    operand = jnp.array([1, 2, 2, 3, 4, 0])
    output = jnp.zeros(8, jnp.int32)
    found = run(
        operand,
        output,
        jnp.array([0, 1, 0, 1]),
        jnp.array([1, 2, 1, 1]),
        jnp.array([0, 0, 1, 2]),
        jnp.array([1, 1, 2, 1]),
    )
    assert found.tolist() == [1, 3, 0, 0, 2, 2, 4, 0]


def test_room_is_the_fair_share_and_half_more() -> None:
    assert fair_room(384, 8) == 576 and fair_room(1, 1) == 1 and fair_room(4, 1) == 4


def switched(mesh: Mesh):  # type: ignore[no-untyped-def]
    """`exchange` with the switch on, and the shapes of 64 bfloat16 rows of 256 on each device."""

    def run(rows, slots, weight):  # type: ignore[no-untyped-def]
        def compute(x, slot, scale):  # type: ignore[no-untyped-def]
            return x.astype(jnp.float32) * (slot + 1)[:, None] + scale[:, None]

        return exchange(rows, slots, weight, compute, axes=EXPERTS, local_slots=LOCAL, ragged=True)

    part, count = P(EXPERTS), 64 * mesh.size
    program = jax.shard_map(run, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
    kinds = (((count, 256), jnp.bfloat16), ((count,), jnp.int32), ((count,), jnp.float32))
    place = NamedSharding(mesh, part)
    return jax.jit(program), [jax.ShapeDtypeStruct(*kind, sharding=place) for kind in kinds]


@pytest.mark.parametrize(("platform", "ragged"), [("tpu", True), ("cuda", True), ("cpu", False)])
def test_the_platform_decides(platform: str, ragged: bool) -> None:
    program, shapes = switched(make_mesh(1, 4))
    custom = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    made = jax.export.export(program, platforms=[platform], disabled_checks=[custom])(*shapes)
    text = made.mlir_module()
    assert ("ragged_all_to_all" in text) == ragged
    assert ("stablehlo.all_to_all" in text) != ragged


def test_on_cpus_the_switch_changes_nothing() -> None:
    program, (rows, *_) = switched(make_mesh(1, 4))
    rng, count = np.random.default_rng(2), rows.shape[0]
    given_rows = rng.integers(-9, 9, rows.shape).astype(rows.dtype)
    slots = rng.integers(0, 4 * LOCAL, count).astype(np.int32)
    found = np.asarray(program(given_rows, slots, np.ones(count, np.float32)))
    want = given_rows.astype(np.float32) * (slots % LOCAL + 1)[:, None] + 1
    np.testing.assert_array_equal(found, want)


@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("topology", aot.TPUS.values())
def test_tpu_compilers_have_the_collective(topology: str) -> None:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = list(described.devices)
    program, shapes = switched(make_mesh(1, len(devices), devices=devices))
    text = program.lower(*shapes).compile().as_text()
    assert "ragged-all-to-all" in text
