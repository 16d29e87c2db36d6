"""The chapter's six exercises (section 11.7): what each assumes.

Every exercise is predicted from formulas, simulated, and answered with the numbers of its run.

    python -m experiments.exercises --config=configs/exercises.py --workdir=runs/exercises

A minute or two on two cores, most of it compiling a dozen small programs; `--exercise=N` runs one.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "exercises"
    config.title = "Six exercises: predicted, simulated, answered"
    config.exercise_1 = {"decode_workers": (1, 2) if smoke else (1, 2, 4)}
    config.exercise_2 = {"hit_tokens": (256, 768) if smoke else tuple(range(128, 769, 128))}
    config.exercise_3 = {"prompt": 902, "reserve": 134, "keep": 140}
    config.exercise_4 = {
        "requests": 1000 if smoke else 20_000,
        "rate": 0.8,  # requests per second
        "input_tokens": 1024,
        "tokens_per_second": 1000.0,
        "request_hits": 0.5,
        "hit_blocks": (1, 6) if smoke else (1, 2, 3, 4, 5, 6),
    }
    config.exercise_5 = {
        "changed_requests": 48,
        "conditional_acceptance": 0.97,
        "requests": 48 if smoke else 480,
        "output_tokens": 40 if smoke else 100,
    }
    config.exercise_6 = {
        "tag": "documented",
        "parameter": "policy.*",
        "source": "*",
        "records": (),  # config.json files of runs to search besides the shipped configs
        "requests": 60 if smoke else 600,
        "groups": 20 if smoke else 200,
        "prefix_tokens": 768,
        "own_tokens": 256,
        "engines": 4,
    }
    lab = "the chapter, lab 23: everything else is as assigned there"
    config.provenance = (
        ("exercise_1.*", "documented", lab),
        ("exercise_2.*", "documented", lab),
        ("exercise_3.*", "documented", "the chapter, section 11.4"),
        ("exercise_5.changed_requests", "documented", "the chapter, lab 25: the dominated record"),
        ("*", "assumed", "this experiment"),
    )
    return config
