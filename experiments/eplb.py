"""Expert placement: balance of the ranks before and after, and the time a decision takes.

  python -m experiments.eplb --config=configs/eplb.py --workdir=runs/eplb
  python -m experiments.eplb --config=configs/eplb.py --reference=EPLB/eplb.py    # needs torch

Each policy decides by a window of steps; "seen" is the balance of that window under its placement,
"next" that of the window behind it. Balance is sum of mean / sum of maximum rank load over steps
and layers: the share of the time of the experts in which a rank works. The speed of a decision is
the best of alternating runs of the jitted policy and of plain loops, in one process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from deepinfer_jax import presets
from deepinfer_jax.policy import experts
from deepinfer_jax.report import records
from deepinfer_jax.report.table import table
from experiments import eplb_plain, harness
from experiments.training import store, text, whole

REFERENCE = flags.DEFINE_string("reference", "", "deepseek-ai/EPLB's eplb.py, to be timed.")


def main(run: harness.Run) -> None:
    logging.set_verbosity(logging.WARNING)
    settings, plain = run.parameters, reference(REFERENCE.value)
    rows = []
    with harness.Progress(1 + len(settings["skews"]), "balance") as bar:
        tokens = routed(settings, run.seed)
        rows += judged("trained_tiny on text", tokens, **settings["tiny"])
        bar.step(1)
        for skew in settings["skews"]:
            tokens = drawn(settings, skew, run.seed)
            rows += judged(f"Zipf {skew:g}", tokens, **sizes(settings["large"]))
            bar.step(1)
    speeds = timed(settings, plain, run.seed)
    against = "deepseek-ai/EPLB" if REFERENCE.value else "plain loops in numpy"
    print(table([shown(row) for row in rows], title="balance of the ranks, 1 at best"))
    print(table([shown(row) for row in speeds], title=f"time of a decision beside {against}"))
    if run.workdir:
        found = {"balance": rows, "speed": speeds, "beside": against, **identity(REFERENCE.value)}
        records.write_json(run.workdir / "summary.json", {**records.environment(), **found})


def sizes(large: dict[str, int]) -> dict[str, int]:
    return {name: large[name] for name in ("slots", "ranks", "nodes", "groups")}


def routed(settings: dict[str, Any], seed: int) -> np.ndarray:
    """Rows each expert of the trained model got, [2 * steps, L, E], a batch of text per step."""
    model = getattr(presets, settings["model"])()
    params, tokenizer = store.load(pathlib.Path(settings["checkpoint"]), model)
    _, held_out = text.sources()
    stream, rng = text.encode(tokenizer, held_out), np.random.default_rng(seed)
    visits = jax.jit(lambda tokens: whole.forward(params, model, tokens).visits)
    shape = settings["sequences"], settings["tokens"]
    batches = (text.batch(stream, *shape, rng) for _ in range(2 * settings["steps"]))
    return np.stack([np.asarray(visits(batch)) for batch in batches])


def drawn(settings: dict[str, Any], skew: float, seed: int) -> np.ndarray:
    """Rows by Zipf's law with bursts, [2 * steps, L, E]."""
    rng, large, shape = np.random.default_rng(seed), settings["large"], settings["burst"]
    share = np.arange(1, large["experts"] + 1.0) ** -skew
    shares = np.stack([rng.permutation(share) for _ in range(large["layers"])])
    steps = 2 * settings["steps"]
    burst = shares * rng.gamma(shape, 1 / shape, (steps, *shares.shape))
    return rng.multinomial(settings["rows"], burst / burst.sum(-1, keepdims=True))


def judged(
    name: str, tokens: np.ndarray, slots: int, ranks: int, nodes: int, groups: int
) -> list[dict[str, Any]]:
    """A line for each policy: the balance of both windows of tokens [2 * steps, L, E]."""
    steps, layers, count = len(tokens) // 2, tokens.shape[1], tokens.shape[2]
    seen, later = tokens[:steps], tokens[steps:]
    mean = seen.sum(0).astype(np.float32)
    start = experts.initial_placement(layers, count, slots)
    placements = {
        "experts in order": start,
        "hierarchical": experts.rebalance(mean, slots, groups, nodes, ranks),
        "global": experts.rebalance(mean, slots, 1, 1, ranks),
        "peak-aware": experts.rebalance_peak_aware(seen, slots, ranks),
    }
    return [
        {
            "loads": name,
            "policy": policy,
            "experts": f"{layers} x {count} in {slots} on {ranks}",
            "seen": balance(seen, placement, ranks),
            "next": balance(later, placement, ranks),
            "moved": float(
                np.mean(
                    np.asarray(placement.physical_to_logical)
                    != np.asarray(start.physical_to_logical)
                )
            ),
        }
        for policy, placement in placements.items()
    ]


def balance(tokens: np.ndarray, placement: experts.Placement, ranks: int) -> float:
    """Sum of means / sum of maxima of rank loads over steps and layers of tokens [S, L, E]."""
    loads = jax.vmap(lambda step: experts.rank_loads(step, placement, ranks))
    return float(experts.ratio_of_sums(np.asarray(loads(tokens.astype(np.float32)))))


def reference(path: str) -> eplb_plain.Rebalance:
    """The plain loops to time: our own, or those of a copy of deepseek-ai/EPLB.

    Raises:
      ValueError: no such file, or no torch to run it with.
    """
    if not path:
        return eplb_plain.rebalance
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--reference={path} is not a file; give eplb.py of deepseek-ai/EPLB")
    if importlib.util.find_spec("torch") is None:
        raise ValueError("--reference needs torch; install it (setup.py's oracle extra has it)")
    torch = importlib.import_module("torch")
    spec = importlib.util.spec_from_file_location("eplb_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def rebalance(weight: np.ndarray, *sizes: int) -> np.ndarray:
        return module.rebalance_experts(torch.from_numpy(weight), *sizes)[0].numpy()

    return rebalance


def identity(path: str) -> dict[str, str]:
    """Which reference was run: the digest of its file, and torch's version."""
    if not path:
        return {}
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    return {"reference_sha256": digest, "torch": importlib.import_module("torch").__version__}


def timed(settings: dict[str, Any], plain: eplb_plain.Rebalance, seed: int) -> list[dict[str, Any]]:
    """Best times of decisions in milliseconds, and whether both decide the same."""
    large, rng = settings["large"], np.random.default_rng(seed)
    weight = rng.gamma(1.0, size=(large["layers"], large["experts"])).astype(np.float32)
    rows = []
    for policy, groups, nodes in (
        ("hierarchical", large["groups"], large["nodes"]),
        ("global", 1, 1),
    ):
        given = (weight, large["slots"], groups, nodes, large["ranks"])
        ours = lambda given=given: jax.block_until_ready(experts.rebalance(*given))  # noqa: E731
        theirs = lambda given=given: plain(*given)  # noqa: E731
        same = bool((np.asarray(ours().physical_to_logical) == theirs()).all())
        times = [(clock(ours), clock(theirs)) for _ in range(settings["repeats"])]
        fast, slow = (1e3 * min(column) for column in zip(*times, strict=True))
        shape = f"{large['layers']} x {large['experts']} in {large['slots']} on {large['ranks']}"
        rows.append(
            {
                "policy": policy,
                "experts": shape,
                "jitted ms": fast,
                "beside ms": slow,
                "ratio": slow / fast,
                "same placement": same,
            }
        )
    return rows


def clock(function: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def shown(row: dict[str, Any]) -> dict[str, str]:
    """One line of a printed table."""
    return {k: f"{v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items()}


if __name__ == "__main__":
    harness.run(main, config="configs/eplb.py")
