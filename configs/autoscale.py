"""What scaling with the load gives up and saves: two short days, engines held, scaled, scaled with a spare.

Requests come in two days of twenty minutes, ten a second on average, between 2 and 18. Prompt engines
follow the new prompt tokens of a round, completion engines the running requests, each within limits
per round; an engine takes 40 s to start and a departing completion engine has 10 s of grace.

    python -m experiments.autoscale --config=configs/autoscale.py --workdir=runs/autoscale

Two programs to compile, half a minute, and some seconds per case. Expect engines to rise after the
load does: 48 % of the GPU-hours are saved and 5 % of the requests, those of the mornings, miss the
objectives; with a spare engine in each pool 41 % are saved and none miss. `:smoke` is one day of a
tenth of the requests.
"""

from ml_collections import config_dict

DYNAMO = "NVIDIA Dynamo replay 1.4.2, defaults of its mock engine; see configs/w2_azure.py"
TOKENS = 16_384 * 64


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "autoscale"
    config.title = "Engines that follow the day: held, scaled, scaled with a spare"
    config.workload = {
        "kind": "synthetic",
        "arrivals": "diurnal",
        "shape": {"amplitude": 0.8, "period_seconds": 240.0 if smoke else 1200.0},
        "requests": 2400 if smoke else 24_000,
        "rate": 10.0,
        "input_median": 8000.0,
        "input_sigma": 0.8,
        "input_limit": 32_768,
        "output_median": 300.0,
        "output_sigma": 0.6,
        "output_limit": 2000,
    }
    config.engines = {"prompt": 8, "completion": 10, "slots": 32}
    config.cost = {
        "kind": "seconds",
        "prefill_step": 16.50142e-3,
        "prefill_token": 15.18344e-6,
        "prefill_pair": 2 * 4.209989e-10,
        "decode_forms": ((5.74e-3, 0.0, 54.01e-3 / TOKENS),),
    }
    config.prefill = {"batch_tokens": 8192.0}
    config.links = {"handoff_seconds": 5e-3}
    pools = {
        "prompt": {"initial": 3, "minimum": 2, "maximum": 8, "capacity": 33_000.0, "step_up": 2},
        "completion": {"initial": 2, "minimum": 1, "maximum": 10, "capacity": 8.0, "step_up": 2},
    }
    scaling = pools | {
        "round_seconds": 5.0 if smoke else 20.0,
        "start_seconds": 10.0 if smoke else 40.0,
        "grace_seconds": 3.0 if smoke else 10.0,
        "hold_above": 0.8,
    }
    spare = {"prompt": {"spare": 1, "initial": 4}, "completion": {"spare": 1, "initial": 3}}
    config.cases = {
        "all_held": {},
        "scaled": {"scaling": scaling},
        "scaled,_one_spare": {"scaling": {k: scaling[k] | spare.get(k, {}) for k in pools} | {
            k: v for k, v in scaling.items() if k not in pools
        }},
    }  # fmt: skip
    config.slo = {"ttft": 2.0, "tpot": 0.05}
    config.compile = "quick"
    config.provenance = (
        ("cost.*", "separate", DYNAMO),
        ("cases.*.hold_above", "documented", "the chapter, section 11.5: 0.8 quota utilisation"),
        ("cases.*", "assumed", "the chapter gives no numbers"),
        ("slo.*", "assumed", "an interactive service"),
        ("*", "assumed", "this experiment"),
    )
    return config
