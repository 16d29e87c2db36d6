"""Four prompt and four completion instances under the Mooncake conversation hour.

Shows a prefill/decode split with local prefix caches, Dynamo's cache-aware routing cost and a
hand-off link, on 12,031 real requests whose prompts share prefixes. This is workload W3 of the
comparison in experiments/benchmark_simulator.

    python -m experiments.simulate --config=configs/w3_mooncake_pd.py --workdir=runs/w3

A minute, nearly all of it compilation. Expect prompt instances busy a quarter of the time, a median
TTFT of a third of a second with a tail of several (the longest prompts alone compute that long),
and 0.17 of the tokens from caches, not the 0.37 of a boundless shared one: each instance keeps a
million tokens and sees its own share of the requests only. `:smoke` takes the first 400 requests.
"""

from ml_collections import config_dict

BLOCK = 64
TOKENS = 16_384 * BLOCK  # of paged KV per instance
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # keys and values, 32 layers, 8 KV heads of 128, BF16


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "w3_mooncake_pd"
    config.title = "Four prompt and four completion instances, Mooncake conversation hour"
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/mooncake_conversation_trace.jsonl.gz",
        "requests": 400 if arg else 0,
        "rate_factor": 1.0,
    }
    config.engines = {"prompt": 4, "completion": 4, "slots": 256}
    config.policy = {
        "prefill": "dynamo_cost",
        "decode": "least_tokens",
        "parameters": {"overlap_weight": 1.0},
    }
    config.cost = {
        "kind": "seconds",
        "prefill_step": 16.50142e-3,
        "prefill_token": 15.18344e-6,
        "prefill_pair": 2 * 4.209989e-10,
        "decode_forms": ((5.74e-3, 0.0, 54.01e-3 / TOKENS),),
    }
    config.memory = {
        "block_tokens": BLOCK,
        "kv": "blocks",
        "kv_blocks": 16_384,
        "block_bytes": BLOCK * BYTES_PER_TOKEN,
    }
    config.cache = {"scope": "local", "capacity_blocks": 16_384.0, "reserve": 1}
    config.links = {
        "handoff_bytes_per_second": 50e9,
        "handoff_seconds": 1e-3,
        "handoff_order": "fifo",
    }
    config.prefill = {"batch_tokens": 8192.0, "chunk_multiple": 1.0}
    config.slo = {"ttft": 4.0, "tpot": 0.05}
    config.warmup_seconds = 0.0
    config.compile = "quick" if arg else "optimised"
    dynamo = "NVIDIA Dynamo replay 1.4.2, defaults of its mock engine"
    config.provenance = (
        ("workload.path", "separate", "Mooncake FAST'25 release, conversation trace"),
        ("engines.slots", "separate", dynamo),
        ("engines.*", "separate", "workload W3: four prefill and four decode workers"),
        ("policy.prefill", "separate", "Dynamo KV router"),
        ("policy.parameters.*", "separate", "Dynamo KV router, default weight"),
        ("policy.decode", "assumed", "the peer routes decode by its own load estimate"),
        ("cost.*", "separate", dynamo + "; see configs/w2_azure.py"),
        ("memory.block_bytes", "assumed", "an 8 B model with 8 KV heads in BF16"),
        ("memory.*", "separate", dynamo),
        ("cache.reserve", "separate", "vLLM recomputes at least the last token"),
        ("cache.*", "separate", "prefixes live in the instance's own KV pool"),
        ("links.handoff_bytes_per_second", "separate", "one 400 Gb/s NIC per instance"),
        ("links.*", "assumed", "set-up of a transfer; one at a time per sender"),
        ("prefill.*", "separate", dynamo),
        ("slo.*", "separate", "DualPath, arXiv 2602.21548: TTFT 4 s, TPOT 50 ms"),
        ("*", "assumed", "this experiment"),
    )
    return config
