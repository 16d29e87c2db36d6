"""Parameter counts against the report's figures and against the released checkpoint's shapes."""

import math

import pytest

from deepinfer_jax.cost.parameters import (
    attention_parameters,
    moe_parameters,
    parameter_counts,
)
from deepinfer_jax.presets import small, v41_flash

# Shapes in the released V4.1 checkpoint (model.safetensors.index of DeepSeek-V4.1-Flash).
ATTENTION = [(1280, 5120), (32768, 1280), (512, 5120), (8192, 4096), (5120, 8192)]
EXPERT = [(2304, 5120), (2304, 5120), (5120, 2304)]
INDEXER_SOURCE = [(4096, 1280), (32, 5120)]
ENGRAM_PROJECTION = [(25600, 6144), (4, 5120), (4, 5120)]


def _size(shapes: list) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_matrices_have_the_released_shapes() -> None:
    model, counts = v41_flash(), parameter_counts(v41_flash())
    assert attention_parameters(model) == _size(ATTENTION)
    assert moe_parameters(model, 384) == 385 * _size(EXPERT) + 384 * 5120
    assert counts["compressor"] == 7 * 512 * 5120 + 4 * 512
    assert counts["indexer"] == 8 * _size(INDEXER_SOURCE) + 4 * (128 * 512 + 128)
    assert counts["hyper_connections"] == 80 * (24 * 20480 + 24 + 3)
    assert counts["engram_tables"] == (384_006_168 + 384_016_682) * 256
    assert counts["engram_projections"] == 2 * _size(ENGRAM_PROJECTION)


def test_sums_are_the_published_ones() -> None:
    counts = parameter_counts(v41_flash())
    main = counts["attention"] + counts["moe"] + counts["embedding"] + counts["head"]
    assert main / 1e9 == pytest.approx(551.5, abs=0.05)
    assert round(counts["backbone"] / 1e9) == 552
    assert counts["engram_tables"] / 1e9 == pytest.approx(196, abs=1)
    assert counts["active_decode"] / 1e9 == pytest.approx(15.6, abs=0.05)


def test_vision_is_counted_bias_by_bias() -> None:
    layer = (3072 * 1024 + 3072) + (1024 * 1024 + 1024) + 3 * 1024 * 2816 + 2 * 1024
    projector = (9216 * 5120 + 5120) + (5120 * 5120 + 5120) + 3 * 5120
    expected = 32 * layer + (588 * 1024 + 1024) + 1024 + projector
    assert parameter_counts(v41_flash())["vision"] == expected


def test_small_has_about_a_hundred_million() -> None:
    assert parameter_counts(small())["backbone"] == pytest.approx(100e6, rel=0.05)
