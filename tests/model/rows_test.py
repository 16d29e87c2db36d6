"""Engram look-ups of a step: what stands in before the sequence is the pad token's compressed id."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.engram_hash import layer_hashes
from deepinfer_jax.model.engram_rows import row_ids
from deepinfer_jax.model.rows import engram_look_ups
from deepinfer_jax.presets import tiny


def test_the_pad_is_folded_like_any_token():
    config = tiny()
    engram = config.engram
    token_map = (jnp.arange(config.vocab_size, dtype=jnp.int32) * 7 + 3) % 60
    assert token_map[engram.pad_token_id] != engram.pad_token_id
    tokens = jnp.array([[5, 9, 60, 1]], jnp.int32)
    found = engram_look_ups(config, tokens, None, token_map)
    pad = int(token_map[engram.pad_token_id])
    written_out = np.full((1, 3), pad, np.int32)
    for layer, rows in zip(layer_hashes(engram, pad), found, strict=True):
        expected = row_ids(layer, np.asarray(token_map[tokens]), written_out)
        np.testing.assert_array_equal(rows, expected)
