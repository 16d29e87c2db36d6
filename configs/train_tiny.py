"""A two-million-parameter model of Python sources, and its drafter, trained on a CPU.

    python -m experiments.train_tiny --config=configs/train_tiny.py --workdir=runs/tiny

`:smoke` takes a few steps on a little text: enough to see everything run, not to learn.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "train_tiny"
    config.model = "trained_tiny"
    config.characters = 400_000 if smoke else 0  # of training text; 0: all
    config.context = 64 if smoke else 128
    config.batch = 2 if smoke else 4
    config.log_every = 2 if smoke else 25
    config.save_every = 2 if smoke else 200  # steps between states to go on from
    config.backbone = {
        "steps": 4 if smoke else 850,
        "rate": 5e-3,
        "balance_speed": 2e-3,  # of the routing bias, per step
    }
    config.draft = {
        "steps": 4 if smoke else 700,
        "rate": 5e-3,
        "anchors": 4 if smoke else 24,  # blocks per sequence
        "distilled": 0.9,  # share of the backbone's distribution in the target, the text the rest
    }
    config.held_out = {
        "stretches": 8 if smoke else 64,
        "prompts": 1 if smoke else 24,
        "calibration": 1 if smoke else 24,  # prompts, others, for the confidence head's scale
        "prompt": 32 if smoke else 64,
        "generated": 16 if smoke else 64,
    }
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
