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
from deepinfer_jax.parallel.mesh import ALONE, DIVIDED, RANKS, SPREAD, Parallel, make_mesh, ranks
from tests.engine.small_engine import micro, parameters

MODEL = dataclasses.replace(micro(), num_experts=8)
SEQUENCES, LENGTH, KEPT = 8, 12, 9


@functools.cache
def weights() -> dict[str, Any]:
    return parameters(MODEL)


def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(3, 300, (SEQUENCES, LENGTH + 1)).astype(np.int32)


def run(
    params: Any, ids: jax.Array, parallel: Parallel, steps: bool, **how: Any
) -> tuple[Any, ...]:
    """A prompt of all but the last token; with `steps` a decode step of it, and drafts.

    Logits are of the prompt's last KEPT rows. A context of ranks divides the prompt's rows. Returns
    [S, ...] of each, visits, and the memory behind the prompt.
    """
    count = ids.shape[0]
    none = jnp.zeros(count, jnp.int32)
    memory: DenseMemory = create_dense(MODEL, count, 16, dtype=jnp.float32)
    kept = none + (LENGTH - KEPT if how else 0)
    rows = text_rows(MODEL, ids[:, :LENGTH], none, none + LENGTH, kept_start=kept)
    first, memory = backbone.forward(params, MODEL, rows, memory, parallel=parallel, **how)
    logits = backbone.logits(params, MODEL, first.hidden[:, -KEPT:])
    if not steps:
        return logits, first.visits[None], memory
    written, parallel = memory, dataclasses.replace(parallel, context=())
    reach = MODEL.engram.max_ngram - 1  # type: ignore[union-attr]
    back = ids[:, LENGTH - reach : LENGTH]
    rows = text_rows(MODEL, ids[:, LENGTH:], none + LENGTH, none + 1, lookback=back)
    second, memory = backbone.forward(params, MODEL, rows, memory, parallel=parallel)
    made = draft.propose(params, MODEL, ids[:, LENGTH], none + LENGTH, memory, 3, parallel=parallel)
    visits = (first.visits + second.visits)[None]
    return (
        logits,
        backbone.logits(params, MODEL, second.hidden),
        made.tokens,
        made.confidence,
        visits,
        written,
    )


@functools.cache
def alone(**how: Any) -> tuple[Any, ...]:
    step = jax.jit(lambda p, ids: run(p, ids, ALONE, **how))
    return step(weights(), tokens())


def spread(
    groups: int, engines: int, context: int = 1, extra: int = 0, capacity: int = 0, **how: Any
) -> tuple[Any, ...]:
    mesh = make_mesh(groups, engines, context=context)
    params = on_mesh(weights(), MODEL, mesh, extra)
    parallel = dataclasses.replace(DIVIDED if context > 1 else SPREAD, capacity=capacity)
    step = jax.shard_map(
        functools.partial(run, parallel=parallel, **how),
        mesh=mesh,
        in_specs=(partition_specs(params, MODEL), RANKS),
        out_specs=RANKS,
        check_vma=False,
    )
    assert SEQUENCES % ranks(mesh) == 0
    ids = jax.device_put(tokens(), NamedSharding(mesh, RANKS))
    return jax.jit(step)(params, ids)


EVERY: dict[str, Any] = {"steps": True}
COMPACT = {**EVERY, "truncation": "compact", "keep": KEPT}
SLOW = [  # groups, engines, context, extra experts, capacity
    *((shape, how) for how in (EVERY, COMPACT) for shape in [(1, 1, 2), (1, 1, 8), (1, 4, 2)]),
    *(((1, 2, 4), how) for how in (EVERY, COMPACT)),
    *((shape, EVERY) for shape in [(1, 2, 1), (1, 4, 1, 3), (1, 8, 1), (4, 2, 1, 8, 1), (4, 1, 2)]),
]


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((2, 2, 2, 3, 2), {**COMPACT, "steps": False}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_mesh_answers_as_one_device(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    """Up to the order of sums; copies of experts, rounds of few rows, prompts divided over ranks.

    The devices of a rank keep the same memory, bit by bit.
    """
    groups, engines, context, *rest = shape
    made = spread(groups, engines, context, *rest, **how)
    same(made, alone(**how))
    for leaf in jax.tree.leaves(made[-1]):
        held: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            first = held.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), first)
        assert len(leaf.addressable_shards) == groups * engines * context
        assert len(held) == groups * engines


def same(found: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    *found, visits, _ = found
    *want, whole, _ = want
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
