"""One of several processes that share a mesh: `python -m tests.engine.process_worker ARGUMENTS`.

Arguments: coordinator, how many processes, this one's number, and where its answers go as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np

from deepinfer_jax.engine.balancer import Balancer
from deepinfer_jax.engine.device_state import reach
from deepinfer_jax.engine.group import make_group
from deepinfer_jax.engine.mesh_device import MeshDevice
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.parallel.mesh import make_mesh
from experiments import processes
from tests.engine.small_engine import BUCKETS, config, micro, parameters, prompts, requests

WISHES = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
]
PROMPTS = prompts(len(WISHES), seed=81, longest=50)


def main(coordinator: str, count: str, number: str, path: str) -> None:
    """Four ranks answer all requests, and experts move twice meanwhile."""
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    processes.meet(coordinator, int(count), int(number))
    model = micro()
    device = MeshDevice(
        jax.tree.map(np.asarray, parameters(model)),
        model,
        config(),
        make_mesh(1, 4),
        buckets=BUCKETS,
        extra_experts=2,
        window=8,
    )
    group, balancer, moves = make_group(device, reach(model)), Balancer(device), []
    asked = requests(PROMPTS, WISHES)
    for request in asked:
        group.add(request)
    for call in range(200):
        if not group.unfinished:
            break
        group.call()
        if call in (6, 12):
            moves.append(balancer.rebalance())
    group.land()
    found = {
        "devices": [jax.device_count(), jax.local_device_count()],
        "answers": [r.tokens[r.prompt_length :] for r in asked],
        "moved": [move.moved for move in moves],
        "held": balancer.held.tolist(),
        "counts": balancer.counts().sum(0).tolist(),
    }
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
