"""The model on meshes of virtual devices against one device: prompt, decode, drafts, any routing."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.cache.dense import DenseMemory, create_dense
from deepinfer_jax.model import backbone, draft
from deepinfer_jax.model.placing import on_mesh, partition_specs
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.parallel.mesh import ALONE, RANKS, SPREAD, Parallel, make_mesh, ranks
from tests.engine.small_engine import micro, parameters

MODEL = dataclasses.replace(micro(), num_experts=8)
SEQUENCES, LENGTH = 8, 12


@functools.cache
def weights() -> dict[str, Any]:
    return parameters(MODEL)


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(3, 300, (SEQUENCES, LENGTH + 1)).astype(np.int32)


def run(params: Any, ids: jax.Array, parallel: Parallel) -> tuple[jax.Array, ...]:
    """A prompt of all but the last token, a decode step of it, drafts: [S, ...] of each."""
    count = ids.shape[0]
    none = jnp.zeros(count, jnp.int32)
    memory: DenseMemory = create_dense(MODEL, count, 16, dtype=jnp.float32)
    rows = text_rows(MODEL, ids[:, :LENGTH], none, none + LENGTH)
    first, memory = backbone.forward(params, MODEL, rows, memory, parallel=parallel)
    reach = MODEL.engram.max_ngram - 1  # type: ignore[union-attr]
    back = ids[:, LENGTH - reach : LENGTH]
    rows = text_rows(MODEL, ids[:, LENGTH:], none + LENGTH, none + 1, lookback=back)
    second, memory = backbone.forward(params, MODEL, rows, memory, parallel=parallel)
    made = draft.propose(params, MODEL, ids[:, LENGTH], none + LENGTH, memory, 3, parallel=parallel)
    visits = (first.visits + second.visits)[None]
    return (
        backbone.logits(params, MODEL, first.hidden),
        backbone.logits(params, MODEL, second.hidden),
        made.tokens,
        made.confidence,
        visits,
    )


@functools.cache
def alone() -> list[np.ndarray]:
    step = jax.jit(lambda p, ids: run(p, ids, ALONE))
    made = step(weights(), tokens())
    return [np.asarray(x) for x in made]


def spread(groups: int, engines: int, extra: int = 0, capacity: int = 0) -> list[np.ndarray]:
    mesh = make_mesh(groups, engines)
    params = on_mesh(weights(), MODEL, mesh, extra)
    parallel = dataclasses.replace(SPREAD, capacity=capacity)
    step = jax.shard_map(
        functools.partial(run, parallel=parallel),
        mesh=mesh,
        in_specs=(partition_specs(params, MODEL), RANKS),
        out_specs=RANKS,
        check_vma=False,
    )
    assert SEQUENCES % ranks(mesh) == 0
    ids = jax.device_put(tokens(), NamedSharding(mesh, RANKS))
    made = jax.jit(step)(params, ids)
    return [np.asarray(x) for x in made]


SLOW = [(1, 2, 0, 0), (1, 4, 3, 0), (1, 8, 0, 0), (4, 2, 8, 1)]


@pytest.mark.parametrize(
    ("groups", "engines", "extra", "capacity"),
    [(2, 2, 3, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_mesh_answers_as_one_device(groups: int, engines: int, extra: int, capacity: int) -> None:
    """Up to the order of sums; with copies of experts, and rounds of two rows."""
    *found, visits = spread(groups, engines, extra, capacity)
    *want, whole = alone()
    for one, two in zip(found, want, strict=True):
        if one.dtype == np.int32:
            np.testing.assert_array_equal(one, two)
        else:
            np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(two).max())
    np.testing.assert_array_equal(visits.sum(0), whole[0])


def test_a_tree_on_a_mesh_is_divided_as_declared() -> None:
    mesh = make_mesh(1, 4)
    params = on_mesh(weights(), MODEL, mesh, extra=3)
    moe = params["layers"][1]["moe"]
    assert moe["gate_up"].shape[0] == 12 and moe["placement"]["table"].shape == (8, 5)
    shard = moe["gate_up"].addressable_shards[1]
    np.testing.assert_array_equal(
        np.asarray(shard.data), np.asarray(weights()["layers"][1]["moe"]["gate_up"][3:6])
    )
    table = params["layers"][1]["engram"]["table"]
    assert table.shape[0] == 464 and table.addressable_shards[0].data.shape[0] == 116
    assert params["head"].sharding.spec == PartitionSpec(None, None)
