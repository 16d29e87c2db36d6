"""Top-p, top-k and min-p against the definition: sort, add up, cut. Ties included."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.sampling_filters import keep

VOCABULARY = 12
kept = jax.jit(keep)


def by_definition(values: np.ndarray, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """0 = cut, 1 = kept, 2 = so close to a boundary that rounding decides."""
    values = values.astype(np.float64)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    mass = np.exp(values - values.max())
    mass /= mass.sum()
    verdict, ahead = np.zeros(len(values), int), 0.0
    for rank, token in enumerate(order):
        verdict[token] = rank < top_k
        for margin, on in (
            (np.float32(top_p) - ahead, top_p < 1),
            (mass[token] / mass.max() - np.float32(min_p), min_p > 0),
        ):
            if on and verdict[token]:
                verdict[token] = 2 if abs(margin) < 1e-6 else int(margin > 0)
        ahead += mass[token]
    return verdict


few = st.integers(-3, 3).map(float)  # many ties
some = st.floats(-8, 8, width=32, allow_subnormal=False)
rows = st.one_of(
    st.lists(few, min_size=VOCABULARY, max_size=VOCABULARY),
    st.lists(some, min_size=VOCABULARY, max_size=VOCABULARY),
)
wishes = st.tuples(
    st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    st.one_of(st.just(VOCABULARY), st.integers(1, VOCABULARY)),
    st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)


@settings(deadline=None, max_examples=300)
@given(rows, wishes)
def test_equals_the_definition(row: list[float], wish: tuple[float, int, float]) -> None:
    values = np.array(row, np.float32)
    top_p, top_k, min_p = (np.array([w]) for w in wish)
    found = kept(
        values[None, None],
        top_p.astype(np.float32),
        top_k.astype(np.int32),
        min_p.astype(np.float32),
    )
    expected = by_definition(values, *wish)
    sure = expected < 2
    np.testing.assert_array_equal(np.asarray(found)[0, 0][sure], expected[sure].astype(bool))


def one(values: list[float], top_p: float = 1, top_k: int = 4, min_p: float = 0) -> list[bool]:
    """`keep` for one row of four."""
    f = np.float32
    found = kept(f([[values]]), f([top_p]), np.array([top_k], np.int32), f([min_p]))
    return np.asarray(found)[0, 0].tolist()


def test_ties_go_to_the_lower_id_and_zeros_are_equal() -> None:
    assert one([1, 3, 3, 3], top_k=2) == [False, True, True, False]
    assert one([-0.0, 0.0, -0.0, -9], top_k=1) == [True, False, False, False]
    assert one([0, 0, 0, 0], top_p=0.5) == [True, True, True, False]  # masses ahead: 0 .25 .5 .75
    assert one([0, 0, 0, 0], top_p=0.49) == [True, True, False, False]
    assert one([2, 2, 1, 0], min_p=1.0) == [True, True, False, False]


def test_mass_ahead_equal_to_p_keeps_the_token() -> None:
    """Masses 1/2, 1/4, 1/8, 1/8 in float32: the second token has exactly 0.5 ahead."""
    values = np.log(np.array([0.5, 0.25, 0.125, 0.125])).tolist()
    assert one(values, top_p=0.5 + 1e-6) == [True, True, False, False]
    assert one(values, top_p=0.5 - 1e-6) == [True, False, False, False]


def test_rows_have_their_own_wishes() -> None:
    values = np.tile(np.arange(VOCABULARY, dtype=np.float32), (3, 2, 1))
    top_k = np.array([1, 5, VOCABULARY], np.int32)
    found = kept(values, np.ones(3, np.float32), top_k, np.zeros(3, np.float32))
    assert np.asarray(found).sum(-1).tolist() == [[1, 1], [5, 5], [12, 12]]
