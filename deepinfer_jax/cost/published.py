"""The one published decode point of the released engine, and what it says about efficiency.

Approximate: read from the release's wide-EP decode figure (the chapter, section 11.6.3). 246
tokens/s/user at tau 3.25 are 75.69 steps/s; 64 requests per rank make 15,744 tokens/s/GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.cost.frontier import OperatingPoint
from deepinfer_jax.cost.hardware import GB200, Hardware
from deepinfer_jax.cost.roofline import PEAK, Efficiency, StepTime, decode_time


@dataclasses.dataclass(frozen=True)
class PublishedPoint:
    """A decode operating point: EP = DP = `ranks`, every request `context` tokens long."""

    ranks: int = 64
    context: int = 131_072
    nextn: int = 3
    requests: int = 64
    steps_per_second: float = 246 / 3.25
    tau: float = 3.25


WIDE_EP_DECODE = PublishedPoint()


def _predict(
    model: ModelConfig,
    hardware: Hardware,
    point: PublishedPoint,
    requests: int,
    efficiency: Efficiency,
) -> StepTime:
    return decode_time(
        model,
        hardware,
        requests,
        requests * point.context,
        point.ranks,
        nextn=point.nextn,
        efficiency=efficiency,
    )


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Ways in which one point can be met, each alone with everything else at its peak.

    `uniform` scales every peak, links included. `of_part` slows one part (or the exchange) only: a
    part whose value is far below any measured kernel cannot be the whole explanation. `overhead`
    are seconds added to a step that is otherwise at peak. One point cannot tell these apart; they
    differ at other batch sizes (`batch_rows`).
    """

    pure: StepTime
    uniform: float
    of_part: dict[str, float]
    overhead: float

    @property
    def pure_steps_per_second(self) -> float:
        """The bound at all peaks."""
        return 1 / self.pure.seconds


def calibrate(
    model: ModelConfig, hardware: Hardware = GB200, point: PublishedPoint = WIDE_EP_DECODE
) -> Calibration:
    """What `hardware` must lose for the roofline to meet `point`.

    Raises:
      ValueError: the bound is already slower than the point, so the assumed links or peaks are not
        those of the machine measured.
    """
    pure = _predict(model, hardware, point, point.requests, PEAK)
    gap = 1 / point.steps_per_second - pure.seconds
    if gap < 0:
        raise ValueError(
            f"{hardware.name} at all peaks makes {1 / pure.seconds:.1f} steps/s, below the point's "
            f"{point.steps_per_second:.1f}; the point was measured on faster links, so give those"
        )
    lasting = {part.name: part.seconds for part in pure.parts} | {"exchange": pure.exchange}
    shares = {name: seconds / (seconds + gap) for name, seconds in lasting.items()}
    return Calibration(pure, pure.seconds * point.steps_per_second, shares, gap)


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """Predictions at one batch size: at all peaks, and under two calibrations to one point."""

    requests: int
    pure: OperatingPoint
    uniform: OperatingPoint
    overhead: OperatingPoint


def batch_rows(
    model: ModelConfig,
    requests: Sequence[int] = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128),
    hardware: Hardware = GB200,
    point: PublishedPoint = WIDE_EP_DECODE,
) -> list[BatchRow]:
    """What the point's calibrations predict at other batch sizes, tau and context held fixed."""
    found = calibrate(model, hardware, point)
    choices = (PEAK, Efficiency.uniform(found.uniform), Efficiency(overhead=found.overhead))

    def at(count: int, efficiency: Efficiency) -> OperatingPoint:
        step = _predict(model, hardware, point, count, efficiency)
        return OperatingPoint(count, 1 / step.seconds, point.tau)

    return [BatchRow(count, *(at(count, choice) for choice in choices)) for count in requests]
