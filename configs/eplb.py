"""Expert placement (EPLB): how even it makes the ranks, and how fast it decides.

    python -m experiments.eplb --config=configs/eplb.py --workdir=runs/eplb
    python -m experiments.eplb --config=configs/eplb.py --reference=EPLB/eplb.py

About two minutes; `:smoke` takes seconds. The second command times deepseek-ai/EPLB's own file
(it needs torch) instead of our plain loops. Expect 1.0 at best for balance, and a decision for 58
layers in some milliseconds.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "eplb"
    config.steps = 8 if arg else 32  # of a window: one to decide by, the next to judge by
    # DeepSeek-V3: 58 layers of 256 experts in 8 groups, 32 copies on 32 ranks of 4 nodes
    config.large = config_dict.create(
        layers=4 if arg else 58, experts=256, slots=288, ranks=32, nodes=4, groups=8
    )
    config.rows = 16384  # (token, expert) pairs of a layer and step, synthetic
    config.skews = (0.0, 0.5, 1.0)  # exponents of Zipf's law over the experts of a layer
    config.burst = 4.0  # shape of the gamma by which an expert's share varies from step to step
    # the trained model, on held-out text: 16 rows of 128 tokens a step
    config.model = "trained_tiny"
    config.checkpoint = "configs/checkpoints/tiny"
    config.tiny = config_dict.create(slots=12, ranks=4, nodes=2, groups=4)
    config.sequences = 16
    config.tokens = 128
    config.repeats = 1 if arg else 5
    config.provenance = (
        (
            "large.*",
            "documented",
            "deepseek-ai/DeepSeek-V3 config.json; EPLB's README for the rest",
        ),
        ("*", "assumed", "this experiment"),
    )
    return config
