"""Co-located vLLM-like workers under the Azure conversation hour, as Dynamo's replay sees them.

Shows what eight workers that mix prompt chunks into decode steps make of 19,366 real requests, and
how fast the simulator is: this is workload W2 of the comparison in experiments/benchmark_simulator.

    python -m experiments.simulate --config=configs/w2_azure.py --workdir=runs/w2

Half a minute, nearly all of it compilation; the simulation takes a fraction of a second. Expect a
TTFT of about 40 ms, a TPOT of 6 ms, and workers that are busy two thirds of the time with hardly a
request each: the step's fixed time dominates. `:smoke` takes the first 500 requests.
"""

from ml_collections import config_dict

TOKENS = 16_384 * 64  # of paged KV per worker


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "w2_azure"
    config.title = "Eight co-located workers, Azure conversation hour"
    config.workload = {
        "kind": "trace",
        "path": "configs/traces/azure_llm_2023_conv.csv.gz",
        "requests": 500 if arg else 0,
        "rate_factor": 1.0,
    }
    config.engines = {"mixed": 8, "slots": 256}
    config.policy = {"prefill": "round_robin"}
    config.cost = {
        "kind": "seconds",
        "prefill_step": 16.50142e-3,
        "prefill_token": 15.18344e-6,
        "prefill_pair": 2 * 4.209989e-10,
        "decode_forms": ((5.74e-3, 0.0, 54.01e-3 / TOKENS),),
    }
    config.memory = {"block_tokens": 64, "kv": "blocks", "kv_blocks": 16_384}
    config.prefill = {"batch_tokens": 8192.0, "chunk_multiple": 1.0}
    config.slo = {"ttft": 1.0, "tpot": 0.05}
    config.warmup_seconds = 0.0
    config.compile = "quick" if arg else "optimised"
    dynamo = "NVIDIA Dynamo replay 1.4.2, defaults of its mock engine"
    polynomial = (
        "the polynomial model of the same, ms: 4.21e-7 n^2 + 1.518e-2 n + 16.5 per prompt step of n"
        " tokens; decode 5.74 + 54.01 p - 25.74 p^2 of KV use p, here its tangent at p = 0"
    )
    config.provenance = (
        ("workload.path", "separate", "Azure LLM inference trace 2023, conversation"),
        ("engines.mixed", "separate", "workload W2: eight workers"),
        ("engines.slots", "separate", dynamo),
        ("policy.*", "separate", "workload W2: round robin"),
        ("cost.*", "separate", polynomial),
        ("memory.*", "separate", dynamo),
        ("prefill.*", "separate", dynamo + "; vLLM cuts chunks at any token"),
        ("slo.*", "assumed", "an interactive service"),
        ("*", "assumed", "this experiment"),
    )
    return config
