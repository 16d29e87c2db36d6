"""NVIDIA NeMo AutoModel's Engram as an independent answer (the `oracle` extra).

`python -m tests.model.engram_nemo` writes tests/testdata/engram_fixture.json again.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

FIXTURE = pathlib.Path(__file__).parents[1] / "testdata" / "engram_fixture.json"

# Spellings that must meet, an accent, a lone blank, and a piece that cannot be decoded.
VOCABULARY = ["[UNK]", " The", "the", "THE", "é", "E", " ", "x", "\ufffd"]
SIZES = {
    "layer_ids": [1, 14],
    "num_embeddings": [113, 253],
    "max_ngram": 4,
    "num_heads": 2,
    "head_dim": 4,
    "vocab_size": 11,
    "pad_token_id": 2,
    "compressed_vocab_size": 6,
}
TOKENS = [7, 1, 4, 3, 8, 7]
IS_TEXT = [True, True, False, False, True, True]


def text_config(**changes: Any) -> Any:
    """NeMo's configuration with the sizes above, a hidden width of 8 and two streams."""
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41TextConfig

    ours = {f"engram_{name}": value for name, value in SIZES.items()}
    ours["engram_max_ngram_size"] = ours.pop("engram_max_ngram")
    ours["engram_n_heads"] = ours.pop("engram_num_heads")
    others = {"hidden_size": 8, "hc_mult": 2, "dtype": "float32"}
    return DeepseekV41TextConfig(**(ours | others | changes))


def tokenizer(vocabulary: list[str]) -> Any:
    """A `tokenizers.Tokenizer` whose pieces are whole words."""
    from tokenizers import Tokenizer, models

    pieces = {piece: token for token, piece in enumerate(vocabulary)}
    return Tokenizer(models.WordLevel(pieces, unk_token="[UNK]"))


def hash_module(config: Any, vocabulary: list[str]) -> Any:
    """NeMo's hash of all Engram layers."""
    from nemo_automodel.components.models.deepseek_v41.engram import DeepseekV41NgramHash
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(vocabulary), unk_token="[UNK]")
    return DeepseekV41NgramHash(config, fast)


def fixture() -> dict[str, Any]:
    """Constants and rows of a small vocabulary, with the inputs that gave them."""
    import torch

    module = hash_module(text_config(), VOCABULARY)
    mask = torch.tensor([IS_TEXT])
    rows = module(torch.tensor([TOKENS]), token_mask=mask)[0]  # [Q, layers, rows per token]
    names = ("token_map", "primes", "offsets", "multipliers")
    return {
        "made_by": "python -m tests.model.engram_nemo, with nemo-automodel 0.7.0",
        "sizes": SIZES,
        "vocabulary": VOCABULARY,
        "tokens": TOKENS,
        "is_text": IS_TEXT,
        **{name: getattr(module, name).tolist() for name in names},
        "rows": rows[mask[0]].transpose(0, 1).tolist(),  # [layers, text tokens, rows per token]
    }


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(fixture(), indent=1) + "\n")
