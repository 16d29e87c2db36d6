"""Greedy decoding with the tiny trained model, plain or with drafts.

    python -m experiments.generate --config=configs/tiny.py --prompt="def "

The checkpoint is what `experiments.train_tiny` leaves in its workdir. `:smoke` makes few tokens.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "tiny"
    config.model = "trained_tiny"
    config.checkpoint = "runs/tiny/checkpoint"
    config.speculate = False
    config.max_new_tokens = 8 if arg else 96
    config.context = 256  # prompt and answer together, the length of the training
    config.chunk = 64  # prompt tokens per step
    config.format = "bytes"  # of the memory: "bytes" as in service, or "values"
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
