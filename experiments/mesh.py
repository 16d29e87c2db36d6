"""The engine on a mesh of devices, of one process or of several: answers, and experts that move.

  python -m experiments.mesh --config=configs/mesh.py                  # one process
  python -m experiments.mesh --config=configs/mesh.py --processes=2    # two, on this machine
  python -m experiments.mesh --config=configs/mesh.py --cluster        # one of a cluster's job

Ranks divide the experts and have requests of their own. Every `rebalance_steps` decode steps the
experts move to where the counted steps ask for them. The digest of all answers depends neither on
the number of processes nor on where experts lie. experiments/LAUNCH.md has the commands for
clusters. Process 0 prints; a workdir gets its summary.json with all answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from typing import Any

import jax
from absl import flags, logging

from deepinfer_jax.engine.balancer import Balancer
from deepinfer_jax.engine.group import Group
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.statistics import StepRecord
from deepinfer_jax.parallel.mesh import make_mesh
from deepinfer_jax.report import records
from deepinfer_jax.report.table import table
from experiments import benchmark, harness, processes

PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that share the mesh.")
PROCESS = flags.DEFINE_integer("process", 0, "The number of this one, with --coordinator.")
COORDINATOR = flags.DEFINE_string("coordinator", "", "host:port of process 0; else we start all.")
CLUSTER = flags.DEFINE_bool("cluster", False, "Learn from the cluster who the others are.")


def main(run: harness.Run) -> None:
    settings = run.parameters
    if PROCESSES.value > 1 and not COORDINATOR.value and not CLUSTER.value:
        sys.exit(processes.spawn("experiments.mesh", sys.argv[1:], PROCESSES.value))
    if settings["virtual_devices"] % PROCESSES.value:
        raise ValueError(
            f"{settings['virtual_devices']} virtual devices for {PROCESSES.value} processes; "
            "give each as many"
        )
    jax.config.update("jax_num_cpu_devices", settings["virtual_devices"] // PROCESSES.value)
    if COORDINATOR.value or CLUSTER.value:
        processes.meet(COORDINATOR.value, PROCESSES.value, PROCESS.value)
    found = serve(settings, run.seed)
    if jax.process_index():
        return
    print(table(found["balance"], title=title(settings)))
    print(f"digest of {len(found['answers'])} answers: {found['digest']}")
    if run.workdir:
        records.write_json(run.workdir / "summary.json", {**records.environment(), **found})


def serve(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """All answers, their digest, and what each move of experts did.

    Raises:
      ValueError: a mesh of more devices than there are, or settings that no engine takes.
    """
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    mesh = make_mesh(settings["groups"], settings["engines"], context=settings["context"])
    steps: list[StepRecord] = []
    model, params, prompts = benchmark.model_and_prompts(settings, seed)
    llm = LLM(params, model, mesh=mesh, record=steps.append, **engine_of(settings))
    llm.warm_up()
    assert isinstance(llm.engine, Group)
    balancer, balance, next_move = Balancer(llm.engine.device), [], settings["rebalance_steps"]
    wishes = [
        SamplingParams(
            temperature=settings["temperature"],
            max_tokens=settings["answer"],
            ignore_eos=True,
            seed=seed + number,
        )
        for number in range(len(prompts))
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    began = time.perf_counter()
    for news in llm.generate(prompts, wishes, stream=True):
        answers[news.prompt] += news.tokens
        decoded = sum(not step.is_prompt for step in steps) // llm.engine.device.ranks
        if decoded >= next_move:  # all processes count the same steps
            moved = dataclasses.asdict(balancer.rebalance())
            balance.append({"decode steps": decoded, **moved})
            next_move = decoded + settings["rebalance_steps"]
    return {
        "processes": jax.process_count(),
        "devices": mesh.size,
        "seconds": time.perf_counter() - began,
        "digest": hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16],
        "balance": balance,
        "answers": answers,
    }


def engine_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Each rank's engine, and what the mesh keeps of experts."""
    made = benchmark.engine_of({**settings, "overlap": True})
    return {**made, "extra_experts": settings["extra_experts"], "window": settings["window"]}


def title(settings: dict[str, Any]) -> str:
    shape = f"{settings['groups']} x {settings['engines']} ranks of {settings['context']}"
    return f"{settings['model']}, {shape} devices in {jax.process_count()} processes: moves"


if __name__ == "__main__":
    harness.run(main, config="configs/mesh.py")
