"""Greedy decoding: drafts change the steps, not the text, and a whole pass says the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import presets
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import initialise
from experiments.training import store
from experiments.training.decoding import Decoder

MODEL = presets.tiny()
PROMPT = np.arange(3, 14, dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return initialise(model_parameters(MODEL), jax.random.key(0))


def decoder(params, drafts, memory):
    return Decoder(params, MODEL, context=48, drafts=drafts, chunk=8, format=memory)


def tokens(decoder, count):
    made = []
    for step in decoder.generate(PROMPT, count, stop=-1):
        made += np.asarray(step.tokens)[: int(step.accepted) + 1].tolist()
    return made[:count]


@pytest.fixture(scope="module")
def plain(params):
    one = decoder(params, 0, "values")
    return tokens(one, 20), tokens(one, 20)


def test_plain_decoding_is_deterministic(plain):
    assert plain[0] == plain[1]
    assert len(plain[0]) == 20


def test_drafts_on_bytes_do_not_change_the_text(params, plain):
    assert tokens(decoder(params, 5, "bytes"), 20) == plain[0]


def test_lengths_are_refused_before_anything_is_computed():
    one = decoder({}, 0, "values")
    with pytest.raises(ValueError, match="prompt is empty"):
        next(one.generate(PROMPT[:0], 1, stop=-1))
    with pytest.raises(ValueError, match="context is 48"):
        next(one.generate(PROMPT, 38, stop=-1))


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        store.load(tmp_path, MODEL)


def test_a_checkpoint_comes_back_rounded(tmp_path, params):
    from tokenizers import Tokenizer, models

    store.save(tmp_path, params, Tokenizer(models.BPE()), MODEL)
    found, _ = store.load(tmp_path, MODEL)
    rounded = params["head"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found["head"], rounded)
    bias = params["layers"][0]["attn_mix"]["fn"]
    np.testing.assert_array_equal(found["layers"][0]["attn_mix"]["fn"], bias)
