"""Three weeks of chats and agents under two retentions: what 3 days instead of 7 cost, and in which unit.

    python -m experiments.retention --config=configs/retention.py --workdir=runs/retention

Three assumptions on how long users stay away, five seeds each. A few minutes, after one compilation.
Expect the loss in points, the relative loss and the growth of tokens to compute to be three different
numbers. `:smoke` takes a few hundred requests.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "retention"
    config.title = "Retention of 7 days and of 3"
    config.workload = {
        "requests": 600 if smoke else 60_000,
        "conversations": 120 if smoke else 7500,
        "days": 30.0,
        "agent_share": 0.05,
        "leave": 0.05,
    }
    config.cases = {
        "half_a_day_away": {"away_days": 0.5},
        "one_day_away": {"away_days": 1.0},
        "two_days_away": {"away_days": 2.0},
    }
    config.seeds = 2 if smoke else 5
    config.days = (7.0, 3.0)  # TTL of chats
    config.curve_days = (7.0, 3.0) if smoke else (1.0, 2.0, 3.0, 5.0, 7.0, 10.0)
    config.agent_days = 3.0
    config.sweep_seconds = 3600.0
    config.counted_days = 7.0  # at the end
    config.service = {
        "engines": {"mixed": 1},
        # So fast that no answer is still under way when its user replies: hours count here.
        "cost": {"kind": "seconds", "prefill_step": 1e-6, "prefill_token": 1e-9,
                 "decode_forms": ((1e-6, 0.0, 0.0),)},
    }  # fmt: skip
    config.cache = {"scope": "shared", "publish_output": True}
    config.provenance = (
        ("days", "documented", "the chapter, sections 11.2 and 11.3.2: 7 days, about 3"),
        ("agent_days", "documented", "the chapter, section 11.3.2: TTL of agent traffic"),
        ("*", "assumed", "this experiment; no trace of returning users is public"),
    )
    return config
