"""Rows of a prompt divided over ranks: the released layout, equal work, and nothing lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepinfer_jax.parallel.context import divide, join, share
from deepinfer_jax.parallel.mesh import CONTEXT, make_mesh


def rows_of(count: int, width: int, ranks: int, rank: int) -> list[int]:
    """Row numbers of a rank, -1 for none."""
    made = share(jnp.array([count]), width, ranks, rank)
    return np.where(made.own[0], made.index[0], -1).tolist()


def test_the_released_example() -> None:
    """Two ranks, five rows. Source: the released DeepInfer 0.1.0."""
    assert rows_of(5, 5, 2, 0) == [0, 1, -1, -1]
    assert rows_of(5, 5, 2, 1) == [2, 3, 4, -1]
    assert share(jnp.array([5]), 5, 2, 0).places[0].tolist() == [0, 1, 4, 5, 6]


def test_causal_work_is_equal() -> None:
    """4096 rows on 4 ranks: 2,097,664 pairs each. Source: the released DeepInfer 0.1.0."""
    work = [sum(row + 1 for row in rows_of(4096, 4096, 4, r) if row >= 0) for r in range(4)]
    assert work == [2_097_664] * 4


@pytest.mark.parametrize(("width", "ranks"), [(13, 1), (13, 2), (12, 3), (1, 2)])
def test_every_row_has_one_rank_and_is_found_again(width: int, ranks: int) -> None:
    """For every count there may be."""
    made = [share(jnp.arange(width + 1), width, ranks, r) for r in range(ranks)]
    every = np.concatenate([np.where(m.own, m.index, -1) for m in made], axis=1)
    for count in range(width + 1):
        assert sorted(row for row in every[count] if row >= 0) == list(range(count))
        assert every[count][np.asarray(made[0].places)[count, :count]].tolist() == list(
            range(count)
        )


def test_shares_come_together_on_every_rank() -> None:
    mesh, width = make_mesh(1, 1, context=4), 13
    counts = jnp.array([13, 5, 0])
    x = jax.random.normal(jax.random.key(0), (3, width, 2))

    def there_and_back(x: jax.Array) -> jax.Array:
        mine = share(counts, width, 4, jax.lax.axis_index(CONTEXT))
        return join(divide(x, mine), mine, (CONTEXT,))[None]

    step = jax.shard_map(
        there_and_back, mesh=mesh, in_specs=P(), out_specs=P(CONTEXT), check_vma=False
    )
    for made in np.asarray(jax.jit(step)(x)):
        for s, count in enumerate(counts.tolist()):
            np.testing.assert_array_equal(made[s, :count], x[s, :count])
