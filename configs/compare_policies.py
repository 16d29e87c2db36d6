"""Every placement policy on the same stretches of the Mooncake conversation hour.

Four prompt and four completion instances with the step times of configs/w3_mooncake_pd.py, the
hour three times as fast. Prefill policies route to caches of the instances' own; decode policies
follow `affinity_with_recompute`; the services differ in who holds the prefixes. Twelve replicates: stretches of
1,000 requests that do not overlap.

    python -m experiments.compare_policies --config=configs/compare_policies.py --workdir=runs/policies

Two minutes on two cores: four programs to compile, then 252 runs. Expect policies that predict work
or see prefixes to be 20 to 30 points ahead of round robin, affinity alone to fail in one of the
stretches, and intervals from pairs to be half as wide as those without. `:smoke`
compares three policies of each kind on three replicates of 100 requests.
"""

from ml_collections import config_dict

BLOCK = 64
TOKENS = 16_384 * BLOCK  # of paged KV per instance


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    smoke = bool(arg)
    config = config_dict.ConfigDict()
    config.name = "compare_policies"
    config.title = "Placement policies on the same requests"
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/mooncake_conversation_trace.jsonl.gz",
        "rate_factor": 3.0,
    }
    config.replicates = 3 if smoke else 12
    config.requests = 100 if smoke else 1000  # of one replicate
    config.warmup_share = 0.2  # of a replicate's arrivals, left out: its caches are empty at first
    config.engines = {"prompt": 4, "completion": 4, "slots": 32}
    config.cost = {
        "kind": "seconds",
        "prefill_step": 16.50142e-3,
        "prefill_token": 15.18344e-6,
        "prefill_pair": 2 * 4.209989e-10,
        "decode_forms": ((5.74e-3, 0.1e-3, 54.01e-3 / TOKENS),),
    }
    config.memory = {"block_tokens": BLOCK, "block_bytes": BLOCK * 131_072}
    config.cache = {"scope": "local", "capacity_blocks": 16_384.0, "reserve": 1}
    config.links = {
        "handoff_bytes_per_second": 50e9,
        "handoff_seconds": 1e-3,
        "handoff_order": "fifo",
    }
    config.prefill = {"batch_tokens": 8192.0, "chunk_multiple": 1.0}
    config.policy = {"prefill": "affinity_with_recompute", "decode": "two_load"}
    config.compare = {
        "prefill": ("round_robin", "local_affinity", "dynamo_cost") if smoke else (),  # (): all
        "decode": ("round_robin", "two_load", "least_tokens") if smoke else (),
        "services": {
            "routed,_local": {},
            "pull,_local": {"policy": {"prefill": "pull"}, "tiers": {"quota_seconds": (4.0,)}},
            "pull,_shared": {
                "policy": {"prefill": "pull"},
                "tiers": {"quota_seconds": (4.0,)},
                "cache": {"scope": "shared", "capacity_blocks": 65_536.0},
                "links": {"fetch_bytes_per_second": 50e9, "fetch_order": "fifo"},
            },
            "pull,_no_cache": {
                "policy": {"prefill": "pull"},
                "tiers": {"quota_seconds": (4.0,)},
                "cache": None,  # takes the section away
            },
        },
    }
    if smoke:
        config.compare.services = {}
    config.baselines = {
        "prefill": "round_robin",
        "decode": "round_robin",
        "service": "routed, local",
    }
    config.slo = {"ttft": 4.0, "tpot": 0.025}
    config.compile = "quick" if smoke else "optimised"
    config.provenance = (
        ("workload.path", "separate", "Mooncake FAST'25 release, conversation trace"),
        ("cost.decode_forms", "assumed", "as configs/w3_mooncake_pd.py, and 0.1 ms per request"),
        ("cost.*", "separate", "NVIDIA Dynamo replay 1.4.2, defaults of its mock engine"),
        ("cache.capacity_blocks", "separate", "NVIDIA Dynamo replay 1.4.2"),
        ("slo.ttft", "separate", "DualPath, arXiv 2602.21548"),
        ("*", "assumed", "this experiment"),
    )  # fmt: skip
    return config
