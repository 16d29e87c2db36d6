"""`python -m tests.oracle.record` measures how closely we agree with both references.

Writes tests/testdata/model_agreement.json: per shape, with and without rounding, per reference and
way of running, the largest difference of float32 logits. Twenty minutes on one core.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
from typing import Any

from deepinfer_jax.config import ModelConfig
from tests.oracle import models
from tests.oracle.agreement import TOLERANCE
from tests.oracle.comparison import LENGTH, QUICK, compare

RECORD = pathlib.Path(__file__).parents[1] / "testdata" / "model_agreement.json"
SEEDS = range(20)
REFERENCES = ("nemo-automodel", "mlx-lm")


def shapes() -> dict[str, ModelConfig]:
    """Models that differ in window, top-k, ratios, groups, streams and experts."""
    tiny = models.plain()
    return {
        "tiny": tiny,
        "short": dataclasses.replace(
            tiny,
            num_layers=6,
            compress_ratios=(0, 2, 2, 1, 1, 1),
            kv_source_layer_ids=(1, 3),
            index_source_layer_ids=(1, 2, 3, 5),
            candidate_source_layer_id=None,
            window=4,
            index_topk=4,
            o_groups=4,
            num_active_experts=3,
        ),
        "wide": dataclasses.replace(
            tiny,
            num_layers=5,
            compress_ratios=(2, 2, 1, 1, 1),
            kv_source_layer_ids=(0, 2),
            index_source_layer_ids=(0, 2, 3),
            candidate_source_layer_id=2,
            window=12,
            index_topk=12,
            candidate_topk_blocks=5,
            head_dim=64,
            rope_head_dim=32,
            o_groups=1,
            hc_mult=2,
            swiglu_limit=0.5,
        ),
    }


def differences(config: ModelConfig) -> dict[str, Any]:
    """What the sizes of a shape are, where shapes differ."""
    named = (
        "compress_ratios kv_source_layer_ids index_source_layer_ids candidate_source_layer_id window "
        "index_topk o_groups head_dim rope_head_dim hc_mult num_active_experts swiglu_limit"
    )
    return {name: getattr(config, name) for name in named.split()}


def measure(config: ModelConfig) -> dict[str, Any]:
    """Both roundings of one shape."""
    made: dict[str, Any] = {"sizes": differences(config)}
    for rounding in (False, True):
        scores = compare(config, SEEDS, rounding, QUICK)
        scores.check(rounding)
        made["rounding on" if rounding else "rounding off"] = scores.record()
    return made


def main() -> None:
    """Writes what is known after every shape."""
    made: dict[str, Any] = {
        "made_by": "python -m tests.oracle.record",
        "references": {name: importlib.metadata.version(name) for name in REFERENCES},
        "dtype": "float32",
        "tolerance": TOLERANCE,
        "seeds": len(SEEDS),
        "tokens": LENGTH,
        "note": "with rounding, rows from a near-tie of a reference on are counted, not compared",
        "shapes": {},
    }
    for name, config in shapes().items():
        made["shapes"][name] = measure(config)
        RECORD.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
