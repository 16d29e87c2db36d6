"""Which implementation of an op runs: names, the one error for a wrong one, and how to interpret."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.experimental.pallas import tpu as pltpu

KERNELS = ("xla", "tpu", "interpret", "simulate")


def check(op: str, kernels: str, has: Iterable[str] = KERNELS) -> None:
    """Refuse an implementation that `op` does not have.

    Raises:
      ValueError: `kernels` is none of `has`.
    """
    if kernels not in tuple(has):
        raise ValueError(
            f"kernels is {kernels!r}, which {op} does not have; choose one of {', '.join(has)}"
        )


def check_platform(kernels: str, platform: str) -> None:
    """Refuse an implementation that does not run on jax's `platform`.

    Raises:
      ValueError: `kernels` is none of `KERNELS`, or compiles for TPUs and this is none.
    """
    check("the model", kernels)
    if kernels == "tpu" and platform != "tpu":
        raise ValueError(
            f"kernels is 'tpu' but jax runs on {platform!r}; choose xla, or interpret to run the "
            "kernels slowly"
        )


def interpretation(kernels: str) -> Any:
    """The `interpret` argument of `pallas_call`.

    "tpu" compiles; "interpret" runs the kernel as XLA operations; "simulate" runs it on a model of
    the TPU's memories and DMA engines, whose fresh memory is NaN and which looks for races.
    """
    if kernels == "simulate":
        return pltpu.InterpretParams(detect_races=True)
    return kernels == "interpret"
