"""Times of a device's decode steps by shape, for confidence-scheduled verification."""

from __future__ import annotations

import pathlib
import time

import jax

from deepinfer_jax.engine.answer import Answer
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.draft_lengths import Chooser
from deepinfer_jax.engine.plan import PlanRow, StepPlan
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.engine.step_curve import StepCurve, digest, load_or_measure, middle_mean

REPEATS = 5


def chooser(device: Device, directory: pathlib.Path | None = None) -> Chooser:
    """What `Scheduler` takes as `lengths`; the device must serve nobody yet.

    Compiles the decode steps and times them, unless `directory` holds times of the same model,
    shapes and machine that are younger than an hour.
    """
    curves = {count: _curve(device, count, directory) for count in device.buckets.sequences}
    return Chooser(curves, device.config.cache.nextn)


def _curve(device: Device, count: int, directory: pathlib.Path | None) -> StepCurve:
    def measured() -> StepCurve:
        sizes = tuple(count * width for width in device.widths)
        times = tuple(middle_mean(time_decode(device, count, w)) for w in device.widths)
        return StepCurve(sizes, times)

    if directory is None:
        return measured()
    key = digest(
        {
            "unit": "ms",
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "model": repr(device.model),
            "cache": repr(device.config.cache),
            "memory": str(jax.tree.map(lambda x: (x.shape, x.dtype), device.state.memory.rows)),
            "shapes": [count, *device.widths, device.buckets.blocks[-1]],
        }
    )
    return load_or_measure(directory / f"decode_{key[:16]}.json", key, measured)


def time_decode(device: Device, count: int, width: int) -> list[float]:
    """Milliseconds of single greedy steps of `count` sequences half as long as they may get.

    Nobody's state is read or written but that of slots, which a new tenant does not read.
    """
    start = device.config.max_model_len // 2
    blocks = (0,) * device.buckets.blocks[-1]
    seats = [1 + i % device.config.max_num_seqs for i in range(count)]
    rows = tuple(
        PlanRow(
            request_id=-1,
            q=width,
            k=start + width,
            tokens=(i * 7919 % device.model.vocab_size,),
            lookback=(),
            blocks=blocks,
            slot=seat,
            draft_slot=seat,
            read_slot=seat,
        )
        for i, seat in enumerate(seats)
    )
    plan = StepPlan(-1, False, rows, drafts=count * (width - 1))
    greedy = Answer(SamplingParams(temperature=0.0), seed=0)
    requests = [Request(-1, [0], sampling=greedy) for _ in rows]
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        device.forward(plan, requests)
        device.sample(plan, requests).wait(requests)
        found.append(1e3 * (time.perf_counter() - began))
    return found[1:]  # the first one compiles
