"""Run a command as a subprocess on one core and measure it from outside.

Pinning (taskset) makes wall seconds mean one core for programs that would use threads; the kernel's
own accounting (wait4) gives CPU seconds and peak memory that no program reports differently.
"""

import dataclasses
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Run:
    """What one subprocess did; seconds of the whole process, start-up included."""

    returncode: int
    stdout: str
    stderr: str
    process_seconds: float
    process_cpu_seconds: float
    process_peak_mib: float


def pinned(command: Sequence[str], core: int | None = None) -> list[str]:
    """`command` under taskset on `core` (default: the first core we may use), when it exists."""
    if shutil.which("taskset") is None or not hasattr(os, "sched_getaffinity"):
        return list(command)
    core = min(os.sched_getaffinity(0)) if core is None else core
    return ["taskset", "-c", str(core), *command]


def run_pinned(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """Run `command` on one core with `environment` added to ours; never raises on its failure."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            pinned(command), stdout=out, stderr=err, env={**os.environ, **(environment or {})}
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)  # tells Popen that it was reaped
        out.seek(0)
        err.seek(0)
        return Run(
            returncode=process.returncode,
            stdout=out.read(),
            stderr=err.read(),
            process_seconds=seconds,
            process_cpu_seconds=usage.ru_utime + usage.ru_stime,
            process_peak_mib=usage.ru_maxrss / 1024,
        )
