"""DeepSeek-V4.1-Flash on six nodes: prefix caches of their own, or one shared between them?

Shows the same hour of real conversations (Mooncake's trace, sped up) on four prompt and two
completion engines of eight B200 each, three times: requests follow their prefix to the engine that
holds it; they go where the load is least and find what that engine happens to hold; any engine
fetches any prefix from a shared store. Step times come from the model's own operation counts on the
hardware's peaks.

    python -m experiments.simulate --config=configs/quickstart.py --workdir=runs/quickstart

Two minutes on two cores, most of it compilation (three shapes). Expect the share of requests with a
hit, of blocks and of tokens to be three different numbers. Affinity and the shared cache find what
an unbounded cache finds (0.37 of the tokens), placement by load alone finds much less. `:smoke`
takes the first 300 requests and two of the cases.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "quickstart"
    config.title = "V4.1-Flash on six B200 nodes: local prefix caches or a shared one"
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/mooncake_conversation_trace.jsonl.gz",
        "requests": 300 if arg else 0,
        "rate_factor": 8.0,
    }
    config.model = "v41_flash"
    config.hardware = "B200"
    config.engines = {"prompt": 4, "completion": 2, "ranks": 8, "slots": 128}
    config.cost = {
        "kind": "roofline",
        "compute_efficiency": 0.5,
        "memory_efficiency": 0.5,
        "exchange_efficiency": 0.5,
        "overhead_seconds": 2e-3,
    }
    config.memory = {"kv": "hbm", "hbm_share": 0.9, "reserved_gib": 4.0}
    config.cache = {"match_seconds": 2e-3, "reserve": 134, "swa": True}
    config.prefill = {"step_quota_seconds": 0.3}
    config.links = {"handoff_seconds": 1e-3, "handoff_order": "fifo"}
    config.decode = {"nextn": 3, "acceptance": (0.75, 0.75, 0.75)}
    config.policy = {"prefill": "pull", "decode": "two_load"}
    config.cases = {
        "local_affinity": {
            "cache": {"scope": "local", "capacity_gib": 400.0},
            "policy": {"prefill": "local_affinity"},
        },
        "local_by_load": {
            "cache": {"scope": "local", "capacity_gib": 400.0},
            "policy": {"prefill": "least_quota"},
        },
        "shared_cache": {
            "cache": {"scope": "shared", "write_back_seconds": 0.05},
            "links": {"fetch_seconds": 5e-3, "fetch_order": "fifo"},
        },
    }
    if arg:
        del config.cases.local_by_load
    config.slo = {"ttft": 4.0, "tpot": 0.05}
    config.warmup_seconds = 0.0
    config.compile = "quick"
    config.capacity = {
        "prefill_tokens_per_second_per_gpu": 40_000.0,
        "decode_tokens_per_second_per_gpu": 5000.0,
        "utilisation": 0.8,
    }
    config.provenance = (
        ("workload.path", "separate", "Mooncake FAST'25 release, conversation trace"),
        (
            "workload.rate_factor",
            "assumed",
            "prompt engines busy most of the time, no queue",
        ),
        ("model", "released", "DeepInfer configuration of V4.1-Flash"),
        ("hardware", "separate", "NVIDIA B200 peaks, see cost/hardware.py"),
        ("cost.*", "assumed", "half of every peak; the one published decode point needs 0.29"),
        ("cache.reserve", "documented", "the chapter, section 11.3: window and backtracking"),
        ("cache.swa", "documented", "the chapter, section 11.3: a hit needs the state at its end"),
        ("prefill.step_quota_seconds", "separate", "DualPath compute quota"),
        ("decode.nextn", "documented", "the chapter, section 11.6.3"),
        ("decode.acceptance", "inferred", "tau of 3.25 read as conditional acceptance 0.75"),
        ("policy.*", "documented", "the chapter, section 11.5"),
        ("slo.*", "separate", "DualPath, arXiv 2602.21548: TTFT 4 s, TPOT 50 ms"),
        ("capacity.utilisation", "documented", "the chapter, section 11.2.1"),
        ("capacity.*", "inferred", "one GPU under this cost model, evenly loaded"),
        ("cases.*.capacity_gib", "assumed", "600 GiB of a prompt node are left beside the weights"),
        ("*", "assumed", "this experiment"),
    )
    return config
