"""A pod planned without one: the engine's real steps compiled for it, and what they would take.

  python -m experiments.pod_plan --config=configs/pod_v41_flash.py:short --topology=v5p:2x2x1
  python -m experiments.pod_plan --config=configs/pod_v41_flash.py --topology=v6e:8x8 --workdir=DIR

Every device is a rank with requests of its own; all divide the experts and Engram's tables, and the
rest of the weights is on each. Weights are BF16, for the model computes in no narrower format yet;
the released formats' bytes stand beside. The TPU compiler (libtpu) says what arguments and
temporaries take and which collectives run; `cost` and `layout` say it independently. Products are
counted from the traced program, loops as often as they turn under an even routing. The
variant `:short` compiles four layers, one of each kind, at full width, and composes the whole
model's memory from them. The largest batch and context are by proportion from the compiled size.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

import jax
from absl import flags

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.cost.memory import weight_bytes_per_rank
from deepinfer_jax.engine.planned import PlannedDevice
from deepinfer_jax.model.experts import block_size
from deepinfer_jax.parallel.exchange import fair_capacity
from deepinfer_jax.report import records
from deepinfer_jax.report.table import quantity, table
from experiments import harness
from experiments.pod import analytic
from experiments.pod.collectives import collectives
from experiments.pod.flops import matmul_flops
from experiments.pod.target import Target, planned, target

TOPOLOGY = flags.DEFINE_string("topology", "v5p:4x4x4", "Generation and chips: v6e:8x8, ...")
GB = 1e9


def main(run: harness.Run) -> None:
    settings, to = run.parameters, target(TOPOLOGY.value)
    device = planned(settings, to.devices)
    whole = planned(settings, to.devices, whole=True) if settings["short"] else device
    device.lower()
    memory, programs = expected(whole, settings), []
    with harness.Progress(len(settings["programs"]), "compiling") as bar:
        for name in settings["programs"]:
            programs.append(compiled(device, name, to, settings))
            programs[-1]["whole"] = composed(whole, device, programs[-1], to, settings)
            bar.step(1)
    print_plan(to, memory, programs)
    if run.workdir:
        found = {"topology": to.topology, "devices": len(to.devices), "hbm_bytes": to.hbm_bytes}
        plan = {**found, "config": settings, "memory": memory, "programs": programs}
        records.write_json(run.workdir / "summary.json", {**records.environment(), **plan})


def expected(device: PlannedDevice, settings: dict[str, Any]) -> dict[str, float]:
    """Bytes on a device: of the declared arrays, and by `cost` and `layout`."""
    model, devices = device.model, device.ranks
    extra = settings["extra_experts"]
    return {
        "weights_declared": declared(device.params),
        "weights": analytic.weight_bytes(model, devices, extra),
        "weights_released_formats": weight_bytes_per_rank(model, devices),
        "caches_declared": declared(device.state),
        "caches": analytic.cache_bytes(model, device.config),
    }


def declared(tree: Any) -> float:
    """Bytes of a device's part of a tree of shapes."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def compiled(
    device: PlannedDevice, name: str, to: Target, settings: dict[str, Any]
) -> dict[str, Any]:
    """A program's line: memory, products, collectives; or how much it lacks."""
    began, line = time.perf_counter(), dict[str, Any](program=name, layers=device.model.num_layers)
    try:
        made = device.lowered[name].compile()
    except Exception as error:  # the compiler's own type; anything else is raised again
        used = re.search(r"Used ([\d.]+)([GM]) of ([\d.]+)([GM]) hbm", str(error))
        if used is None:
            raise
        need, have = (float(used[i]) * {"G": 2**30, "M": 2**20}[used[i + 1]] for i in (1, 3))
        seconds = time.perf_counter() - began
        return {**line, "seconds": seconds, "fits": False, "total": need, "compiler_limit": have}
    found, cost, memory = made.memory_analysis(), made.cost_analysis(), expected(device, settings)
    kept = found.argument_size_in_bytes
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    total = kept + fresh + found.temp_size_in_bytes + found.generated_code_size_in_bytes
    line |= {
        "seconds": time.perf_counter() - began,
        "fits": total <= to.hbm_bytes,
        "total": total,
        "arguments": kept,
        "arguments_over_expected": kept / (memory["weights"] + memory["caches"]),
        "temporaries": found.temp_size_in_bytes,
        "fresh_outputs": fresh,
        "code": found.generated_code_size_in_bytes,
        "compiler_flops_loops_once": cost.get("flops"),
        "compiler_bytes_loops_once": cost.get("bytes accessed"),
        "matmul_flops": matmul_flops(device.traced[name].jaxpr, turns(device, name, settings)),
        "collectives": [vars(c) for c in collectives(made.as_text())],
    }
    if name != "sample":
        model, config = device.model, device.config
        line["matmul_flops_cost"] = analytic.matmul_flops(model, name, config, settings["prompt"])
    return line


def composed(
    whole: PlannedDevice,
    device: PlannedDevice,
    line: dict[str, Any],
    to: Target,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The whole model's memory behind a compiled program, and what would fill a device.

    If a short model was compiled, arguments are the whole one's declared bytes, code grows with
    the layers, and temporaries, of which one layer's live at a time, are the short one's. What is
    not a weight is taken to grow in proportion to requests and to their tokens.
    """
    if "temporaries" not in line:
        return {}
    ratio = whole.model.num_layers / device.model.num_layers
    weights, caches = declared(whole.params), declared(whole.state)
    more = line["temporaries"] + line["fresh_outputs"]
    fixed = weights + ratio * line["code"]
    share = (to.hbm_bytes - fixed) / (caches + more)
    block = whole.config.cache.block_tokens
    context = min(settings["context"] * share, whole.model.max_positions)
    return {
        "total": fixed + caches + more,
        "fits": share >= 1,
        "largest_batch": max(math.floor(settings["batch"] * share), 0),
        "largest_context": max(math.floor(context / block) * block, 0),
    }


def turns(device: PlannedDevice, name: str, settings: dict[str, Any]) -> Any:
    """An exchange takes one round; an expert's rows a fair share of blocks."""
    model, config = device.model, device.config
    rows = settings["prompt"] if name == "prompt" else config.max_num_seqs * config.step_rows
    return lambda depth: 1.0 if depth == 0 else expert_blocks(model, rows, device.ranks)


def expert_blocks(model: ModelConfig, rows: int, devices: int) -> float:
    """Blocks that an expert multiplies in a step of so many rows on each device."""
    pairs, local = rows * model.num_active_experts, -(-model.num_experts // devices)
    received = devices * fair_capacity(pairs, devices)
    return math.ceil(pairs / local / block_size(received, local))


def print_plan(to: Target, memory: dict[str, float], programs: list[dict[str, Any]]) -> None:
    rows = [
        {"": name.replace("_", " "), "GB on a device": f"{value / GB:.3f}"}
        for name, value in memory.items()
    ]
    print(
        table(rows, title=f"{to.topology}, {len(to.devices)} devices of {to.hbm_bytes / GB:.1f} GB")
    )
    print(table([shown(line) for line in programs], title="programs"))
    for line in programs:
        rows = [
            {
                "collective": c["kind"],
                "result": c["result"],
                "group": str(c["group"] or ""),
                "bytes": quantity(c["bytes"], "B"),
                "in the text": f"{c['count']}{' in loops' if c['looped'] else ''}",
            }
            for c in line.get("collectives", [])[:8]
        ]
        if rows:
            print(table(rows, title=f"{line['program']}: collectives, the largest first"))


def shown(line: dict[str, Any]) -> dict[str, str]:
    """One line of the printed table."""
    common = {
        "program": line["program"],
        "compiled": f"{line['layers']} layers, {line['seconds']:.0f} s",
        "total": f"{line['total'] / GB:.2f} GB",
    }
    if "temporaries" not in line:
        return common | {"whole model": "more than there is"}
    counted, by_cost, whole = line["matmul_flops"], line.get("matmul_flops_cost"), line["whole"]
    return common | {
        "temporaries": f"{line['temporaries'] / GB:.2f} GB",
        "arguments / expected": f"{line['arguments_over_expected']:.3f}",
        "products": quantity(counted, "FLOP"),
        "/ cost": f"{counted / by_cost:.2f}" if by_cost else "",
        "whole model": f"{whole['total'] / GB:.1f} GB, {'fits' if whole['fits'] else 'does not fit'}",
        "largest batch": str(whole["largest_batch"]),
        "largest context": str(whole["largest_context"]),
    }


if __name__ == "__main__":
    harness.run(main, config="configs/pod_v41_flash.py")
