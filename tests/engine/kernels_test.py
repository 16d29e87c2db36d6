"""An engine whose model runs by interpreted kernels says what the reference path says."""

from __future__ import annotations

import pytest

from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.pack import Buckets
from deepinfer_jax.engine.sampling_params import SamplingParams
from tests.engine import small_engine as small

BUCKETS = Buckets(sequences=(2,), prompt=(16,), blocks=(2,), prompts=1)
SIZES = {"max_num_seqs": 2, "max_model_len": 24, "max_num_batched_tokens": 16, "num_blocks": 12}


WISH = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 9, 200, 17, 33, 4, 250, 8, 77, 6, 12], [40, 41]]


def by_kernels(kernels: str, nextn: int, format: str) -> Device:
    """The micro model on a device of its own."""
    model = small.micro()
    config = small.config(kernels=kernels, nextn=nextn, **SIZES)
    return Device(small.parameters(model), model, config, buckets=BUCKETS, format=format)


@pytest.mark.parametrize(
    "nextn, format", [(0, "values"), pytest.param(3, "bytes", marks=pytest.mark.slow)]
)
def test_the_tokens_are_those_of_the_reference_path(device, nextn, format):
    asked = lambda: small.requests(PROMPTS, [WISH] * 2)  # noqa: E731
    made = small.serve(small.engine(by_kernels("interpret", nextn, format)), asked())
    assert made == small.serve(small.engine(device), asked())
    assert [len(x) for x in made.values()] == [6, 6] and made[0] != made[1]


def test_kernels_that_do_not_run_here_are_refused():
    with pytest.raises(ValueError, match="kernels is 'tpu' but jax runs on 'cpu'"):
        by_kernels("tpu", 0, "values")
    with pytest.raises(ValueError, match="kernels is 'fast'; choose one of xla, tpu, interpret"):
        small.config(kernels="fast")
