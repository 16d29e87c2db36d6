"""A real vLLM run in a directory: its requests, its configuration, and the cluster it is simulated as."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from typing import Any

import numpy as np

from deepinfer_jax.cost.profile import Decoder, Profile, TableFit, fit
from deepinfer_jax.simulator.cluster import ClusterConfig, Mode
from deepinfer_jax.simulator.traces import plain
from deepinfer_jax.simulator.workload import Workload, workload

MODELS = {
    "meta-llama/Llama-3.1-8B": Decoder(32, 4096, 32 * 2 * 8 * 128 * 2, 8.03e9 * 2),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Decoder(48, 2048, 48 * 2 * 4 * 128 * 2, 30.5e9 * 2, 128, 8),
}  # their published configurations, BF16
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Measured:
    """One real run. Times [Q] in seconds from the first request's queueing."""

    name: str
    load: Workload
    ttft: np.ndarray
    e2e: np.ndarray
    tpot: np.ndarray
    cluster: ClusterConfig
    table: TableFit
    outside: dict[str, int]
    peer: str  # the other simulator's committed figures


def _text(path: pathlib.Path) -> str:
    packed = path.with_name(path.name + ".gz")
    if packed.is_file():
        return gzip.decompress(packed.read_bytes()).decode()
    return path.read_text()


def read(folder: str) -> Measured:
    """The run in `folder`: requests.jsonl, meta.json, config.json and profile/.

    Raises:
      ValueError: the model is none of `MODELS`.
    """
    path = pathlib.Path(folder)
    meta, config = json.loads(_text(path / "meta.json")), json.loads(_text(path / "config.json"))
    options = meta["engine_kwargs"]
    if options["model"] not in MODELS:
        raise ValueError(f"{folder}: model {options['model']} is unknown, add it to MODELS")
    model, ranks = MODELS[options["model"]], options["data_parallel_size"]
    requests = [json.loads(line) for line in _text(path / "requests.jsonl").splitlines()]
    column = lambda name: np.asarray([r[name] for r in requests], float)  # noqa: E731
    queued = column("queued_ts")
    order = np.argsort(queued, kind="stable")
    tokens = [column(n)[order].astype(int) for n in ("input_toks", "output_toks")]
    trace = plain(folder, np.rint((queued[order] - queued.min()) * 1e9).astype(np.int64), *tokens)
    first, last = (column(n)[order] - queued[order] for n in ("first_token_ts", "last_token_ts"))
    profile = Profile(path / "profile", model, ranks)
    slots, budget = options["max_num_seqs"], options["max_num_batched_tokens"]
    per_row, base = _exchange(model, ranks, config)
    table = fit(profile, slots, budget, exchange_row=per_row, exchange_base=base)
    cluster = ClusterConfig(
        modes=(Mode.MIXED,),
        ranks=ranks,
        slots=slots,
        kv_blocks=_blocks(meta, config, model, ranks),
        block_tokens=BLOCK,
        cost=table.cost,
        batch_tokens=budget,
        chunk_multiple=1,
    )
    summary = path / "llmservingsim_summary.txt"
    return Measured(
        path.name,
        workload(trace, BLOCK, 1, False),
        first,
        last,
        (last - first) / np.maximum(tokens[1] - 1, 1),
        cluster,
        table,
        dict(profile.outside),
        summary.read_text() if summary.is_file() else "",
    )


def _exchange(model: Decoder, ranks: int, config: dict[str, Any]) -> tuple[float, float]:
    """Seconds per row and per step: rows cross the link into and out of each layer's experts.

    The rates are the config's.
    """
    if ranks == 1:
        return 0.0, 0.0
    per_row = model.layers * 2 * model.hidden * 2 / (config["link_bw"] * 1e9) / ranks
    return per_row, model.layers * 2 * config["link_latency"] / 1e9


def _blocks(meta: dict[str, Any], config: dict[str, Any], model: Decoder, ranks: int) -> int:
    """KV blocks of a rank: as recorded, else what the weights leave of the memory."""
    if "kv_cache" in meta:
        return int(meta["kv_cache"]["num_gpu_blocks"])
    memory = config["nodes"][0]["instances"][0]["npu_mem"]
    free = memory["mem_size"] * 1e9 * memory["mem_util"] - model.weight_bytes / ranks
    return int(free / model.kv_bytes_per_token / BLOCK)
