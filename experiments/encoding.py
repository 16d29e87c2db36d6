"""The section `encoders` of a config: machines that encode a request's images before it is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from deepinfer_jax import metrics
from deepinfer_jax.report.table import quantity
from deepinfer_jax.simulator.encoders import Encoded, EncoderConfig, behind_encoders, encode
from deepinfer_jax.simulator.plain_config import build
from deepinfer_jax.simulator.traces import Trace, in_arrival_order
from deepinfer_jax.simulator.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class Encoders:
    """What a config may say; meaning: `simulator/SEMANTICS.md` 14."""

    machines: int
    gpus: int  # per machine
    image_seconds: float  # of any image
    patch_seconds: float  # per patch
    pair_seconds: float = 0.0  # per pair of patches: attention inside an image
    transfer_seconds: float = 0.0  # from the last image encoded until the prompt is ready
    token_patches: int = 9  # patches of an image per token of it


@dataclasses.dataclass(frozen=True)
class Stage:
    """A trace behind its encoders. Q requests in the order in which they reach the service."""

    trace: Trace  # as the service sees it
    sent: np.ndarray  # [Q] ticks, when clients sent them
    encoded: Encoded
    wait: np.ndarray  # [I] ticks that images waited for a GPU

    def as_sent(self, run: Trajectory) -> Trajectory:
        """The run with the clients' times of arrival: the match's stage then holds the encoding."""
        return dataclasses.replace(
            run, requests=dataclasses.replace(run.requests, arrival=self.sent)
        )

    def summary(self) -> dict[str, Any]:
        """What the encoders did."""
        made = self.encoded
        span = int(made.finish.max()) - int(self.sent.min())
        return {
            "images": len(made.finish),
            "encoder_gpus": len(made.busy),
            "encoder_busy_fraction": float(made.busy.sum() / (len(made.busy) * span)),
            "encoder_wait_seconds": metrics.summary(self.wait / 1e9),
            "encoder_seconds": metrics.summary((made.finish - made.start) / 1e9),
        }


def stage(trace: Trace, values: Mapping[str, Any] | None, closed: bool, seed: int) -> Stage | None:
    """The trace behind the encoders that a config describes; None if it describes none.

    Raises:
      ValueError: a value that needs mending, a trace without images, or a closed loop, whose
        requests arrive when others end.
    """
    if not values:
        return None
    if closed:
        raise ValueError(
            "workload.closed_loop beside encoders: images are encoded before the service is "
            "simulated, when nothing has ended; leave one of them out"
        )
    given = build(Encoders, values, "encoders")
    config = EncoderConfig(
        machines=given.machines,
        gpus=given.gpus,
        image_ticks=round(given.image_seconds * 1e9),
        patch_femtoseconds=round(given.patch_seconds * 1e15),
        square_femtoseconds=round(given.pair_seconds * 1e15),
        token_patches=given.token_patches,
        transfer_ticks=round(given.transfer_seconds * 1e9),
        seed=seed,
    )
    ordered, made = in_arrival_order(trace), encode(trace, config)
    owner = np.repeat(np.arange(len(ordered)), np.diff(ordered.image_offsets))
    order = np.argsort(made.ready, kind="stable")
    return Stage(
        behind_encoders(ordered, made),
        ordered.arrival[order],
        made,
        made.start - ordered.arrival[owner],
    )


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts of a report."""
    if "images" not in summary:
        return []
    wait = summary["encoder_wait_seconds"]
    text = ", ".join(quantity(wait[p], "s") for p in ("mean", "p50", "p99"))
    return [
        ("images, GPUs that encode", f"{summary['images']:,}, {summary['encoder_gpus']:,}"),
        ("encoders busy", quantity(summary["encoder_busy_fraction"], "%")),
        ("wait for an encoder: mean, p50, p99", text),
    ]
