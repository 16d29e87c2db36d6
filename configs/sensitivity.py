"""One percent more of a cost: derivatives through three services, beside differences.

`alone` is a queue in which nobody overtakes and nobody is batched: derivatives are right.
`batched` lets prompts that wait together share a step: a later start takes more of them along,
a jump that derivatives do not see. `routed` sends prompts to the engine with the least work and
decodes them elsewhere.

    python -m experiments.sensitivity --config=configs/sensitivity.py --workdir=runs/sensitivity

Half a minute of one core. Expect the derivatives of latencies to hold in `alone` only: in `batched`
they are almost three times too large, in `routed` a third too small for prefill. A share within an
objective has derivative zero everywhere. `:smoke` has fewer and shorter runs.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "sensitivity"
    config.title = "Derivatives through the simulator, and where decisions bias them"
    config.draws = 3 if smoke else 16
    config.warmup_share = 0.1  # of the arrivals, left out of every mean
    config.steps = (1e-6, 0.1) if smoke else (1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.2)
    config.compared_step = 0.1 if smoke else 0.03  # of log cost, to both sides
    config.compile = "quick" if smoke else "optimised"
    workload = {
        "kind": "synthetic",
        "requests": 100 if smoke else 1500,
        "rate": 0.7,
        "input_median": 1000.0,
        "input_sigma": 0.0,
        "output_median": 1.0,
        "output_sigma": 0.0,
        "output_limit": 1,
    }
    cost = {
        "kind": "seconds",
        "prefill_step": 0.5,
        "prefill_token": 0.5e-3,
        "decode_forms": ((0.02, 1e-3, 0.0),),
    }
    config.scenarios = {
        "alone": {
            "engines": {"normal": 1, "slots": 8},
            "cost": cost,
            "prefill": {"batch_requests": 1.0, "chunk_multiple": 1e19},
            "workload": workload,
            "costs": ("prefill_step", "prefill_token"),
            "ttft": 3.0,
        },
        "batched": {
            "engines": {"normal": 1, "slots": 256},
            "cost": {**cost, "prefill_step": 0.9, "prefill_token": 0.1e-3},
            "prefill": {"batch_requests": 4.0, "chunk_multiple": 1e19},
            "workload": {**workload, "rate": 1.5},
            "costs": ("prefill_step", "prefill_token"),
            "ttft": 2.0,
        },
        "routed": {
            "engines": {"prompt": 3, "completion": 2, "slots": 16},
            "cost": {**cost, "prefill_step": 0.1, "prefill_token": 0.9e-3},
            "policy": {"prefill": "least_quota", "decode": "two_load"},
            "links": {"handoff_seconds": 1e-3},
            "prefill": {"chunk_multiple": 1e19},
            "workload": {
                **workload,
                "rate": 2.0,
                "input_sigma": 0.6,
                "output_median": 60.0,
                "output_sigma": 0.6,
                "output_limit": 400,
            },
            "costs": ("prefill_token", "prefill_step", "decode_step", "decode_request"),
            "ttft": 3.0,
        },
    }
    config.provenance = (("*", "assumed", "this experiment"),)
    return config
