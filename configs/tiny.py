"""Generation with the tiny trained model: greedy or sampled, plain or with drafts.

    python -m experiments.generate --config=configs/tiny.py --prompt="def "

The checkpoint, `configs/checkpoints/tiny`, is what `configs/train_tiny.py` made;
measured.json beside it says how good it is.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "tiny"
    config.model = "trained_tiny"
    config.checkpoint = "configs/checkpoints/tiny"
    config.speculate = False
    config.max_new_tokens = 8 if arg else 96
    config.context = 128  # prompt and answer together, the length of the training
    config.temperature = 0.0  # 0: greedy
    config.top_p = 1.0
    config.answers = 1
    config.regex = ""  # the answer must match it
    config.format = "bytes"  # of the memory: "bytes" as in service, or "values"
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
