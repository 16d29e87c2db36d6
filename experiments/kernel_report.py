"""What the TPU compiler makes of every kernel, on a machine without a TPU.

  python -m experiments.kernel_report --config=configs/kernels.py:smoke
  python -m experiments.kernel_report --config=configs/kernels.py --workdir=runs/kernels

Compiles each named shape for each TPU generation (needs libtpu) and reads the compiler's schedule:
bundles and busy slots of a grid step, VMEM, HBM bytes against the minimum, and the time that these
bound from below, beside the roofline and the compiler's estimate of the same op left to XLA. A
kernel that does not fit into VMEM is an error.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from deepinfer_jax.report import records
from deepinfer_jax.report.table import quantity, table
from experiments import harness
from experiments.kernels import compile as compiler
from pallas_kernels import catalogue


def row(point: dict[str, Any]) -> dict[str, str]:
    """A line of the table."""
    head = {"shape": f"{point['op']}/{point['shape']}", "TPU": point["generation"]}
    if "error" in point:
        return {**head, "bundles": "does not compile"}
    busy = point["busy"]
    return {
        **head,
        "bundles": f"{point['tile_bundles']:,}",
        "matrix": quantity(busy["MXU"], "%"),
        "vector": quantity(busy["VALU"], "%"),
        "load/store": f"{100 * busy['VLOAD']:.0f}/{100 * busy['VSTORE']:.0f} %",
        "VMEM": quantity(point["vmem_bytes"], "B"),
        "HBM/min": f"{point['hbm_over_minimum']:.2f}",
        "bound": quantity(point["bound_seconds"], "s"),
        "by": point["limit"],
        "/roofline": f"{point['bound_over_roofline']:.2f}",
        "XLA": quantity(point["xla_seconds"], "s"),
    }


def points(config: Any) -> list[dict[str, Any]]:
    """The (op, shape, generation) that the config asks for.

    Raises:
      ValueError: an unknown op or shape.
    """
    names = [name.split("/", 1) for name in config["shapes"]] or [
        (op, name) for op, shapes in catalogue.SHAPES.items() for name in shapes
    ]
    for op, name in names:
        catalogue.named(op, name)
    return [
        {"op": op, "shape": name, "generation": generation}
        for op, name in names
        for generation in config["generations"]
    ]


def main(run: harness.Run) -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        compiler.prepare(pathlib.Path(folder))
        for point in harness.progress(points(run.parameters), "shapes"):
            shape = catalogue.named(point["op"], point["shape"])
            made = compiler.measure(shape, point["generation"], pathlib.Path(folder))
            found.append({**point, **made})
    print(
        table([row(point) for point in found], title="Kernels as the TPU compiler schedules them")
    )
    if run.workdir:
        content = {**records.environment(), "kernels": found}
        (run.workdir / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    failed = [f"{p['op']}/{p['shape']} on {p['generation']}" for p in found if "error" in p]
    if failed:
        raise ValueError(f"{len(failed)} kernels do not compile: {'; '.join(failed)}")


if __name__ == "__main__":
    harness.run(main, config="configs/kernels.py")
