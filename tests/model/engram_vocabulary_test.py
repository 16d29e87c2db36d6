"""Folding spellings: by hand, by the `tokenizers` library, and NeMo's ids."""

import dataclasses
import json
import pathlib
import sys
import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer_jax import presets
from deepinfer_jax.config import EngramConfig
from deepinfer_jax.model.engram_vocabulary import compress, fold, token_map
from tests.model import engram_nemo

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        (" The", "the"),
        ("ÉCOLE", "ecole"),
        ("e\u0301", "e"),
        ("\ufb01ne \u2460", "fine 1"),  # a ligature, a circled digit
        ("\uff21\u3000\uff22", "a b"),  # full-width letters and space
        ("a \t\r\n b\n", "a b"),
        (" ", " "),
        ("\n\n", " "),  # blanks alone meet in one blank
        ("\v", ""),  # other white space alone is stripped away
        ("\u0301", ""),
        ("ΟΔΟΣ", "οδοσ"),  # each capital alone: no final sigma
        ("\x1c", "\x1c"),  # Python would strip it; Unicode does not call it white space
    ],
)
def test_fold(text, folded):
    assert fold(text) == folded


def test_ids_follow_first_appearance():
    pieces = [("b", "b"), ("A", "A"), ("B", "B"), ("a", "a"), ("c", "c")]
    np.testing.assert_array_equal(compress(pieces), [0, 1, 0, 1, 2])


def test_what_folds_to_nothing_keeps_its_text():
    """Two accents stay two keys, and neither meets the empty text."""
    pieces = [("\u0301", "x"), ("\u0302", "y"), ("", "z"), ("\u0301", "w")]
    np.testing.assert_array_equal(compress(pieces), [0, 1, 2, 0])


def test_undecodable_pieces_are_their_own_keys():
    """Two halves of characters decode alike; a piece may also meet another token's text."""
    pieces = [("\ufffd", "Ġé"), ("\ufffd", "Ãł"), ("q", "q"), ("a\ufffd", "q")]
    np.testing.assert_array_equal(compress(pieces), [0, 1, 2, 2])


class Words:
    """A tokenizer of whole words."""

    def __init__(self, words):
        self.words = words

    def get_vocab_size(self):
        return len(self.words)

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(self.words[i] for i in ids)

    def id_to_token(self, id):
        return self.words[id]


def test_token_map_of_the_fixture():
    frozen = json.loads(engram_nemo.FIXTURE.read_text())
    engram = EngramConfig(**frozen["sizes"])
    compressed = token_map(Words(frozen["vocabulary"]), engram)
    assert compressed.dtype == np.int32
    np.testing.assert_array_equal(compressed, frozen["token_map"])
    other = dataclasses.replace(engram, compressed_vocab_size=7)
    with pytest.raises(ValueError, match=r"folds to 6 ids and .* is 7"):
        token_map(Words(frozen["vocabulary"]), other)


def test_the_small_preset_is_fitted_to_its_tokenizer():
    tokenizer = Tokenizer.from_file(str(ROOT / presets.TOKENIZERS["small"]))
    compressed = token_map(tokenizer, presets.small().engram)

    def ids(*words):
        return {int(compressed[tokenizer.token_to_id(word)]) for word in words}

    assert len(ids("self", "Ġself")) == 1  # with and without the blank before it
    assert len(ids("self", "class")) == 2
    assert compressed.max() == presets.small().engram.compressed_vocab_size - 1


@pytest.mark.oracle
def test_token_map_of_a_tokenizers_tokenizer():
    pytest.importorskip("nemo_automodel")
    words = ["[UNK]", "x", "X", " x ", "É", "e", "\t", "\n", " ", "ﬁ", "fi", "\ufffd", "\u0301"]
    config = engram_nemo.text_config(engram_compressed_vocab_size=7)
    wanted = engram_nemo.hash_module(config, words).token_map.tolist()
    engram = EngramConfig(**engram_nemo.SIZES | {"compressed_vocab_size": 7})
    assert token_map(engram_nemo.tokenizer(words), engram).tolist() == wanted


@pytest.mark.oracle
def test_folding_equals_the_tokenizers_library():
    """Every character of Unicode 3.2, alone and inside a word. (Its tables are older than ours.)"""
    library = pytest.importorskip("tokenizers")
    steps = library.normalizers
    released = steps.Sequence(
        [
            steps.NFKC(),
            steps.NFD(),
            steps.StripAccents(),
            steps.Lowercase(),
            steps.Replace(library.Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    strip = steps.Strip()
    for code in range(sys.maxunicode + 1):
        if unicodedata.ucd_3_2_0.category(chr(code)) in ("Cn", "Cs"):
            continue
        for text in (chr(code), f"A{chr(code)}B "):
            spaced = released.normalize_str(text)
            wanted = spaced if spaced == " " else strip.normalize_str(spaced)
            assert fold(text) == wanted, hex(code)
