"""Speed of the engine on this machine: prompts and decoding measured apart, one after the other.

    python -m experiments.benchmark --config=configs/benchmark.py --workdir=runs/benchmark

The trained tiny model continues held-out Python sources, with drafts. Set `drafts` to 0 for plain
decoding, `overlap` to false for the loop in turn. `:smoke` takes a minute, most of it compiling.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "benchmark"
    config.model = "trained_tiny"
    config.checkpoint = "configs/checkpoints/tiny"  # "": random weights and random ids
    config.concurrency = 2 if arg else 8  # requests that decode side by side
    config.prompt = 32  # tokens
    config.answer = 16 if arg else 96  # tokens, ends of sequence ignored
    config.requests = 2 if arg else 32  # in rounds of that many
    config.drafts = 5
    config.overlap = True
    config.temperature = 1.0
    config.format = "bytes"  # of the memory: "bytes" as in service, or "values"
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
