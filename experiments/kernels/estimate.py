"""How long a kernel takes at best on each TPU, from its schedule and its bytes, without running it.

A bundle takes one cycle, so bundles over the clock bound the time from below, and so do bytes over
bandwidth and operations over the peak; the largest is reported, beside the same call's roofline.
Clocks follow from public peaks: a matrix unit of 128 x 128 (v5e, v5p: four per core) or 256 x 256
(v6e, 7x: two per core) takes one row of bfloat16, or two (v6e, 7x), per cycle. The compiler's own
estimates of a large dense matmul come to 83 to 97 % of the peak with these clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from deepinfer_jax.cost.hardware import lookup
from experiments.kernels.dumps import Schedule
from experiments.kernels.programs import Cost
from pallas_kernels.catalogue import Named
from pallas_kernels.traffic import Traffic


class Target(NamedTuple):
    """What the compiler calls a device: a chip, or half of one on 7x."""

    name: str  # in `cost.hardware`
    share: float  # of the chip's peak and bandwidth
    cores: int  # that divide a kernel's grid
    row_macs: int  # multiplications and additions of all matrix units per cycle


TARGETS = {
    "v5e": Target("TPU v5e", 1.0, 1, 4 * 128 * 128),
    "v5p": Target("TPU v5p", 1.0, 2, 2 * 4 * 128 * 128),
    "v6e": Target("TPU v6e", 1.0, 1, 2 * 2 * 256 * 256),
    "tpu7x": Target("tpu7x", 0.5, 1, 2 * 2 * 256 * 256),
}


def clock(generation: str) -> float:
    """Cycles per second."""
    target = TARGETS[generation]
    return lookup(target.name).bf16_flops * target.share / (2 * target.row_macs)


def record(
    shape: Named,
    generation: str,
    schedules: Sequence[Schedule],
    moved: Traffic,
    around: Cost,
    reference: Cost,
    vmem: int,
) -> dict[str, Any]:
    """One row of the report; seconds and bytes are of one call.

    Args:
      schedules: of the kernels the call runs, in order, each on the same grid.
      moved: by their pipelines.
      around: the rest of the kernels' program; `reference`: the program without kernels.
      vmem: bytes a kernel takes for itself.
    """
    target = TARGETS[generation]
    hardware = lookup(target.name)
    bandwidth = hardware.hbm_bytes_per_second * target.share
    tiles = [tile for schedule in schedules for tile in schedule.tiles]
    work = [n * t.bundles for n, t in zip(shape.executions(), tiles, strict=True)]
    beside = sum(schedule.beside for schedule in schedules) * moved.steps
    bundles = (sum(work) + beside) / target.cores
    main = tiles[work.index(max(work))]
    hbm = moved.read + moved.written + shape.copied_bytes() + around.hbm_bytes
    arithmetic = shape.operations() / (hardware.bf16_flops * target.share)
    times = {
        "schedule": bundles / clock(generation),
        "memory": hbm / bandwidth,
        "arithmetic": arithmetic,
    }
    roofline = max(arithmetic, shape.minimum_bytes() / bandwidth)
    bound = max(times.values())
    return {
        "tile_bundles": main.bundles,
        "busy": main.busy,
        "tiles": [t._asdict() for t in tiles],
        "executions": shape.executions(),
        "beside_bundles": beside,
        "steps": moved.steps,
        "vmem_bytes": vmem,
        "hbm_bytes": hbm,
        "hbm_over_minimum": hbm / shape.minimum_bytes(),
        "limit": max(times, key=lambda name: times[name]),
        "bound_seconds": bound,
        "roofline_seconds": roofline,
        "bound_over_roofline": bound / roofline,
        "around_seconds": around.cycles / clock(generation),
        "xla_seconds": reference.cycles / clock(generation),
        "xla_hbm_over_minimum": reference.hbm_bytes / shape.minimum_bytes(),
    }
