"""Accelerators as the cost model sees them: peak rates, bandwidths and capacities per device.

Every rate is per device, dense (no structured sparsity) and one direction. Where a device has no
native format, the next wider one's rate is listed: FP4 work runs at the FP8 rate on Hopper and on
TPUs, FP8 work at the BF16 rate on TPU v5e, v5p and v6e.

Sources, by device:

* H100 SXM, NVIDIA H100 datasheet: 989.4 BF16 and 1,978.9 FP8 TFLOP/s, 80 GB, 3.35 TB/s, NVLink
  900 GB/s both directions; DGX H100: 8 GPUs per NVLink domain, one 400 Gb/s ConnectX-7 per GPU.
* H800 SXM: the H100's compute and memory; NVLink 400 GB/s both directions and ConnectX-7 400 Gb/s
  (DeepEP README, which reaches about 160 GB/s of NVLink and 50 GB/s of the NIC).
* H200 SXM, NVIDIA H200 datasheet: the H100's compute, 141 GB, 4.8 TB/s, NVLink 900 GB/s.
* B200 (HGX, 1,000 W), NVIDIA Blackwell architecture brief and DGX B200 datasheet: 2.25 BF16, 4.5
  FP8, 9 FP4 PFLOP/s, 180 GB usable of 192 (1,440 GB per 8), 8 TB/s (64 per 8), NVLink 1.8 TB/s
  both directions, 400 Gb/s ConnectX-7 per GPU.
* GB200 (NVL72, 1,200 W), NVIDIA GB200 NVL72 datasheet: 2.5 BF16, 5 FP8, 10 FP4 PFLOP/s, 186 GB
  (13.4 TB per 72), 8 TB/s (576 per 72), NVLink 1.8 TB/s (130 TB/s per 72), 400 Gb/s per GPU.
* TPU v5e, Google Cloud TPU documentation: 197 BF16 TFLOP/s, 16 GiB, 819 GB/s, ICI 400 GB/s both
  directions, pods of 256. TPU v5p: 459, 95 GiB, 2,765 GB/s, ICI 1,200 GB/s, pods of 8,960.
  TPU v6e: 918, 32 GiB, 1,640 GB/s, ICI 800 GB/s, pods of 256. TPU7x: 2,307 BF16 and 4,614 FP8,
  192 GiB, 7,380 GB/s, ICI 1,200 GB/s, pods of 9,216.
* TPU data-centre network per chip: 25, 50, 100 and 100 Gb/s for v5e, v5p, v6e and 7x ("How to
  Scale Your Model", chapter on TPUs; Google Cloud TPU7x page).
* Storage network: one 400 Gb/s NIC per node of 8 GPUs (DualPath, arXiv 2602.21548, section 5).
  Assumed, not published: the same NIC per GB200 tray of 4, the data-centre network of a TPU.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One accelerator. Rates in FLOP/s or bytes/s, one direction, per device; capacity in bytes."""

    name: str
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    hbm_bytes_per_second: float
    hbm_bytes: float
    scale_up_bytes_per_second: float  # NVLink or ICI
    scale_out_bytes_per_second: float  # the device's share of the compute network
    storage_bytes_per_second: float  # the device's share of the storage network
    scale_up_devices: int  # devices that reach each other over the scale-up links

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(
                    f"hardware {self.name!r}: {field.name}={value!r} is not a positive number; "
                    "give it in FLOP/s, bytes/s, bytes or devices"
                )


def _hopper(name: str, hbm_rate: float, hbm_bytes: float, scale_up: float) -> Hardware:
    return Hardware(
        name, 989.4e12, 1978.9e12, 1978.9e12, hbm_rate, hbm_bytes, scale_up, 50e9, 6.25e9, 8
    )


H800 = _hopper("H800", 3.35e12, 80e9, 200e9)
H100 = _hopper("H100", 3.35e12, 80e9, 450e9)
H200 = _hopper("H200", 4.8e12, 141e9, 450e9)
B200 = Hardware("B200", 2.25e15, 4.5e15, 9e15, 8e12, 180e9, 900e9, 50e9, 6.25e9, 8)
GB200 = Hardware("GB200", 2.5e15, 5e15, 10e15, 8e12, 186e9, 900e9, 50e9, 12.5e9, 72)
TPU_V5E = Hardware(
    "TPU v5e", 197e12, 197e12, 197e12, 819e9, 16.0 * GIB, 200e9, 3.125e9, 3.125e9, 256
)
TPU_V5P = Hardware(
    "TPU v5p", 459e12, 459e12, 459e12, 2765e9, 95.0 * GIB, 600e9, 6.25e9, 6.25e9, 8960
)
TPU_V6E = Hardware(
    "TPU v6e", 918e12, 918e12, 918e12, 1640e9, 32.0 * GIB, 400e9, 12.5e9, 12.5e9, 256
)
TPU_7X = Hardware(
    "tpu7x", 2307e12, 4614e12, 4614e12, 7380e9, 192.0 * GIB, 600e9, 12.5e9, 12.5e9, 9216
)

PRESETS = {h.name: h for h in (H800, H100, H200, B200, GB200, TPU_V5E, TPU_V5P, TPU_V6E, TPU_7X)}


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def lookup(name: str) -> Hardware:
    """The preset called `name`, case, spaces and punctuation ignored.

    Raises:
      ValueError: no such preset; the message suggests the nearest.
    """
    known = {_key(n): h for n, h in PRESETS.items()}
    if _key(name) in known:
        return known[_key(name)]
    nearest = difflib.get_close_matches(_key(name), known, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"hardware {name!r} is not a preset; did you mean {known[nearest].name!r}? "
        f"(presets: {', '.join(PRESETS)}; own hardware: a JSON file)"
    )


def load(path: str | pathlib.Path) -> Hardware:
    """Own hardware from a JSON object with exactly the fields of `Hardware`.

    Raises:
      ValueError: an unknown key (with the nearest known one), a missing key, a value not positive.
    """
    values = json.loads(pathlib.Path(path).read_text())
    names = [field.name for field in dataclasses.fields(Hardware)]
    if not isinstance(values, dict):
        raise ValueError(f"{path}: found {type(values).__name__}; give one JSON object of {names}")
    for key in values:
        if key not in names:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            raise ValueError(f"{path}: unknown key {key!r}; did you mean {nearest!r}?")
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{path}: missing keys {missing}; a hardware file names every field")
    return Hardware(**values)


def resolve(name_or_path: str) -> Hardware:
    """A preset by name, or a file when the argument ends in `.json`."""
    return load(name_or_path) if name_or_path.endswith(".json") else lookup(name_or_path)


def _best_seconds(run: Callable[[], jax.Array], repeats: int) -> float:
    run().block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def measure_this_machine(
    matmul_size: int | None = None, copy_bytes: int | None = None, repeats: int = 3
) -> Hardware:
    """Matmul rate and copy bandwidth of jax's default device; its links get the copy bandwidth.

    The matmul is float32 and small on a CPU (which has no faster format there), bfloat16 and large
    enough to fill the device elsewhere; the copy counts the bytes read and the bytes written. The
    best of `repeats` runs is kept. Takes about a second. Links and storage of one machine are
    its memory, so they share its bandwidth; capacity is the device's own limit where it tells, else
    the array measured with.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    matmul_size = matmul_size or (1024 if on_cpu else 8192)
    copy_bytes = copy_bytes or (64 if on_cpu else 1024) * 2**20
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    square = jnp.ones((matmul_size, matmul_size), dtype)
    vector = jnp.zeros(copy_bytes // 4, jnp.float32)
    multiply = jax.jit(lambda a: a @ a)
    touch = jax.jit(lambda v: v + 1, donate_argnums=0)
    holder = [vector]  # updated in place, so that no page of a fresh result is touched

    def update() -> jax.Array:
        holder[0] = touch(holder[0])
        return holder[0]

    flops = 2 * matmul_size**3 / _best_seconds(lambda: multiply(square), repeats)
    bandwidth = 2 * copy_bytes / _best_seconds(update, repeats)
    limit = (device.memory_stats() or {}).get("bytes_limit", copy_bytes)
    return Hardware(
        name=f"this machine ({device.device_kind})",
        bf16_flops=flops,
        fp8_flops=flops,
        fp4_flops=flops,
        hbm_bytes_per_second=bandwidth,
        hbm_bytes=float(limit),
        scale_up_bytes_per_second=bandwidth,
        scale_out_bytes_per_second=bandwidth,
        storage_bytes_per_second=bandwidth,
        scale_up_devices=jax.device_count(),
    )
