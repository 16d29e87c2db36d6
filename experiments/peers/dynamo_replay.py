"""Replay one trace through Dynamo's offline mocker and print one JSON line of measurements.

A script for an interpreter that has the peer installed; it imports nothing of ours:

    python3.11 -m venv dynamo-venv
    dynamo-venv/bin/pip install --no-deps ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2
    DYN_LOG=error dynamo-venv/bin/python experiments/peers/dynamo_replay.py \
        --trace=configs/traces/azure_llm_2023_conv.csv.gz --workers=8

Nothing else is needed: the replay is compiled code and its Python side imports only json and os.
Everything not set here keeps the peer's default: polynomial cost model, vLLM-like scheduler,
16,384 KV blocks per worker, at most 256 sequences and 8,192 batched tokens per step.
`DYN_LOG=error` silences the line that its KV router otherwise prints for each request, and prefix
caching is off for a trace without prefixes; both are in its favour.
"""

import argparse
import csv
import datetime
import gzip
import importlib.metadata
import json
import pathlib
import resource
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator

MOONCAKE_BLOCK_TOKENS = 512  # tokens per hash id in the published Mooncake traces


def azure_to_mooncake(rows: Iterable[dict[str, str]], block_tokens: int) -> Iterator[dict]:
    """Azure LLM 2023 rows as Mooncake records: same order, milliseconds since the first row.

    The Azure trace names no prefixes but the peer's reader asks for `hash_ids`, so every request
    gets ceil(input / block_tokens) ids of its own: no two requests share a block.
    """
    start = None
    next_id = 0
    for row in rows:
        arrival = datetime.datetime.fromisoformat(row["TIMESTAMP"])
        start = start or arrival
        input_length = int(row["ContextTokens"])
        ids = range(next_id, next_id - (-input_length // block_tokens))
        next_id = ids.stop
        yield {
            "timestamp": (arrival - start) / datetime.timedelta(milliseconds=1),
            "input_length": input_length,
            "output_length": int(row["GeneratedTokens"]),
            "hash_ids": list(ids),
        }


def convert_trace(source: pathlib.Path, target: pathlib.Path, block_tokens: int) -> bool:
    """Write `source` to `target` as Mooncake JSON lines; returns whether it names prefixes.

    A `.csv` is an Azure trace and is converted; anything else is taken to be Mooncake's own format
    and copied. Either may be gzipped.
    """
    opener = gzip.open if source.suffix == ".gz" else open
    is_azure = source.name.removesuffix(".gz").endswith(".csv")
    with opener(source, "rt", newline="") as rows, target.open("w") as lines:
        if is_azure:
            for record in azure_to_mooncake(csv.DictReader(rows), block_tokens):
                lines.write(json.dumps(record) + "\n")
        else:
            shutil.copyfileobj(rows, lines)
    return not is_azure


def replay(trace: pathlib.Path, args: argparse.Namespace, has_prefixes: bool) -> dict:
    """The peer's own report for a Mooncake-format trace, with our CPU seconds of the call added."""
    from dynamo._core import MockEngineArgs
    from dynamo.replay import run_trace_replay

    def engine(worker_type: str) -> object:
        return MockEngineArgs(
            block_size=args.block_size,
            enable_prefix_caching=has_prefixes,
            worker_type=worker_type,
        )

    if args.prefill_workers:
        fleet = {
            "prefill_engine_args": engine("prefill"),
            "decode_engine_args": engine("decode"),
            "num_prefill_workers": args.prefill_workers,
            "num_decode_workers": args.decode_workers,
        }
    else:
        fleet = {"extra_engine_args": engine("aggregated"), "num_workers": args.workers}
    tokens_per_id = MOONCAKE_BLOCK_TOKENS if has_prefixes else args.block_size
    cpu = time.process_time()
    report = run_trace_replay(
        trace, router_mode=args.router, trace_block_size=tokens_per_id, **fleet
    )
    return {**report, "call_cpu_seconds": time.process_time() - cpu}


def measurements(report: dict) -> dict:
    """The peer's report under the names that the benchmark's table uses; seconds and MiB.

    `loop_seconds` is the peer's `wall_time_ms`: construction and run of its simulation, without
    reading the trace. The CPU seconds include the reading.
    """
    loop_seconds = report["wall_time_ms"] / 1e3
    return {
        "simulator": "dynamo",
        "version": importlib.metadata.version("ai-dynamo-runtime"),
        "requests": report["num_requests"],
        "completed": report["completed_requests"],
        "input_tokens": report["total_input_tokens"],
        "output_tokens": report["total_output_tokens"],
        "loop_seconds": loop_seconds,
        "requests_per_second": report["completed_requests"] / loop_seconds,
        "call_cpu_seconds": report["call_cpu_seconds"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "simulated_seconds": report["duration_ms"] / 1e3,
        "mean_ttft_seconds": report["mean_ttft_ms"] / 1e3,
        "p99_ttft_seconds": report["p99_ttft_ms"] / 1e3,
        "mean_tpot_seconds": report["mean_tpot_ms"] / 1e3,
        "mean_e2e_seconds": report["mean_e2e_latency_ms"] / 1e3,
        "token_hit_ratio": report["prefix_cache_reused_ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=pathlib.Path, required=True, help=".csv or .jsonl, or .gz of it"
    )
    parser.add_argument("--workers", type=int, default=8, help="co-located workers")
    parser.add_argument("--prefill_workers", type=int, default=0, help="more than 0: a P/D split")
    parser.add_argument("--decode_workers", type=int, default=0)
    parser.add_argument("--router", default="round_robin", choices=("round_robin", "kv_router"))
    parser.add_argument("--block_size", type=int, default=64, help="tokens per KV block")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.jsonl")
        has_prefixes = convert_trace(args.trace, trace, args.block_size)
        report = replay(trace, args, has_prefixes)
    print(json.dumps(measurements(report)))


if __name__ == "__main__":
    main()
