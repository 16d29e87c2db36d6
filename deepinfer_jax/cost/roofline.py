"""Step times: every part takes the longer of its arithmetic and its memory traffic.

A step is the sum of its parts, the exposed share of the expert exchange and a fixed overhead. At
efficiencies of one this is a bound, not a prediction: no kernel reaches all peaks, and the parts
are separate kernels that overlap only where `Efficiency.exposed_exchange` says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.cost import operations as ops
from deepinfer_jax.cost.exchange import Bandwidth, link_bandwidth
from deepinfer_jax.cost.hardware import Hardware
from deepinfer_jax.cost.work import StepWork, decode_work, prefill_work


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that are reached, in (0, 1], and seconds added to every step.

    `exposed_exchange` is the share of the exchange that no computation hides. `of_part` multiplies
    both branches of single parts, by name.
    """

    compute: float = 1.0
    memory: float = 1.0
    exchange: float = 1.0
    exposed_exchange: float = 1.0
    overhead: float = 0.0
    of_part: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        shares = {"compute": self.compute, "memory": self.memory, "exchange": self.exchange}
        for name, share in [*shares.items(), *self.of_part]:
            if not 0 < share <= 1:
                raise ValueError(f"efficiency {name}={share!r}: give a share of the peak in (0, 1]")
        if not 0 <= self.exposed_exchange <= 1 or self.overhead < 0:
            raise ValueError(
                f"exposed_exchange={self.exposed_exchange!r}, overhead={self.overhead!r}: "
                "give a share in [0, 1] and seconds of at least 0"
            )

    @classmethod
    def uniform(cls, share: float) -> Efficiency:
        """Every peak, links included, reached to the same share."""
        return cls(compute=share, memory=share, exchange=share)


PEAK = Efficiency()
"""Every peak reached: the pure roofline."""


@dataclasses.dataclass(frozen=True)
class PartTime:
    """Seconds of a part's arithmetic and of its memory traffic; it lasts as long as the longer."""

    name: str
    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        """The longer branch."""
        return max(self.compute, self.memory)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step of one rank, in seconds: its parts, the exposed exchange, the overhead."""

    parts: tuple[PartTime, ...]
    exchange: float
    overhead: float
    extrapolated: bool  # the exchange bandwidth lies outside what was measured

    @property
    def local(self) -> float:
        """Everything but the exchange."""
        return sum(part.seconds for part in self.parts) + self.overhead

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.local + self.exchange


def operation_rate(hardware: Hardware, number_format: int) -> float:
    """FP8-equivalent operations per second in a matmul format (TF32 runs at half the BF16 rate)."""
    rates = {
        ops.FP4: hardware.fp4_flops / 2,
        ops.FP8: hardware.fp8_flops,
        ops.BF16: hardware.bf16_flops * 2,
        ops.FP32: hardware.bf16_flops * 2,
    }
    return rates[number_format]


def step_time(
    work: StepWork,
    hardware: Hardware,
    bandwidth: Bandwidth,
    efficiency: Efficiency = PEAK,
) -> StepTime:
    """Seconds of `work` on `hardware`, its exchange at `bandwidth`."""
    special = dict(efficiency.of_part)
    unknown = set(special) - {part.name for part in work.parts}
    if unknown:
        raise ValueError(f"no part {sorted(unknown)}; parts are {[p.name for p in work.parts]}")
    parts = []
    for part in work.parts:
        share = special.get(part.name, 1.0)
        rate = operation_rate(hardware, part.format) * efficiency.compute * share
        stream = hardware.hbm_bytes_per_second * efficiency.memory * share
        parts.append(PartTime(part.name, part.operations / rate, part.bytes / stream))
    sent = work.dispatch_bytes / bandwidth.dispatch + work.combine_bytes / bandwidth.combine
    exposed = efficiency.exposed_exchange * sent / efficiency.exchange
    return StepTime(tuple(parts), exposed, efficiency.overhead, bandwidth.extrapolated)


def prefill_time(
    model: ModelConfig,
    hardware: Hardware,
    chunks: Sequence[tuple[int, int]],
    ranks: int,
    *,
    efficiency: Efficiency = PEAK,
    bandwidth: Bandwidth | None = None,
    cache: CacheConfig | None = None,
) -> StepTime:
    """A prompt step over `chunks` of (q, c); the exchange at the links' peak unless given."""
    work = prefill_work(model, chunks, ranks, cache)
    return step_time(work, hardware, bandwidth or link_bandwidth(hardware, ranks), efficiency)


def decode_time(
    model: ModelConfig,
    hardware: Hardware,
    requests: int,
    kv_tokens: int,
    ranks: int,
    *,
    nextn: int = 0,
    efficiency: Efficiency = PEAK,
    bandwidth: Bandwidth | None = None,
) -> StepTime:
    """A decode step of `requests` per rank holding `kv_tokens` together."""
    work = decode_work(model, requests, kv_tokens, nextn, ranks)
    return step_time(work, hardware, bandwidth or link_bandwidth(hardware, ranks), efficiency)
