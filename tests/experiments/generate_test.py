"""Greedy decoding: drafts change the steps, not the text, and a whole pass says the same."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer_jax import presets
from experiments.training import measure, store
from experiments.training.decoding import Decoder
from tests.oracle.random_weights import random_parameters

MODEL = presets.tiny()
PROMPT = np.arange(3, 14, dtype=np.int32)


SHIPPED = pathlib.Path(__file__).parents[2] / "configs/checkpoints/tiny"


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(MODEL, 0))


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


@pytest.mark.slow
def test_plain_decoding_is_deterministic(plain):
    assert plain[0] == plain[1]
    assert len(plain[0]) == 20


@pytest.mark.slow
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


def test_the_shipped_checkpoint_is_whole_and_says_how_good_it_is():
    params, tokenizer = store.load(SHIPPED, presets.trained_tiny())
    assert params["head"].shape[0] == tokenizer.get_vocab_size()
    found = json.loads((SHIPPED / "measured.json").read_text())
    assert found["held_out"]["nats"] < found["baselines"]["bigram"] - 0.3
    assert found["speculation"]["same_text"] == 1


def test_a_damaged_checkpoint_is_refused(tmp_path):
    copy = shutil.copytree(SHIPPED, tmp_path / "copy")
    largest = max((p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(ValueError, match=f"1 files are absent or changed.*{largest.name}"):
        store.load(copy, presets.trained_tiny())


def test_a_checkpoint_of_another_model_is_refused():
    with pytest.raises(ValueError, match="holds another model"):
        store.load(SHIPPED, MODEL)


@pytest.mark.slow
def test_the_shipped_model_writes_the_same_text_with_drafts():
    model = presets.trained_tiny()
    params, tokenizer = store.load(SHIPPED, model)
    prompt = np.array([model.bos_token_id, *tokenizer.encode("import ").ids], np.int32)
    texts = [
        measure.tokens(
            Decoder(params, model, context=128, drafts=drafts, chunk=64, format="bytes").generate(
                prompt, 64, stop=-1
            )
        )[:64]
        for drafts in (0, model.draft.block_size)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 8


@pytest.mark.parametrize("name", presets.TOKENIZERS)
def test_presets_name_tokenizers_of_their_size(name):
    tokenizer = Tokenizer.from_file(str(SHIPPED.parents[2] / presets.TOKENIZERS[name]))
    assert tokenizer.get_vocab_size() == getattr(presets, name)().vocab_size
    assert tokenizer.decode(tokenizer.encode("x = é").ids) == "x = é"
