"""The trained tiny model with and without drafts, 1 to 16 requests side by side.

    python -m experiments.sweep --config=configs/sweep.py --workdir=runs/sweep

`point` holds the settings of configs/benchmark.py; those named in `grid` take each of its values.
About a minute a point, most of it compiling; `:smoke` has two points.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "sweep"
    config.point = config_dict.ConfigDict(
        {
            "model": "trained_tiny",
            "checkpoint": "configs/checkpoints/tiny",
            "concurrency": 2,
            "prompt": 32,
            "answer": 16 if arg else 96,
            "requests": 2 if arg else 32,
            "drafts": 5,
            "overlap": True,
            "temperature": 1.0,
            "format": "bytes",
        }
    )
    config.grid = config_dict.ConfigDict(
        {"concurrency": (2,) if arg else (1, 2, 4, 8, 16), "drafts": (0, 5)}
    )
    config.repeats = 1 if arg else 3  # passes over the grid
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
