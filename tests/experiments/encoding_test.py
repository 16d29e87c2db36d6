"""The section `encoders` of a config: what it refuses, and what a report says of the stage."""

import numpy as np
import pytest

from deepinfer_jax.simulator import loading
from experiments import encoding

TRACE = "configs/traces/servegen_multimodal_mm-image_10rps_1200s.csv.gz"
GIVEN = {"machines": 1, "gpus": 2, "image_seconds": 1e-3, "patch_seconds": 2e-6}


def test_images_of_a_public_trace() -> None:
    """Nobody is ready before it was sent; those without images at once; busy time adds up."""
    trace = loading.load(TRACE)
    made = encoding.stage(trace, GIVEN, False, 0)
    assert made is not None
    order = np.argsort(made.encoded.ready, kind="stable")
    assert np.all(made.trace.arrival >= made.sent)
    assert sorted(made.sent.tolist()) == trace.arrival.tolist()
    without = (trace.image_tokens_per_request == 0)[order]
    assert without.any()
    assert np.all(made.trace.arrival[without] == made.sent[without])
    seconds = len(trace.image_tokens) * 1e-3 + trace.image_tokens.sum() * 9 * 2e-6
    summary = made.summary()
    spent = summary["encoder_seconds"]["mean"] * summary["images"]
    assert spent == pytest.approx(seconds, rel=1e-6)
    assert 0 < summary["encoder_busy_fraction"] < 1
    assert len(encoding.rows(summary)) == 3


def test_refusals() -> None:
    trace = loading.load(TRACE)
    with pytest.raises(ValueError, match=r"encoders\.gpu is unknown: did you mean encoders\.gpus"):
        encoding.stage(trace, {"gpu": 1}, False, 0)
    with pytest.raises(ValueError, match=r"closed_loop beside encoders"):
        encoding.stage(trace, GIVEN, True, 0)
    with pytest.raises(ValueError, match="has no images"):
        plain = loading.load("configs/traces/azure_llm_2023_conv.csv.gz")
        encoding.stage(plain, GIVEN, False, 0)
    assert encoding.stage(trace, None, False, 0) is None
    assert encoding.rows({}) == []
