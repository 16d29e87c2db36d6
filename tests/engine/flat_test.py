"""A flat batch comes back bit for bit, whatever arrays it is made of."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deepinfer_jax.engine.flat import flatten

SHAPES = [(), (1,), (3,), (2, 0), (2, 3)]
ARRAYS = st.one_of(
    *(
        hnp.arrays(dtype, st.sampled_from(SHAPES))
        for dtype in (np.int32, np.uint32, np.bool_, np.float32)
    )
)


@functools.partial(jax.jit, static_argnums=0)
def restored(layout, flat):
    return layout.restored(flat)


@settings(max_examples=25, deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_back_bit_for_bit(leaves: list[np.ndarray]) -> None:
    """NaNs with their payload, infinities and negative zero among the floats."""
    batch = {"leaves": leaves, "none": None}
    flat, layout = flatten(batch)
    assert flat.dtype == np.int32
    assert flat.ndim == 1
    found = restored(layout, flat)
    assert found["none"] is None
    for want, got in zip(leaves, found["leaves"], strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert want.tobytes() == np.asarray(got).tobytes()


def test_layouts_equal_when_shapes_are() -> None:
    """So that a program compiled for one batch serves the next."""
    one, two = (flatten((np.full(3, x, np.int32), np.bool_(x)))[1] for x in (0, 1))
    assert one == two
    assert hash(one) == hash(two)
    assert flatten((np.zeros(3, np.float32), np.bool_(0)))[1] != one
    assert flatten((np.zeros((3, 1), np.int32), np.bool_(0)))[1] != one


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="float64; give bools or numbers of four bytes"):
        flatten({"x": np.zeros(2)})
