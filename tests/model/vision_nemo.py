"""NVIDIA NeMo AutoModel's image encoder as an independent answer (the `oracle` extra).

`python -m tests.model.vision_nemo` writes tests/testdata/vision_fixture.json again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from deepinfer_jax import presets
from deepinfer_jax.config import VisionConfig
from deepinfer_jax.model.image_patches import pack
from deepinfer_jax.model.images import ImageGrid
from deepinfer_jax.model.vision_parameters import vision_shapes

FIXTURE = pathlib.Path(__file__).parents[1] / "testdata" / "vision_fixture.json"

# A head of 8 channels has two frequencies per axis: a mixed-up order shows.
VISION = VisionConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    intermediate_size=24,
    patch_size=2,
    downsample_ratio=3,
    max_image_tokens=40,
    min_pixels=4,
    image_token_id=60,
)
MODEL = dataclasses.replace(presets.tiny(), vision=VISION)
GRIDS = [ImageGrid(4, 7, 2, 3), ImageGrid(3, 3, 2, 3), ImageGrid(1, 5, 2, 3)]


def weights(seed: int = 0) -> dict[str, Any]:
    """Random float32 parameters: variance 1 / fan-in, norms around 1, no bias or norm left plain."""
    generator = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        normal = generator.standard_normal(leaf.shape, np.float32)
        if "norm" in str(path[-1]) and "image" not in str(path[-1]):
            return 1 + np.float32(0.1) * normal
        return normal * np.float32(leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 0.3)

    return jax.tree_util.tree_map_with_path(draw, vision_shapes(MODEL, np.float32))


def images(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random patches of three images of different grids, and the grids."""
    generator = np.random.default_rng(seed)
    return pack(
        [generator.integers(0, 256, (g.rows * g.columns, 3, 2, 2), np.uint8) for g in GRIDS], GRIDS
    )


def _modules() -> tuple[Any, Any]:
    from nemo_automodel.components.models.deepseek_v41 import config as configs
    from nemo_automodel.components.models.deepseek_v41 import vision as modules

    top = configs.DeepseekV41Config(
        text_config={"hidden_size": MODEL.hidden_size, "dtype": "float32"},
        vision_config={
            "num_hidden_layers": VISION.num_layers,
            "hidden_size": VISION.hidden_size,
            "num_attention_heads": VISION.num_heads,
            "intermediate_size": VISION.intermediate_size,
            "patch_size": VISION.patch_size,
            "downsample_ratio": VISION.downsample_ratio,
        },
        dtype="float32",
    )
    return modules.DeepseekV41VisionTransformer(top), modules.DeepseekV41VisionAligner(top)


def _named(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """Our tree under the names of a torch module: plain leaves are `.weight`s."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, tuple):
        parts = ((str(i), part) for i, part in enumerate(tree))
    else:
        return {prefix if prefix.endswith(("weight", "bias")) else f"{prefix}.weight": tree}
    return {
        name: leaf
        for key, part in parts
        for name, leaf in _named(part, f"{prefix}.{key}".lstrip(".")).items()
    }


def features() -> list[list[list[float]]]:
    """NeMo's features of each image's cells, [images][cells][D]."""
    import torch

    params, (patches, grids) = weights(), images()
    tower, aligner = _modules()
    blocks = {key: params[key] for key in ("patch_embed", "blocks", "norm")}
    blocks["patch_embed"] = {"proj": blocks["patch_embed"]}
    for module, tree in ((tower, blocks), (aligner, params["aligner"])):
        state = {name: torch.from_numpy(leaf.copy()) for name, leaf in _named(tree).items()}
        module.float().load_state_dict(state, strict=True)
    results = []
    with torch.no_grad():
        for image, (rows, columns) in zip(patches, grids.tolist(), strict=True):
            pixels = torch.from_numpy(image[: rows * columns]).float() / 255
            encoded = tower((pixels - 0.5) / 0.5, rows, columns)
            results.append(aligner(encoded, rows, columns).tolist())
    return results


if __name__ == "__main__":
    fixture = {
        "made_by": "python -m tests.model.vision_nemo, with nemo-automodel 0.7.0",
        "features": [np.round(image, 6).tolist() for image in features()],
    }
    FIXTURE.write_text(json.dumps(fixture) + "\n")
