"""Processes that run one program over the devices of all: who starts them, how they meet.

Each process of `jax.distributed` sees its own devices and, in a mesh, everybody's. On CPUs their
collectives go through gloo; on TPUs and GPUs through the interconnect.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

TIMEOUT = 120  # seconds until all have met


def meet(coordinator: str, processes: int, process: int) -> None:
    """Join the others; before anything else is asked of jax.

    Args:
      coordinator: host:port of process 0; "" to learn all from the cluster: TPU pods, Slurm, Open
        MPI and Kubernetes are known to jax.
      processes: how many.
      process: this one's number.

    Raises:
      ValueError: a number that no process has.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not coordinator:
        jax.distributed.initialize(initialization_timeout=TIMEOUT)
        return
    if not 0 <= process < processes:
        raise ValueError(
            f"--process={process} of {processes}: number them from 0 to {processes - 1}"
        )
    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=TIMEOUT)


def spawn(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run `python -m module arguments` as processes of this machine; see `run_all`.

    Only the first has the workdir that `arguments` may name, which this process has opened.
    """
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", module, *arguments, coordinator]
    return run_all(
        [
            [*command, f"--process={i}", "--workdir=" if i else "--overwrite"]
            for i in range(processes)
        ]
    )


def free_port() -> int:
    """A port of this machine that nobody listens to now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_all(commands: Sequence[Sequence[str]]) -> int:
    """Run commands side by side; 0, or the status of the first that failed.

    Once one fails the others are killed, for they would wait for it.
    """
    running = [subprocess.Popen(command) for command in commands]
    try:
        while True:
            status = [process.poll() for process in running]
            if failed := [code for code in status if code]:
                return failed[0]
            if None not in status:
                return 0
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
