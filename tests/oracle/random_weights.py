"""Parameter trees of our layout, every leaf drawn from a seed: a zero or a one would hide a mistake.

Matrices have variance 1 / fan-in, so that fp32 logits stay near 1; norms scatter around 1, sinks,
mixing offsets and router biases around 0.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Leaf, is_leaf

Array = npt.NDArray[np.float32]

SPREAD = {"sink": 0.5, "base": 0.5, "bias": 0.1, "bias_image": 0.1}  # around 0
SCATTER = {"scale": 0.2, "q_weight": 0.1, "k_weight": 0.1}  # around 1; norms: 0.1


def random_parameters(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Our parameter tree of `config` in float32 numpy."""
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _draw(str(path[-1].key), leaf, rng),
        model_parameters(config),
        is_leaf=is_leaf,
    )


def _draw(name: str, leaf: Leaf, rng: np.random.Generator) -> Array:
    normal = rng.standard_normal(leaf.shape, np.float32)
    if name in SPREAD:
        return normal * np.float32(SPREAD[name])
    if name in SCATTER or name == "norm" or name.endswith("_norm"):
        return 1 + normal * np.float32(SCATTER.get(name, 0.1))
    return normal * np.float32(leaf.shape[-1] ** -0.5)
