"""The cheapest GPUs for 200 requests per second of V4.1-Flash within TTFT and TPOT objectives.

One to six prompt and one to six decode engines of eight GPUs, on H200 or B200 for either role: 144
candidates. Each serves eight draws of 1,500 requests with the lengths of the Azure conversation hour.

    python -m experiments.search_capacity --config=configs/search_capacity.py --workdir=runs/capacity

One program for all 1,152 scenarios, some three minutes of one core. Expect two prompt engines and one
decode engine on B200; three prompt engines on H200 cost less and are too slow for a third of the
first tokens. `:smoke` tries 16 candidates with 100 requests and step times in seconds.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "search_capacity"
    config.title = "The cheapest cluster that meets the objectives"
    config.model = "v41_flash"
    config.prices = {"H200": 3.0, "B200": 5.0}  # per GPU-hour, any currency; names of hardware
    config.cost = {
        "kind": "roofline",
        "compute_efficiency": 0.289,
        "memory_efficiency": 0.289,
        "exchange_efficiency": 0.289,
    }
    config.engines = {"ranks": 8, "slots": 64}
    config.decode = {"nextn": 3, "acceptance": (0.75, 0.75, 0.75)}
    config.memory = {"kv": "hbm"}
    config.links = {"handoff_order": "fifo"}
    config.prefill = {"step_quota_seconds": 0.2}
    config.quota_seconds = 2.0  # cap of predicted work per prompt engine
    config.search = {"prompt_engines": 6, "decode_engines": 6}
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/azure_llm_2023_conv.csv.gz",
        "requests": 1500,
    }
    config.rate = 200.0  # Poisson arrivals per second; 0 leaves the source's own
    config.draws = 8
    config.warmup_share = 0.25  # of the arrivals, left out of every share
    config.slo = {"ttft": 0.5, "tpot": 0.015}
    config.attainment = 0.95
    config.compile = "optimised"
    if smoke:
        config.model = ""
        config.prices = {"small": 1.0}
        config.cost = {
            "kind": "seconds",
            "prefill_step": 0.0,
            "prefill_token": 1e-3,
            "decode_forms": ((0.01, 1e-3, 0.0),),
        }
        config.engines = {"ranks": 1, "slots": 8}
        config.decode = {}
        config.links = {"handoff_seconds": 1e-3}
        config.memory = {}
        config.prefill = {}
        config.search = {"prompt_engines": 4, "decode_engines": 4}
        config.workload = {
            "kind": "synthetic",
            "requests": 100,
            "rate": 4.0,
            "input_median": 500.0,
            "input_sigma": 0.5,
            "output_median": 60.0,
            "output_sigma": 0.5,
        }
        config.rate, config.draws = 4.0, 3
        config.slo = {"ttft": 2.0, "tpot": 0.02}
        config.compile = "quick"
    config.provenance = (
        ("model", "released", "DeepSeek-V4.1-Flash, its published configuration"),
        ("cost.*_efficiency", "inferred",
         "one share of every peak at which a GB200 meets the published decode point"),
        ("decode.*", "documented", "the chapter, section 11.6.2"),
        ("workload.path", "separate", "lengths of the Azure LLM inference trace 2023"),
        ("prices.*", "assumed", "of the order of public rental prices; give your own"),
        ("*", "assumed", "this experiment"),
    )  # fmt: skip
    if smoke:
        config.provenance = (("*", "assumed", "this experiment"),)
    return config
