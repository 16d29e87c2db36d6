"""The published wide-EP decode point: bound, calibration and what other batch sizes would give."""

import dataclasses

import pytest

from deepinfer_jax.cost import hardware, published, roofline
from deepinfer_jax.cost.roofline import Efficiency
from deepinfer_jax.presets import v41_flash

MODEL = v41_flash()


def test_the_point_itself():
    point = published.WIDE_EP_DECODE
    assert round(point.steps_per_second, 2) == 75.69
    assert point.steps_per_second * point.tau * point.requests == pytest.approx(15_744)


def test_the_pure_roofline_is_faster():
    found = published.calibrate(MODEL)
    assert found.pure_steps_per_second == pytest.approx(262, abs=1)
    assert found.uniform == pytest.approx(0.289, abs=0.001)
    assert found.overhead == pytest.approx(9.40e-3, abs=0.01e-3)


def test_the_bound_by_hand():
    """Largest parts at the point from sizes alone: 256 rows, 6 local experts, 40 layers."""
    parts = {p.name: p for p in published.calibrate(MODEL).pure.parts}
    expert = 3 * 5120 * 2304
    assert parts["routed experts"].compute == pytest.approx(256 * 40 * 6 * expert * 2 / 5e15)
    assert parts["head"].memory == pytest.approx(129_280 * 5120 * 2 / 8e12)
    pairs = 64 * 4 * (40 * 128 + 38 * 512)
    assert parts["attention core"].compute == pytest.approx(pairs * 64 * 1024 * 2 / 2.5e15)


@pytest.mark.parametrize("name", ["uniform", "overhead", "attention core", "head", "exchange"])
def test_every_calibration_meets_the_point(name):
    found = published.calibrate(MODEL)
    if name == "uniform":
        efficiency = Efficiency.uniform(found.uniform)
    elif name == "overhead":
        efficiency = Efficiency(overhead=found.overhead)
    elif name == "exchange":
        efficiency = Efficiency(exchange=found.of_part["exchange"])
    else:
        efficiency = Efficiency(of_part=((name, found.of_part[name]),))
    step = roofline.decode_time(
        MODEL, hardware.GB200, 64, 64 * 131_072, 64, nextn=3, efficiency=efficiency
    )
    assert 1 / step.seconds == pytest.approx(246 / 3.25)


def test_batch_rows():
    rows = {row.requests: row for row in published.batch_rows(MODEL, [8, 64, 128])}
    at = rows[64]
    for calibrated in (at.uniform, at.overhead):
        assert calibrated.user_rate == pytest.approx(246)
        assert calibrated.device_rate == pytest.approx(15_744)
    # With an overhead, small batches look worse and large ones better than with lost peaks.
    assert rows[8].overhead.user_rate < rows[8].uniform.user_rate < rows[8].pure.user_rate
    assert rows[128].uniform.user_rate < rows[128].overhead.user_rate < rows[128].pure.user_rate


def test_eight_gpu_domains_cannot_have_made_the_point():
    """With one 400 Gb/s card per GPU the exchange alone outlasts the published step."""
    with pytest.raises(ValueError, match=r"49\.9 steps/s, below the point's 75\.7"):
        published.calibrate(MODEL, hardware.B200)
    joined = dataclasses.replace(hardware.B200, scale_up_devices=64)
    assert 0.28 < published.calibrate(MODEL, joined).uniform < 0.32
