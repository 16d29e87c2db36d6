"""Speed of the model on this machine: steps against the machine's own matmul and read rates.

Floating-point operations count what a row needs: linear layers, the chosen experts, attention over
visible and selected rows, index scores of visible groups. Bytes count weights, an expert once. A
third rate is that of this backend's linear layer at the same number of rows: weights it gets through
per second. Between one row and some thirty, XLA:CPU reaches neither of the machine's rates with it.
No XLA flag is set here; the report names those that were. Rates and steps alternate, and each figure
is the best repeat.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import presets
from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.model import backbone
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.numerics import linear
from deepinfer_jax.model.parameters import initialise
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.model.topology import Mode, topology

TABLES = ("table", "embed")  # looked up by row, not multiplied
EXPERTS = ("gate_up", "down")  # the routed ones


def split_weights(params: dict[str, Any]) -> tuple[int, int]:
    """Backbone weights that every row multiplies, and those of one routed expert of one layer."""
    dense, expert = params["head"].size + params["norm"].size, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        name = path[-1].key
        if name not in (*TABLES, *EXPERTS):
            dense += leaf.size
    moe = params["layers"][0]["moe"]
    expert = sum(moe[name][0].size for name in EXPERTS)
    return dense, expert


def linear_flops(params: dict[str, Any], config: ModelConfig, rows: int, logit_rows: int) -> int:
    """Floating-point operations of the linear layers for `rows` rows, `logit_rows` of the head."""
    dense, expert = split_weights(params)
    per_row = dense - params["head"].size + config.num_layers * config.num_active_experts * expert
    return 2 * (rows * per_row + logit_rows * params["head"].size)


def attention_flops(config: ModelConfig, position: int) -> int:
    """Floating-point operations of one row's scores, mixing and selection at `position`."""
    pair = 4 * config.num_heads * config.head_dim
    flops = 0
    for layer in topology(config).layers:
        flops += pair * min(position + 1, config.window)
        if layer.ratio:
            groups = (position + 1) // layer.ratio
            flops += pair * min(groups, config.index_topk)
            if layer.mode in (Mode.FULL, Mode.REINDEX) and groups > config.index_topk:
                pool = config.candidate_topk_blocks * config.candidate_block_size
                scored = min(groups, pool) if layer.uses_candidates else groups
                flops += 2 * config.index_num_heads * config.index_head_dim * scored
    return flops


def weight_bytes(params: dict[str, Any], visits: np.ndarray) -> int:
    """Bytes of weights a step must read, given its visits [L, E]: an expert counts once."""
    dense, expert = split_weights(params)
    return (dense + int((visits > 0).sum()) * expert) * params["head"].dtype.itemsize


def memory_of(config: ModelConfig, sequences: int, capacity: int, format: str) -> PagedMemory:
    """An empty paged memory of `sequences` sequences of `capacity` tokens."""
    cache = CacheConfig()
    blocks = -(-capacity // cache.block_tokens)
    memory = create_paged(
        config,
        cache,
        blocks=1 + sequences * blocks,
        slots=1 + sequences,
        format=format,
        dtype=jnp.float32,
    )
    tables = 1 + jnp.arange(sequences * blocks, dtype=jnp.int32).reshape(sequences, blocks)
    return bind(memory, 1 + jnp.arange(sequences, dtype=jnp.int32), tables)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="memory")
def step(
    params: Any,
    memory: PagedMemory,
    tokens: jax.Array,
    start: jax.Array,
    lookback: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array, PagedMemory]:
    """Logits of each sequence's last row, visits, and the memory."""
    count = jnp.full_like(start, tokens.shape[1])
    rows = text_rows(config, tokens, start, count, lookback=lookback)
    out, memory = backbone.forward(params, config, rows, memory)
    return backbone.logits(params, config, out.hidden[:, -1]), out.visits, memory


def best(work: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Least seconds of each piece of work; they take turns, after one turn to compile."""
    seconds = {name: float("inf") for name in work}
    for turn in range(repeats + 1):
        for name, run in work.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def measure(
    config: ModelConfig, sequences: int, length: int, start: int, format: str, repeats: int
) -> dict[str, float]:
    """One shape of step against the machine: a prompt chunk, or decode if `length` is 1."""
    params = jax.jit(lambda key: initialise(model_parameters(config), key))(jax.random.key(0))
    state = {"memory": memory_of(config, sequences, start + length, format)}
    shape = (sequences, length)
    tokens = jax.random.randint(jax.random.key(1), shape, 3, config.vocab_size, jnp.int32)
    begin = jnp.full(sequences, start, jnp.int32)
    back = config.engram.max_ngram - 1 if config.engram else 0
    lookback = jnp.full((sequences, back), 5 if start else -1, jnp.int32)

    def run() -> jax.Array:
        made = step(params, state["memory"], tokens, begin, lookback, config)
        state["visits"], state["memory"] = made[1:]
        return made[0]

    square, line = jnp.ones((2048, 2048)), jnp.ones(2**26)
    width = config.hidden_size
    many = [square[:width, :width] + i for i in range(2**26 // width**2)]
    few = jnp.ones((sequences * length, width))
    work: dict[str, Callable[[], Any]] = {
        "step": run,
        "linear": functools.partial(jax.jit(lambda x, ws: [linear(x, w) for w in ws]), few, many),
        "matmul": functools.partial(jax.jit(jnp.matmul), square, square),
        "read": functools.partial(jax.jit(jnp.sum), line),
    }
    seconds = best(work, repeats)
    flops = linear_flops(params, config, sequences * length, sequences)
    flops += sequences * sum(attention_flops(config, start + i) for i in range(length))
    needed = weight_bytes(params, np.asarray(state["visits"]))
    matmul, read = 2 * 2048**3 / seconds["matmul"], line.nbytes / seconds["read"]
    through = sum(w.nbytes for w in many) / seconds["linear"]
    return {
        "sequences": sequences,
        "rows": length,
        "context": start,
        "milliseconds": 1e3 * seconds["step"],
        "matmul_gflops": matmul / 1e9,
        "read_gbytes": read / 1e9,
        "linear_gbytes": through / 1e9,
        "share_of_matmul": flops / seconds["step"] / matmul,
        "share_of_read": needed / seconds["step"] / read,
        "share_of_linear": needed / seconds["step"] / through,
    }


def main() -> None:
    """Print one JSON line per shape of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", choices=("small", "tiny"))
    parser.add_argument("--format", default="values", choices=("values", "bytes"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", default="1x1,8x1,1x512,8x128", help="sequences x rows, ...")
    asked = parser.parse_args()
    print(
        json.dumps(
            {"xla_flags": os.environ.get("XLA_FLAGS", ""), "cores": len(os.sched_getaffinity(0))}
        )
    )
    for shape in asked.steps.split(","):
        sequences, length = map(int, shape.split("x"))
        start = 512 if length == 1 else 0
        config = getattr(presets, asked.model)()
        made = measure(config, sequences, length, start, asked.format, asked.repeats)
        print(json.dumps({k: round(v, 4) for k, v in made.items()}), flush=True)


if __name__ == "__main__":
    main()
