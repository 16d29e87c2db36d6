"""Names and shapes of the image encoder's weights. Linear weights are [out, in], as released.

Source: the released DeepSeek-V4.1-Flash checkpoint (`vision.*`, `aligner.*`, `image_*`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig, VisionConfig


def vision_shapes(config: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """The tree that `vision.encode` and `image_tokens.place` take, as shapes of one dtype.

    Raises:
      ValueError: the model has no vision part, or its heads cannot be turned in two dimensions.
    """
    vision = config.vision
    if vision is None:
        raise ValueError("the model has no vision part, so it has no vision parameters")
    _check_heads(vision)
    width, out = vision.hidden_size, config.hidden_size
    tree = {
        "patch_embed": _linear(width, 3 * vision.patch_size**2),
        "blocks": tuple(_block(vision) for _ in range(vision.num_layers)),
        "norm": [width],
        "aligner": {
            "w1": _linear(out, width * vision.downsample_ratio**2),
            "w2": _linear(out, out),
        },
        "image_start": [out],
        "image_end": [out],
        "image_newline": [out],
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(tuple(shape), dtype),
        tree,
        is_leaf=lambda node: isinstance(node, list),
    )


def _block(vision: VisionConfig) -> dict[str, Any]:
    """Shapes, as lists, of one layer; `wqkv` stacks query, key, value, `w1` stacks gate, up."""
    width, inner = vision.hidden_size, vision.intermediate_size
    return {
        "norm1": [width],
        "attn": {"wqkv": _linear(3 * width, width), "wo": _linear(width, width)},
        "norm2": [width],
        "mlp": {"w1": [2 * inner, width], "w2": [width, inner]},
    }


def _linear(rows: int, columns: int) -> dict[str, list[int]]:
    return {"weight": [rows, columns], "bias": [rows]}


def _check_heads(vision: VisionConfig) -> None:
    if vision.hidden_size % (4 * vision.num_heads):
        raise ValueError(
            f"vision hidden_size is {vision.hidden_size} for {vision.num_heads} heads; a head turns "
            "pairs by row and by column, so make it a multiple of 4 channels"
        )
