"""Coding agents on two nodes: what changes when a session waits for its answers.

Shows agent sessions with the means of DualPath's trace (157 rounds, contexts that grow to 67k tokens,
nearly all of each prompt cached) twice: closed, where a round is sent after the answer before it and
the tool's time, as agents do; and open, where the same rounds arrive as if answers took no time.

    python -m experiments.simulate --config=configs/agents.py --workdir=runs/agents

A minute or two, most of it compilation. Expect the same hits in both, and latencies of the open case
that no agent would ever see: its arrivals do not slow down when the service does, so rounds of a
session overtake each other and queue. A load test that replays agents by the clock measures that
queue. `:smoke` takes a few short sessions.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg not in ("", "smoke"):
        raise ValueError(f"variant {arg!r} is unknown: leave it out or use smoke")
    config = config_dict.ConfigDict()
    config.name = "agents"
    config.title = "Agent sessions that wait for their answers, and that do not"
    config.workload = {
        "kind": "agents",
        "sessions": 12 if arg else 120,
        "rounds": 12 if arg else 157,
        "rate": 0.5,
        "closed_loop": True,
    }
    config.model = "v41_flash"
    config.hardware = "B200"
    config.engines = {"prompt": 1, "completion": 1, "ranks": 8, "slots": 64}
    config.cost = {
        "kind": "roofline",
        "compute_efficiency": 0.5,
        "memory_efficiency": 0.5,
        "exchange_efficiency": 0.5,
        "overhead_seconds": 2e-3,
    }
    config.memory = {"kv": "hbm", "hbm_share": 0.9, "reserved_gib": 4.0}
    config.cache = {"match_seconds": 2e-3, "reserve": 134, "swa": True, "scope": "shared"}
    config.prefill = {"step_quota_seconds": 0.3}
    config.links = {"handoff_seconds": 1e-3, "handoff_order": "fifo", "fetch_seconds": 5e-3}
    config.decode = {"nextn": 3, "acceptance": (0.75, 0.75, 0.75)}
    config.policy = {"prefill": "pull", "decode": "two_load"}
    config.cases = {
        "closed": {"workload": {"closed_loop": True}},
        "open": {"workload": {"closed_loop": False}},
    }
    config.slo = {"ttft": 4.0, "tpot": 0.05}
    config.compile = "quick"
    config.provenance = (
        ("workload.rounds", "separate", "DualPath, arXiv 2602.21548, section 3"),
        (
            "workload.*",
            "assumed",
            "arrivals of sessions; tool time and answers: simulator/agents.py",
        ),
        ("model", "released", "DeepInfer configuration of V4.1-Flash"),
        ("hardware", "separate", "NVIDIA B200 peaks, see cost/hardware.py"),
        ("cache.reserve", "documented", "the chapter, section 11.3: window and backtracking"),
        ("decode.nextn", "documented", "the chapter, section 11.6.3"),
        ("decode.acceptance", "inferred", "tau of 3.25 read as conditional acceptance 0.75"),
        ("policy.*", "documented", "the chapter, section 11.5"),
        ("slo.*", "separate", "DualPath, arXiv 2602.21548: TTFT 4 s, TPOT 50 ms"),
        ("*", "assumed", "this experiment"),
    )
    return config
