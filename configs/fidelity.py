"""Real vLLM runs beside their simulation: from kernel tables alone, and with a step model fitted.

    python -m experiments.fidelity --config=configs/fidelity.py --workdir=runs/fidelity

The runs are LLMServingSim's, vLLM 0.19 on real GPUs. A few minutes, nearly all of it compilation.
Expect median errors of 2 to 9 % of E2E on requests that were not fitted. `:smoke` takes one run and
does not fit.
"""

from ml_collections import config_dict

RUNS = "configs/traces/vllm_groundtruth"


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "fidelity"
    config.title = "Real vLLM runs and their simulation"
    names = ("RTXPRO6000_Llama-3.1-8B", "RTX4090_Llama-3.1-8B")
    names += ("RTXPRO6000_Qwen3-30B-A3B-Instruct-2507",)
    config.runs = tuple(f"{RUNS}/{name}" for name in (names[:1] if arg else names))
    config.fit_steps = 0 if arg else 8  # damped Gauss-Newton steps; 0: tables only
    config.fit_requests = 150  # the first ones are fitted, the others scored
    config.provenance = (
        ("runs", "separate", "LLMServingSim, bench/examples and profiler/perf, MIT"),
        ("*", "assumed", "this experiment"),
    )
    return config
