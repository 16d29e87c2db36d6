"""Is a tree of arrays the parameters of a configuration?"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Tree, is_leaf


def check_tree(params: Tree, config: ModelConfig) -> jnp.dtype:
    """The dtype of all weights that are not declared float32.

    Raises:
      ValueError: naming a weight too many, absent, of another shape or of another dtype.
    """
    declared, _ = jax.tree_util.tree_flatten_with_path(model_parameters(config), is_leaf=is_leaf)
    expected = {jax.tree_util.keystr(path): leaf for path, leaf in declared}
    given = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    odd = sorted(expected.keys() ^ given.keys())
    expected_form: object = jax.tree.structure(model_parameters(config))
    if odd or expected_form != jax.tree.structure(params):
        which = ", ".join(f"{'no ' if x in expected else 'unexpected '}{x}" for x in odd[:10])
        raise ValueError(
            f"the parameters are not this configuration's, {len(odd)} names differ: "
            f"{which or 'a list where a tuple is meant'}; start from model_parameters(config)"
        )
    dtype = given["['embed']"].dtype
    for name, leaf in expected.items():
        shape, kind = given[name].shape, given[name].dtype
        wanted = jnp.dtype(leaf.dtype or dtype)
        if shape != leaf.shape or kind != wanted:
            raise ValueError(
                f"{name} is {kind}{list(shape)}, the configuration has {wanted}{list(leaf.shape)}; "
                "convert it, or pass the configuration it belongs to"
            )
    return jnp.dtype(dtype)
