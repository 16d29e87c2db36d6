"""From the roofline to the integer `StepCost` that the scheduler and the simulator charge.

A prefill step is fitted by the quota polynomial. A decode step is a sum of maxima of two branches
per part, hence the maximum over all choices of branches; every branch is fitted by a non-negative
affine form, and a few of the choices that are active somewhere in the working range are kept. The
exchange is proportional to the rows sent. What the affine forms lose is measured, not assumed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.cost.exchange import Bandwidth, link_bandwidth
from deepinfer_jax.cost.hardware import Hardware
from deepinfer_jax.cost.quota import HeldOutError, QuotaFit, fit_quota, non_negative_least_squares
from deepinfer_jax.cost.roofline import PEAK, Efficiency, StepTime, decode_time, prefill_time
from deepinfer_jax.cost.steps import FEMTOSECONDS_PER_SECOND, StepCost


@dataclasses.dataclass(frozen=True)
class WorkingRange:
    """The points at which the affine forms are fitted and their error is measured."""

    new_tokens: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 16_384)
    cached_tokens: tuple[int, ...] = (0, 1024, 4096, 16_384, 65_536, 131_072)
    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128)
    contexts: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 131_072)

    @property
    def prefill(self) -> Iterator[tuple[int, int]]:
        """(q, c) of every prefill sample."""
        return itertools.product(self.new_tokens, self.cached_tokens)

    @property
    def decode(self) -> Iterator[tuple[int, int]]:
        """(requests, KV tokens they hold together) of every decode sample."""
        return ((r, r * c) for r, c in itertools.product(self.requests, self.contexts))


DEFAULT_RANGE = WorkingRange()


@dataclasses.dataclass(frozen=True)
class FormError:
    """Relative errors |form / roofline - 1| over the decode samples, and the forms used."""

    median: float
    p90: float
    largest: float
    samples: int
    forms: int


@dataclasses.dataclass(frozen=True)
class CoefficientError:
    """How far the affine forms are from the roofline they replace (exchange apart: exact)."""

    prefill: HeldOutError
    decode: FormError


def _decode_forms(
    samples: list[tuple[int, int]], steps: list[StepTime], max_forms: int
) -> tuple[np.ndarray, FormError]:
    """The few maxima of branches that stay closest to the step times, [F, 3] in seconds."""
    columns = np.asarray([(1, r, kv) for r, kv in samples], np.float64)
    target = np.asarray([step.local for step in steps])
    branches = np.asarray([[(p.compute, p.memory) for p in step.parts] for step in steps])
    fitted = np.zeros((branches.shape[1], 2, 3))
    for part, branch in np.ndindex(*fitted.shape[:2]):
        fitted[part, branch] = non_negative_least_squares(
            columns / target[:, None], branches[:, part, branch] / target
        )
    active = np.unique(branches.argmax(axis=2), axis=0)  # [choices, parts]
    forms = np.take_along_axis(fitted[None], active[..., None, None], axis=2)[:, :, 0].sum(axis=1)
    forms[:, 0] += steps[0].overhead
    values = forms @ columns.T  # [choices, samples]
    chosen: list[int] = []
    best = np.inf
    while len(chosen) < max_forms:
        errors = [
            np.abs(values[[*chosen, i]].max(axis=0) / target - 1).max() for i in range(len(forms))
        ]
        if min(errors) >= best:
            break
        best = min(errors)
        chosen.append(int(np.argmin(errors)))
    error = np.abs(values[chosen].max(axis=0) / target - 1)
    return forms[chosen], FormError(
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        float(error.max()),
        len(samples),
        len(chosen),
    )


def _prefill_fit(
    model: ModelConfig,
    hardware: Hardware,
    ranks: int,
    efficiency: Efficiency,
    cache: CacheConfig | None,
    working: WorkingRange,
) -> QuotaFit:
    chunks = list(working.prefill)
    times = [
        prefill_time(model, hardware, [chunk], ranks, efficiency=efficiency, cache=cache).local
        for chunk in chunks
    ]
    return fit_quota([q for q, _ in chunks], [c for _, c in chunks], times)


def step_cost(
    model: ModelConfig,
    hardware: Hardware,
    *,
    ranks: int,
    nextn: int = 0,
    efficiency: Efficiency = PEAK,
    cache: CacheConfig | None = None,
    prefill_bandwidth: Bandwidth | None = None,
    decode_bandwidth: Bandwidth | None = None,
    working: WorkingRange = DEFAULT_RANGE,
    max_forms: int = 4,
) -> tuple[StepCost, CoefficientError]:
    """`StepCost` of an engine with EP = DP = `ranks`, and its error against the roofline.

    Args:
      ranks, nextn, efficiency, cache: as in `prefill_time` and `decode_time`.
      prefill_bandwidth, decode_bandwidth: of the exchange; the links' peak unless given.
      working: where the forms are fitted; their error holds there, not beyond.
      max_forms: decode forms kept at most.

    The exchange rows of `StepCost` count all ranks' rows together, so the per-row coefficient is a
    rank's time per row divided by the ranks. Decode forms take `nextn + 1` rows per request.
    """
    fit = _prefill_fit(model, hardware, ranks, efficiency, cache, working)
    samples = list(working.decode)
    steps = [
        decode_time(model, hardware, r, kv, ranks, nextn=nextn, efficiency=efficiency)
        for r, kv in samples
    ]
    forms, form_error = _decode_forms(samples, steps, max_forms)
    links = link_bandwidth(hardware, ranks)
    tokens = working.new_tokens[-1]
    prompt = prefill_time(
        model,
        hardware,
        [(tokens, 0)],
        ranks,
        efficiency=efficiency,
        cache=cache,
        bandwidth=prefill_bandwidth or links,
    )
    requests = working.requests[-1]
    decode = decode_time(
        model,
        hardware,
        requests,
        requests * working.contexts[-1],
        ranks,
        nextn=nextn,
        efficiency=efficiency,
        bandwidth=decode_bandwidth or links,
    )
    cost = StepCost(
        **fit.quota.femtoseconds(),
        prefill_exchange_base=0,
        prefill_exchange_token=_femtoseconds(prompt.exchange / tokens / ranks),
        decode_forms=np.rint(forms * FEMTOSECONDS_PER_SECOND).astype(np.int64),
        decode_exchange_base=0,
        decode_exchange_row=_femtoseconds(decode.exchange / requests / ranks),
    )
    return cost, CoefficientError(fit.held_out, form_error)


def _femtoseconds(seconds: float) -> int:
    return round(seconds * FEMTOSECONDS_PER_SECOND)
