"""Text that every machine has, the standard library's own sources, as tokens of a small BPE.

A file is held out by a hash of its name, so that the split does not depend on order or machine (the
sources themselves differ between Python versions). Files are joined as bos, tokens, eos.
"""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<bos>", "<eos>", "<pad>", "<noise>")  # ids 0 .. 3
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
HELD_OUT_PARTS = 16  # one part of so many is held out


def sources(limit: int = 0) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts) of the standard library, in order of path.

    Args:
      limit: stop after so many characters of training text; 0 reads all, some 11 million.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    training, held_out, size = [], [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        text = path.read_text(errors="replace")
        if is_held_out(name.as_posix()):
            held_out.append(text)
        elif not limit or size < limit:
            training.append(text)
            size += len(text)
    return training, held_out


def is_held_out(name: str) -> bool:
    """True for about one name in `HELD_OUT_PARTS`."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_PARTS == 0


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` ids, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """int32 [N]: all texts, each between bos and eos."""
    found = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([0, *one.ids, 1], np.int32) for one in found])


def batch(stream: np.ndarray, count: int, length: int, random: np.random.Generator) -> np.ndarray:
    """int32 [count, length]: random stretches of `stream` [N].

    Raises:
      ValueError: the stream is shorter than one stretch.
    """
    if len(stream) <= length:
        raise ValueError(
            f"the text has {len(stream)} tokens for a context of {length}; give more text"
        )
    starts = random.integers(0, len(stream) - length, count)
    return stream[starts[:, None] + np.arange(length)]


def stretches(stream: np.ndarray, count: int, length: int) -> np.ndarray:
    """int32 [count, length]: stretches of `stream` [N] at even distances, the same in each call."""
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return stream[starts[:, None] + np.arange(length)]
