"""A model with one layer of each kind, for tests that compile many programs."""

import dataclasses

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.presets import tiny


def five_layers() -> ModelConfig:
    """Window, both sources, reuse, candidates, Engram and a draft stage; the decoder has three."""
    made = tiny()
    assert made.engram is not None and made.draft is not None
    return dataclasses.replace(
        made,
        num_layers=5,
        compress_ratios=(0, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 4),
        candidate_source_layer_id=2,
        engram=dataclasses.replace(made.engram, layer_ids=(1,), num_embeddings=(462,)),
        draft=dataclasses.replace(made.draft, num_layers=1, target_layer_ids=(3, 4)),
    )
