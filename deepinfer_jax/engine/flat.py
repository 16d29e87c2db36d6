"""A step's many small host arrays as one: a transfer costs far more than the bytes it moves.

The host lays all arrays of a batch out in one of int32; the program they go to takes them apart
again, by a layout that is static to it. Bits are kept: a float travels as the int of the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from deepinfer_jax.rules import require

WORD = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a flat array holds; hashable, so that a program may be compiled for it."""

    tree: Any  # a treedef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    def restored(self, flat: jax.Array) -> Any:
        """The batch of a flat array int32 [N], under jit."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = itertools.accumulate(sizes, initial=0)
        leaves = [
            _typed(flat[start : start + size].reshape(shape), dtype)
            for start, size, shape, dtype in zip(
                starts, sizes, self.shapes, self.dtypes, strict=False
            )
        ]
        return jax.tree.unflatten(self.tree, leaves)


def flatten(batch: Any) -> tuple[np.ndarray, Layout]:
    """One array int32 [N] of all of a batch's, numpy arrays of bools or of four bytes an entry.

    Raises:
      ValueError: an array of another width.
    """
    leaves, tree = jax.tree.flatten(batch)
    layout = Layout(tree, tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves))
    return np.concatenate([_words(x) for x in leaves]), layout


def _words(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == np.bool_:
        return leaf.ravel().astype(WORD)
    require(
        leaf.dtype.itemsize == WORD.itemsize,
        f"a batch has an array of {leaf.dtype}; give bools or numbers of four bytes",
    )
    return np.ravel(leaf).view(WORD)


def _typed(words: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype == np.bool_:
        return words != 0
    return jax.lax.bitcast_convert_type(words, dtype)
