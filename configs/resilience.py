"""What one spare decode group buys: goodput through its neighbour's crash and planned departure.

Four prompt engines and up to six decode groups of eight B200 serve V4.1-Flash. The scaling loop
holds as many decode groups as the running requests need, and `spare` more. At 200 s one GPU of a
decode group fails: the whole group is lost, its requests are prefilled again elsewhere, and it
restarts with seven ranks three minutes later. In the other pair of cases the same group leaves as
planned: a minute of grace, then its requests move in one transfer per destination.

    python -m experiments.resilience --config=configs/resilience.py --workdir=runs/resilience

Two programs to compile, about two minutes, and a few seconds per case. `:smoke` is a small service
with step times in seconds.
"""

from ml_collections import config_dict

EVENT = 200.0


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    event = 20.0 if smoke else EVENT
    config = config_dict.ConfigDict()
    config.name = "resilience"
    config.title = "A decode group lost, a decode group leaving: with and without a spare one"
    config.workload = {
        "kind": "synthetic",
        "requests": 300 if smoke else 7500,
        "rate": 5.0 if smoke else 12.5,
        "input_median": 500.0 if smoke else 4000.0,
        "input_sigma": 0.6,
        "input_limit": 2000 if smoke else 32_768,
        "output_median": 60.0 if smoke else 1600.0,
        "output_sigma": 0.4,
        "output_limit": 200 if smoke else 6000,
    }
    config.model = "" if smoke else "v41_flash"
    config.hardware = "" if smoke else "B200"
    config.engines = {
        "prompt": 2 if smoke else 4,
        "completion": 4 if smoke else 6,
        "ranks": 2 if smoke else 8,
        "slots": 4 if smoke else 8,
    }
    config.cost = (
        {
            "kind": "seconds",
            "prefill_step": 0.005,
            "prefill_token": 2e-5,
            "decode_forms": ((0.03, 1e-3, 0.0),),
        }
        if smoke
        else {
            "kind": "roofline",
            "compute_efficiency": 0.5,
            "memory_efficiency": 0.5,
            "exchange_efficiency": 0.5,
            "overhead_seconds": 10e-3,
        }
    )
    config.links = {"handoff_seconds": 1e-3, "handoff_order": "fifo"}
    if smoke:
        config.links.handoff_bytes_per_second = 50e9
        config.memory = {"block_bytes": 113_920}
    config.decode = {"nextn": 3, "acceptance": (0.75, 0.75, 0.75)}
    if smoke:
        config.decode = {}
    capacity = 8.0 if smoke else 60.0
    config.scaling = {
        "completion": {
            "initial": 2 if smoke else 3,
            "minimum": 1 if smoke else 2,
            "maximum": 4 if smoke else 6,
            "capacity": capacity,
            "spare": 0,
        },
        "round_seconds": 5.0 if smoke else 30.0,
        "start_seconds": 15.0 if smoke else 120.0,
        "grace_seconds": 5.0 if smoke else 60.0,
        "hold_above": 0.8,
    }
    group = config.engines.prompt  # the first decode group
    crash = {
        "events": ((event, "gpu", group * config.engines.ranks),),
        "restart_seconds": 15.0 if smoke else 180.0,
    }
    leave = {"events": ((event, "depart", group),)}
    spare = {"completion": {"spare": 1, "initial": 3 if smoke else 4}}
    config.cases = {
        "group_lost,_no_spare": {"failures": crash},
        "group_lost,_one_spare": {"failures": crash, "scaling": spare},
        "group_leaves,_no_spare": {"failures": leave},
        "group_leaves,_one_spare": {"failures": leave, "scaling": spare},
    }
    config.resilience = {"event_seconds": event, "bin_seconds": 2.0 if smoke else 10.0}
    config.slo = {"ttft": 2.0, "tpot": 0.06} if smoke else {"ttft": 4.0, "tpot": 0.02}
    config.warmup_seconds = 0.0
    config.compile = "quick"
    config.provenance = (
        ("model", "released", "DeepInfer configuration of V4.1-Flash"),
        ("hardware", "separate", "NVIDIA B200 peaks, see cost/hardware.py"),
        ("cost.*", "assumed", "half of every peak and 10 ms of overhead per step"),
        ("scaling.grace_seconds", "documented", "the chapter, section 11.5: one minute"),
        ("scaling.hold_above", "documented", "the chapter, section 11.5: 0.8 quota utilisation"),
        ("scaling.*", "assumed", "the chapter gives no numbers"),
        ("cases.*.restart_seconds", "documented", "the chapter, section 11.5: minutes"),
        ("slo.ttft", "separate", "DualPath, arXiv 2602.21548: TTFT 4 s"),
        ("slo.tpot", "assumed", "almost three times what an unhurried request takes"),
        ("*", "assumed", "this experiment"),
    )
    return config
