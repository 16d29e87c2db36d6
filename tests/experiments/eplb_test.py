"""The placement experiment: loops that are timed decide as published, balance as counted by hand."""

import numpy as np
import pytest

from deepinfer_jax.policy import experts
from experiments import eplb, eplb_plain
from tests.policy.experts_test import WEIGHT, plain_rebalance


def test_plain_loops_decide_as_published() -> None:
    """The example of deepseek-ai/EPLB's README."""
    assert eplb_plain.rebalance(WEIGHT.astype(np.float32), 16, 4, 2, 8).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@pytest.mark.parametrize(("groups", "nodes"), [(8, 4), (1, 1), (3, 2)])
def test_plain_loops_decide_as_lists_do(groups: int, nodes: int) -> None:
    sizes = (60, groups, nodes, 12) if groups == 8 else (54, groups, nodes, 6)
    weight = np.random.default_rng(groups).gamma(1.0, size=(3, 48)).astype(np.float32)
    found = eplb_plain.rebalance(weight, *sizes)
    assert found.tolist() == [plain_rebalance(layer, *sizes) for layer in weight]


def test_balance_counts_steps_one_by_one() -> None:
    """Two experts on two ranks: in turn all rows go to one, so no step is even though the sum is."""
    tokens = np.array([[[8, 0]], [[0, 8]]])
    placement = experts.initial_placement(1, 2, 2)
    assert eplb.balance(tokens, placement, 2) == 0.5
    assert eplb.balance(tokens.sum(0, keepdims=True), placement, 2) == 1.0
    both = experts.initial_placement(1, 2, 4)  # slots 0 1 | 0 1: each rank holds both
    assert eplb.balance(tokens, both, 2) == 1.0


def test_rows_drawn_follow_the_law() -> None:
    settings = {
        "large": {"layers": 2, "experts": 4},
        "burst": 1e6,  # hardly any
        "steps": 4,
        "rows": 120_000,
    }
    found = eplb.drawn(settings, 1.0, seed=0)
    assert found.shape == (8, 2, 4) and (found.sum(-1) == 120_000).all()
    shares = np.sort(found.mean((0,)) / 120_000)[:, ::-1]
    assert np.allclose(shares, np.array([12, 6, 4, 3]) / 25, atol=0.005)


def test_a_reference_must_be_there() -> None:
    with pytest.raises(ValueError, match="is not a file"):
        eplb.reference("/nowhere/eplb.py")
