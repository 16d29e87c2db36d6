"""Expert placement: published vectors, independent greedy loops, and what must hold of any map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import experts

# The example of the deepseek-ai/EPLB README: 2 layers of 12 experts, 16 slots on 8 ranks.
WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def consistent(placement, slots):
    """Every slot is listed once, under its own expert, and every expert has a replica."""
    maps = [np.asarray(x) for x in jax.tree.leaves(placement)]
    for chosen, table, count in zip(*maps, strict=True):
        assert (np.bincount(chosen, minlength=len(count)) == count).all() and count.min() >= 1
        assert count.sum() == slots
        listed = table < slots
        assert (listed.sum(axis=1) == count).all()
        assert (listed == (np.arange(table.shape[1]) < count[:, None])).all()  # packed to the left
        assert sorted(table[listed]) == list(range(slots))
        assert (chosen[np.where(listed, table, 0)] == np.arange(len(count))[:, None])[listed].all()


def padded(table, width, slots):
    return np.where(np.asarray(table)[:, :, :width] == slots, -1, table[:, :, :width]).tolist()


def test_readme_hierarchical():
    placement = experts.rebalance(WEIGHT, slots=16, groups=4, nodes=2, ranks=8)
    assert placement.physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert placement.replicas.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    first = [[12], [15, 13], [11], [6], [7, 5], [0, 2], [1], [3], [4], [9], [8, 10], [14]]
    second = [[13], [15, 11], [8], [14], [9], [10, 12], [2, 4], [0], [6, 3], [7], [1], [5]]
    expected = [[[*row, -1][:2] for row in layer] for layer in (first, second)]
    assert padded(placement.logical_to_physical, 2, 16) == expected
    consistent(placement, 16)
    loads = experts.rank_loads(WEIGHT, placement, 8)
    assert loads.tolist() == [
        [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152],
        [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5],
    ]
    assert loads.reshape(2, 2, 4).sum(2).tolist() == [[446, 587], [645, 511]]
    ratios = [round(float(experts.mean_of_ratios(row[None])), 4) for row in loads]
    assert ratios == [0.8277, 0.8050]


@pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (3, 2)])
def test_readme_weights_global(groups, nodes):
    """Also what 3 groups on 2 nodes fall back to."""
    placement = experts.rebalance(WEIGHT, slots=16, groups=groups, nodes=nodes, ranks=8)
    assert placement.physical_to_logical.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    assert placement.replicas.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1],
    ]
    loads = experts.rank_loads(WEIGHT, placement, 8)
    assert loads.tolist() == [
        [130.5, 95.5, 130, 138, 138.5, 134.5, 134, 132],
        [123, 123, 125.5, 118.5, 172, 157.5, 172, 164.5],
    ]
    ratios = [round(float(experts.mean_of_ratios(row[None])), 4) for row in loads]
    assert ratios == [0.9323, 0.8401]


# The hierarchical policy once more, as Python lists.


def plain_pack(weight, packs):
    room = len(weight) // packs
    if room == 1:
        return [[i] for i in range(packs)]
    out, load = [[] for _ in range(packs)], [np.float32(0)] * packs
    for item in sorted(range(len(weight)), key=lambda i: -weight[i]):
        best = min((p for p in range(packs) if len(out[p]) < room), key=lambda p: load[p])
        out[best].append(item)
        load[best] = np.float32(load[best] + weight[item])
    return out


def plain_rebalance(weight, slots, groups, nodes, ranks):
    if groups % nodes:
        groups = nodes = 1
    size = len(weight) // groups
    sums = [np.float32(weight[g * size : (g + 1) * size].sum()) for g in range(groups)]
    chosen = []
    for members in plain_pack(sums, nodes):
        local = [g * size + i for g in members for i in range(size)]
        count = dict.fromkeys(local, 1)
        replicas = list(local)
        while len(replicas) < slots // nodes:
            hottest = max(local, key=lambda e: np.float32(weight[e] / np.float32(count[e])))
            count[hottest] += 1
            replicas.append(hottest)
        load = [np.float32(weight[e] / np.float32(count[e])) for e in replicas]
        chosen += [replicas[i] for pack in plain_pack(load, ranks // nodes) for i in pack]
    return chosen


@pytest.mark.parametrize(
    ("size", "slots", "groups", "nodes", "ranks"),
    [
        (12, 16, 4, 2, 8),
        (256, 288, 8, 4, 32),
        (256, 320, 8, 40, 320),
        (8, 9, 1, 1, 1),
    ],
)
def test_equals_plain_greedy_on_tie_free_loads(size, slots, groups, nodes, ranks):
    weight = np.random.default_rng(slots).gamma(1.0, size=(2, size)).astype(np.float32)
    placement = experts.rebalance(weight, slots, groups, nodes, ranks)
    for layer in range(2):
        expected = plain_rebalance(weight[layer], slots, groups, nodes, ranks)
        assert placement.physical_to_logical[layer].tolist() == expected
    consistent(placement, slots)


@pytest.mark.parametrize("weight", [[7] * 8, [1000, 1, 1, 1, 1, 1, 1, 1], [0] * 8])
def test_ties_are_stable(weight):
    weight = np.array(weight, np.float32)
    placement = experts.rebalance(weight[None], 12, 4, 2, 4)
    assert placement.physical_to_logical[0].tolist() == plain_rebalance(weight, 12, 4, 2, 4)
    consistent(placement, 12)


# Peak-aware policy


@pytest.mark.parametrize(
    ("tokens", "chosen", "replicas"),
    [
        ([[60, 20, 10, 10], [50, 10, 30, 10]], [2, 0, 1, 0, 0, 3], [3, 1, 1, 1]),
        ([[8, 4, 2, 1]], [0, 1, 1, 0, 2, 3], [2, 2, 1, 1]),
        ([[0, 0, 0, 0]], [0, 1, 2, 3, 3, 2], [1, 1, 2, 2]),
    ],
)
def test_peak_aware_released_values(tokens, chosen, replicas):
    placement = experts.rebalance_peak_aware(np.array(tokens)[:, None], slots=6, ranks=2)
    assert placement.physical_to_logical.tolist() == [chosen]
    assert placement.replicas.tolist() == [replicas]
    consistent(placement, 6)


def plain_peak_aware(tokens, slots, ranks):
    """By trying every expert and every rank, with each objective computed from nothing."""
    size = tokens.shape[1]
    biased = tokens + 1e-4 * np.arange(size)
    count = np.ones(size)
    replicas = list(range(size))
    while len(replicas) < slots:
        trial = [(biased / (count + (np.arange(size) == e))).max(1).sum() for e in range(size)]
        best = int(np.argmin(np.round(trial, 6)))
        count[best] += 1
        replicas.append(best)
    if slots == ranks:
        return replicas
    load = (tokens / count)[:, replicas]
    out = [[] for _ in range(ranks)]
    for item in sorted(range(slots), key=lambda i: -round(load[:, i].sum(), 6)):
        costs = []
        for rank in range(ranks):
            held = np.array(
                [load[:, [*m, item] if r == rank else m].sum(1) for r, m in enumerate(out)]
            )
            full = len(out[rank]) == slots // ranks
            costs.append(np.inf if full else round(held.max(0).sum(), 6))
        out[int(np.argmin(costs))].append(item)
    return [replicas[i] for rank in out for i in rank]


@pytest.mark.parametrize(("size", "slots", "ranks"), [(8, 12, 3), (5, 6, 6)])
def test_peak_aware_equals_exhaustive_search(size, slots, ranks):
    tokens = np.random.default_rng(slots).gamma(1.0, 100.0, (7, 8, size)).astype(np.float32)
    placement = experts.rebalance_peak_aware(tokens, slots, ranks)
    for layer in range(8):
        expected = plain_peak_aware(tokens[:, layer].astype(np.float64), slots, ranks)
        assert placement.physical_to_logical[layer].tolist() == expected
    consistent(placement, slots)


def test_peak_aware_sees_alternating_peaks():
    """Equal means, but experts 0 and 1 peak in the same step: they must not share a rank."""
    tokens = np.array([[9, 9, 0, 0], [0, 0, 9, 9]])[:, None]
    chosen = experts.rebalance_peak_aware(tokens, slots=4, ranks=2).physical_to_logical[0]
    assert {frozenset(chosen[:2].tolist()), frozenset(chosen[2:].tolist())} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


def test_same_decisions_with_64_bit_types():
    tokens = np.random.default_rng(3).integers(0, 50, (7, 8, 8))
    narrow = experts.rebalance_peak_aware(tokens, 12, 3)
    with jax.enable_x64(True):
        wide = experts.rebalance_peak_aware(tokens, 12, 3)
    assert narrow.physical_to_logical.tolist() == wide.physical_to_logical.tolist()


# Maps and statistics


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_from_slots_inverts(seed):
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation([*range(5), *rng.integers(0, 5, 4)]) for _ in range(2)])
    placement = experts.from_slots(jnp.asarray(slots), 5)
    consistent(placement, 9)
    for layer in range(2):
        for expert in range(5):
            where = np.flatnonzero(slots[layer] == expert)
            assert placement.logical_to_physical[layer, expert, : len(where)].tolist() == list(
                where
            )


def test_initial_placement():
    placement = experts.initial_placement(layers=2, experts=4, slots=6)
    assert placement.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    consistent(placement, 6)


def test_window_folds_to_logical_experts():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 100, (6, 3, 7))
    slots = np.stack([[*rng.permutation(5), 0, extra] for extra in range(3)])
    folded = experts.logical_tokens(counts, slots, 5)
    expected = np.zeros((6, 3, 5), int)
    for step, layer, slot in np.ndindex(6, 3, 7):
        expected[step, layer, slots[layer, slot]] += counts[step, layer, slot]
    assert folded.tolist() == expected.tolist()


@pytest.mark.parametrize("xp", [np, jnp])
def test_balancedness_definitions(xp):
    """vLLM's unit test: average 50, maximum 200 over two layers. The two means differ elsewhere."""
    loads = xp.asarray([[100.0, 0, 0, 0], [100, 0, 0, 0]])
    assert experts.ratio_of_sums(loads) == 0.25 and experts.mean_of_ratios(loads) == 0.25
    loads = xp.asarray([[4.0, 0], [30, 30]])
    assert experts.ratio_of_sums(loads) == 32 / 34 and experts.mean_of_ratios(loads) == 0.75
    assert experts.ratio_of_sums(loads * 0) == 1 and experts.mean_of_ratios(loads * 0) == 1


@pytest.mark.parametrize(
    ("slots", "groups", "nodes", "ranks", "told"),
    [
        (15, 4, 2, 8, "slots = 15"),
        (8, 4, 2, 8, "below experts = 12"),
        (16, 5, 1, 8, "groups = 5"),
        (16, 4, 4, 2, "nodes = 4"),
    ],
)
def test_impossible_shapes_are_named(slots, groups, nodes, ranks, told):
    with pytest.raises(ValueError, match=told):
        experts.rebalance(WEIGHT, slots, groups, nodes, ranks)
