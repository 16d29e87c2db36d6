"""Expert all-to-all: bytes a rank exchanges per layer, and the bandwidth they are exchanged at.

DeepEP's listed GB/s is an *algorithm* bandwidth: every one of a token's expert copies counts,
those that stay inside the node too, so at EP 8 it exceeds one network card. Bytes divided by it
give the listed times. The tables hold what the DeepEP README states; between their sizes the
bandwidth is interpolated linearly in log EP, outside them it is held at the nearest size and the
answer says so.
"""

from __future__ import annotations

import dataclasses
import math

from deepinfer_jax.cost.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """Bytes of one copied row: FP8 with one fp32 scale per group on the way out, BF16 back."""

    dispatch_bytes_per_element: int = 1
    scale_group: int = 128
    scale_bytes: int = 4
    combine_bytes_per_element: int = 2

    def dispatch_row(self, hidden: int) -> int:
        """Bytes of one dispatched copy, scales included."""
        scales = -(-hidden // self.scale_group) * self.scale_bytes
        return hidden * self.dispatch_bytes_per_element + scales

    def combine_row(self, hidden: int) -> int:
        """Bytes of one combined copy."""
        return hidden * self.combine_bytes_per_element


def exchanged_bytes(
    tokens: int, experts_per_token: int, hidden: int, wire: WireFormat = WireFormat()
) -> tuple[int, int]:
    """(dispatch, combine) bytes one rank sends for one layer with `tokens` rows of its own.

    Example, DeepEP low latency: 128 rows, top 8, hidden 7168: 7,569,408 and 14,680,064 bytes.
    """
    copies = tokens * experts_per_token
    return copies * wire.dispatch_row(hidden), copies * wire.combine_row(hidden)


@dataclasses.dataclass(frozen=True)
class BandwidthTable:
    """Bytes/s by EP size, as measured. `ep` ascending; one entry per size in the other two."""

    name: str
    ep: tuple[int, ...]
    dispatch: tuple[float, ...]
    combine: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LowLatencyRow:
    """One row of DeepEP's low-latency table: microseconds and the listed GB/s."""

    ep: int
    dispatch_us: int
    dispatch_listed: int
    combine_us: int
    combine_listed: int


LOW_LATENCY_ROWS = (
    LowLatencyRow(8, 77, 98, 114, 127),
    LowLatencyRow(16, 118, 63, 195, 74),
    LowLatencyRow(32, 155, 48, 273, 53),
    LowLatencyRow(64, 173, 43, 314, 46),
    LowLatencyRow(128, 192, 39, 369, 39),
    LowLatencyRow(256, 194, 39, 360, 40),
)
"""DeepEP README: 128 tokens per rank, hidden 7168, top 8, H800 with ConnectX-7 400 Gb/s."""


def _from_times(name: str, rows: tuple[LowLatencyRow, ...]) -> BandwidthTable:
    dispatch, combine = exchanged_bytes(128, 8, 7168)
    return BandwidthTable(
        name,
        tuple(r.ep for r in rows),
        tuple(dispatch / (r.dispatch_us * 1e-6) for r in rows),
        tuple(combine / (r.combine_us * 1e-6) for r in rows),
    )


LOW_LATENCY_H800 = _from_times("DeepEP low latency, H800", LOW_LATENCY_ROWS)
NORMAL_H800 = BandwidthTable(
    "DeepEP normal, H800", (8, 16, 32, 64), (153e9, 43e9, 58e9, 51e9), (158e9, 43e9, 57e9, 50e9)
)
"""DeepEP README, 4096 tokens per rank, top 8 in top-4 groups: bottleneck bandwidth (NVLink at EP 8,
the network above). A token crosses the network once per node, not once per expert."""
V2_SM90 = BandwidthTable("DeepEP V2, SM90", (16, 32), (90e9, 61e9), (81e9, 61e9))
V2_SM100 = BandwidthTable("DeepEP V2, SM100", (8, 16), (726e9, 90e9), (740e9, 91e9))
"""DeepEP README, V2: 8K tokens per rank; on SM100 EP 8 is one NVLink domain, EP 16 two nodes."""


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Interpolated bytes/s each way; `extrapolated` when EP lies outside the measured sizes."""

    dispatch: float
    combine: float
    extrapolated: bool


def bandwidth_at(table: BandwidthTable, ep: int) -> Bandwidth:
    """Linear in log EP between measured sizes, the nearest measured size outside them."""
    if ep < 1:
        raise ValueError(f"ep={ep}: an exchange has at least one rank; give ep >= 1")
    position = math.log(min(max(ep, table.ep[0]), table.ep[-1]))
    sizes = [math.log(size) for size in table.ep]
    upper = next(i for i, size in enumerate(sizes) if size >= position)
    lower = max(upper - 1, 0)
    span = sizes[upper] - sizes[lower]
    weight = (position - sizes[lower]) / span if span else 0.0

    def between(values: tuple[float, ...]) -> float:
        return values[lower] + weight * (values[upper] - values[lower])

    outside = not table.ep[0] <= ep <= table.ep[-1]
    return Bandwidth(between(table.dispatch), between(table.combine), outside)


def link_bandwidth(hardware: Hardware, ep: int) -> Bandwidth:
    """Upper bound from the links alone: copies spread evenly, local ones free, both links at peak.

    With n ranks of which d share a scale-up domain, (d - 1)/n of the copies use the scale-up link
    and (n - d)/n the scale-out link; the slower of the two finishes last. What DeepEP measures on
    the H800 is 0.6-0.8 of this bound at EP 16 and above. Always marked `extrapolated`: it is no
    measurement.
    """
    if ep < 1:
        raise ValueError(f"ep={ep}: an exchange has at least one rank; give ep >= 1")
    domain = min(ep, hardware.scale_up_devices)
    near = (domain - 1) / ep / hardware.scale_up_bytes_per_second
    far = (ep - domain) / ep / hardware.scale_out_bytes_per_second
    slowest = max(near, far)
    rate = 1 / slowest if slowest else math.inf
    return Bandwidth(rate, rate, True)


@dataclasses.dataclass(frozen=True)
class ExchangeTime:
    """Seconds of one layer's dispatch and combine; `extrapolated` as in `Bandwidth`."""

    dispatch: float
    combine: float
    extrapolated: bool

    @property
    def total(self) -> float:
        """Dispatch plus combine, seconds."""
        return self.dispatch + self.combine


def exchange_time(
    tokens: int,
    experts_per_token: int,
    hidden: int,
    bandwidth: Bandwidth,
    wire: WireFormat = WireFormat(),
) -> ExchangeTime:
    """Seconds one layer's exchange takes at an algorithm bandwidth (see `exchanged_bytes`)."""
    dispatch, combine = exchanged_bytes(tokens, experts_per_token, hidden, wire)
    return ExchangeTime(
        dispatch / bandwidth.dispatch, combine / bandwidth.combine, bandwidth.extrapolated
    )


def node_copies(nodes: int, experts_per_token: int, node_limit: int) -> float:
    """Expected nodes a token is sent to when its experts fall evenly on `node_limit` of `nodes`.

    This is what the normal kernels carry across the network: 8 draws on m nodes touch
    `m * (1 - (1 - 1/m)**8)` of them (DeepSeek-V3, arXiv 2412.19437, limits m to 4).
    """
    m = min(nodes, node_limit)
    return m * (1 - (1 - 1 / m) ** experts_per_token)
