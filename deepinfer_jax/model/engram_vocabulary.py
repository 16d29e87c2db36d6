"""The compressed vocabulary of Engram: tokens that read alike share one id.

Case, accents, compatibility forms and runs of blanks are folded away; ids follow the order in which
spellings first appear. Source: the released DeepSeek-V4.1-Flash model.

Folding follows Python's Unicode tables, the released one those of Unicode 9: characters younger
than that may fold differently. A vocabulary of another size than the configured one is refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from deepinfer_jax.config import EngramConfig

_BLANKS = re.compile(r"[ \t\r\n]+")
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `tokenizers.Tokenizer` is one."""

    def get_vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of a sequence of ids."""

    def id_to_token(self, id: int) -> str | None:
        """Vocabulary piece of an id."""


def token_map(tokenizer: Tokenizer, config: EngramConfig) -> np.ndarray:
    """Compressed id of every token id, int32 [vocabulary size].

    Raises:
      ValueError: the tokenizer folds to another number of ids than the configuration says. The hash
        depends on that number, so no table of the configured model would fit.
    """
    pieces = (
        (_text(tokenizer, i), _piece(tokenizer, i)) for i in range(tokenizer.get_vocab_size())
    )
    compressed = compress(pieces)
    found = len(np.unique(compressed))
    if found != config.compressed_vocab_size:
        raise ValueError(
            f"the tokenizer folds to {found} ids and engram compressed_vocab_size is "
            f"{config.compressed_vocab_size}; give the tokenizer the model was trained with"
        )
    return compressed


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _piece(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.id_to_token(token) or ""


def compress(pieces: Iterable[tuple[str, str]]) -> np.ndarray:
    """Compressed ids of a vocabulary, int32, one per piece.

    Args:
      pieces: for each token id in order, its decoded text and its raw vocabulary piece. The piece
        is used where the text holds part of a character and so cannot be decoded.
    """
    ids: dict[str, int] = {}
    keys = (piece if _UNDECODABLE in text else fold(text) or text for text, piece in pieces)
    return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int32)


def fold(text: str) -> str:
    """Text without case, accents and surrounding blanks. A lone blank stays; "" may result.

    >>> fold(" Thé\\tEND ")
    'the end'
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Letter by letter, so that a capital sigma never becomes the form for the end of a word.
    letters = (c.lower() for c in decomposed if not unicodedata.category(c).startswith("M"))
    spaced = _BLANKS.sub(" ", "".join(letters))
    return spaced if spaced == " " else spaced.strip(_WHITE_SPACE)
