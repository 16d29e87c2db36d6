"""One kernel shape compiled for one TPU generation, with the compiler's dumps read and removed."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

from experiments.kernels import dumps, estimate, programs
from pallas_kernels import aot
from pallas_kernels.catalogue import Named
from pallas_kernels.traffic import traffic


def prepare(folder: pathlib.Path) -> None:
    """Have the compiler write its schedules to `folder`; before it starts, once per process.

    Raises:
      ValueError: there is no compiler.
    """
    if not aot.available():
        raise ValueError("libtpu, the TPU compiler, is not installed: pip install libtpu")
    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def measure(shape: Named, generation: str, folder: pathlib.Path) -> dict[str, Any]:
    """`estimate.record` of this shape, or {"error": what the compiler said}."""
    arguments = shape.arguments()
    try:
        _empty(folder)
        text = aot.compile_tpu(shape.function("tpu"), generation, *arguments).as_text()
        names = programs.kernels(text)
        each = len(shape.executions()) // len(names)
        found = [_schedule(folder, name, each) for name in names]
        _empty(folder)
        plain = aot.compile_tpu(shape.function("xla"), generation, *arguments).as_text()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0][:300]}
    finally:
        _empty(folder)
    return estimate.record(
        shape,
        generation,
        found,
        traffic(shape.function("tpu"), arguments, shape.prefetched()),
        programs.cost(text),
        programs.cost(plain),
        programs.scoped_vmem(text),
    )


def _schedule(folder: pathlib.Path, kernel: str, tiles: int) -> dumps.Schedule:
    bundles = next(folder.glob(f"*-{kernel}-*-final_bundles.txt"))
    use = next(folder.glob(f"*-{kernel}-*-final_hlo-static-per-bundle-utilization.txt"))
    return dumps.schedule(bundles.read_text(), use.read_text(), tiles)


def _empty(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        path.unlink()
