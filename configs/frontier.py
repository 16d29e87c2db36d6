"""Splits of 17 engines between prefill and decode at 16 arrival rates: 256 clusters in one call.

Shows how much traffic within a latency objective a fixed number of GPUs carries, which share of
them should do prefill, and what a faster answer for each user costs in throughput. V4.1-Flash on
GB200s, one engine per tray of four GPUs, 17 of a rack's 18 trays; requests have the lengths of the
Azure conversation hour and Poisson arrivals, the same draw at every rate.

    python -m experiments.frontier --config=configs/frontier.py --workdir=runs/frontier

About three minutes: one compilation for all 256 points. Expect the best split to lie well inside
the range and to move with the TPOT objective. `:smoke` runs 16 points of a smaller service.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "frontier"
    config.title = "How to split 17 engines, and what a faster answer costs"
    config.model = "v41_flash"
    config.hardware = "GB200"
    config.cost = {
        "kind": "roofline",
        "compute_efficiency": 0.289,
        "memory_efficiency": 0.289,
        "exchange_efficiency": 0.289,
    }
    config.engines = {"total": 5 if smoke else 17, "ranks": 4, "slots": 128}
    config.decode = {"nextn": 3, "acceptance": (0.75, 0.75, 0.75)}
    config.tiers = {"quota_seconds": (2.0,)}
    config.prefill = {"step_quota_seconds": 0.2}
    config.links = {"handoff_order": "fifo"}
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/azure_llm_2023_conv.csv.gz",
        "requests": 400 if smoke else 5000,
    }
    config.sweep = {
        "lowest_rate": 40.0 if smoke else 100.0,  # requests per second, first of a geometric series
        "highest_rate": 320.0 if smoke else 800.0,
        "rates": 4 if smoke else 16,
        "prompt_engines": (1, 2, 3, 4) if smoke else tuple(range(1, 17)),
        "tpot_limits_ms": (7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 20.0),
        "single_runs": 0 if smoke else 256,  # points run again one by one, for the comparison
    }
    config.slo = {"ttft": 0.5, "tpot": 0.01}
    config.attainment = 0.9  # share of requests within the objective that counts as served
    config.warmup_share = 0.25  # of the arrivals, left out of every number
    config.provenance = (
        ("model", "released", "DeepSeek-V4.1-Flash, its published configuration"),
        ("hardware", "separate", "NVIDIA GB200 NVL72 datasheet, see cost/hardware.py"),
        ("cost.*_efficiency", "inferred",
         "one share of every peak at which a GB200 meets the published decode point"),
        ("cost.kind", "assumed", "roofline of counted operations and bytes"),
        ("decode.acceptance", "documented", "75 % per position, the chapter, section 11.6.2"),
        ("decode.nextn", "documented", "three drafts, the chapter, section 11.6.2"),
        ("workload.path", "separate", "lengths of the Azure LLM inference trace 2023"),
        ("*", "assumed", "this experiment"),
    )  # fmt: skip
    return config
