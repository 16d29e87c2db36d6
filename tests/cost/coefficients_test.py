"""The integer step cost stays near the roofline it replaces, and says how near."""

import numpy as np
import pytest

from deepinfer_jax.cost import coefficients, hardware, roofline
from deepinfer_jax.cost.exchange import LOW_LATENCY_H800, bandwidth_at
from deepinfer_jax.cost.roofline import Efficiency
from deepinfer_jax.presets import v41_flash

MODEL = v41_flash()
LOSSY = Efficiency(compute=0.6, memory=0.7, exchange=0.9, overhead=1e-3)


@pytest.fixture(scope="module")
def derived():
    return coefficients.step_cost(MODEL, hardware.GB200, ranks=64, nextn=3, efficiency=LOSSY)


def decode_step(cost, rows, kv):
    return max(int(form @ np.int64([1, rows, kv])) for form in cost.decode_forms)


def test_leaves_are_non_negative_integers(derived):
    cost, _ = derived
    for name in ("base", "token", "pair", "context", "exchange_base", "exchange_token"):
        value = getattr(cost, f"prefill_{name}")
        assert isinstance(value, int) and value >= 0
    assert cost.decode_forms.dtype == np.int64 and cost.decode_forms.shape[1] == 3
    assert (cost.decode_forms >= 0).all()
    assert cost.prefill_pair > 1000 and cost.decode_forms[:, 2].min() > 1000  # four digits or more


def test_decode_forms_between_the_fitted_points(derived):
    cost, error = derived
    for requests, context in [(1, 131_072), (6, 2048), (24, 9000), (40, 100_000), (100, 30_000)]:
        exact = roofline.decode_time(
            MODEL, hardware.GB200, requests, requests * context, 64, nextn=3, efficiency=LOSSY
        )
        got = decode_step(cost, requests, requests * context) * 1e-15
        assert got == pytest.approx(exact.local, rel=error.decode.largest + 0.01)
    assert error.decode.largest < 0.03 and error.decode.forms <= 4


def test_reported_decode_error_is_the_error(derived):
    cost, error = derived
    errors = []
    for requests, kv in coefficients.DEFAULT_RANGE.decode:
        exact = roofline.decode_time(
            MODEL, hardware.GB200, requests, kv, 64, nextn=3, efficiency=LOSSY
        ).local
        errors.append(abs(decode_step(cost, requests, kv) * 1e-15 / exact - 1))
    assert error.decode.samples == len(errors)
    assert error.decode.largest == pytest.approx(max(errors), abs=1e-6)
    assert error.decode.median == pytest.approx(np.median(errors), abs=1e-6)


def test_prefill_polynomial(derived):
    cost, error = derived
    for q, c in [(700, 3000), (3000, 0), (6000, 40_000), (12_000, 100_000)]:
        exact = roofline.prefill_time(MODEL, hardware.GB200, [(q, c)], 64, efficiency=LOSSY).local
        got = (cost.prefill_base + cost.prefill_work(q, c)) * 1e-15
        assert got == pytest.approx(exact, rel=error.prefill.largest)
    assert error.prefill.median < 0.06 and error.prefill.samples == 42
    # A batch of two chunks pays the base once, like the roofline's weights.
    pair = [(3000, 0), (6000, 40_000)]
    exact = roofline.prefill_time(MODEL, hardware.GB200, pair, 64, efficiency=LOSSY).local
    got = (cost.prefill_base + sum(cost.prefill_work(q, c) for q, c in pair)) * 1e-15
    assert got == pytest.approx(exact, rel=0.1)


def test_exchange_is_proportional_to_all_rows(derived):
    cost, _ = derived
    step = roofline.decode_time(MODEL, hardware.GB200, 10, 10 * 4096, 64, nextn=3, efficiency=LOSSY)
    assert cost.decode_exchange_row * 10 * 64 * 1e-15 == pytest.approx(step.exchange, rel=1e-6)
    prompt = roofline.prefill_time(MODEL, hardware.GB200, [(500, 0)], 64, efficiency=LOSSY)
    sent = cost.prefill_exchange_token * 500 * 64 * 1e-15
    assert sent == pytest.approx(prompt.exchange, rel=1e-6)


def test_measured_bandwidth_is_used():
    table = bandwidth_at(LOW_LATENCY_H800, 32)
    small = coefficients.WorkingRange((512, 4096, 8192), (0, 4096, 65_536), (8, 64), (4096, 65_536))
    cost, error = coefficients.step_cost(
        MODEL, hardware.H800, ranks=32, decode_bandwidth=table, working=small
    )
    rows = 40 * 6  # copies of a row over the layers
    seconds = rows * (5280 / table.dispatch + 10_240 / table.combine)
    assert cost.decode_exchange_row * 32 * 1e-15 == pytest.approx(seconds, rel=1e-6)
    assert error.decode.samples == 4


def test_small_groups_report_their_concavity():
    """Few rows touch few experts, which no maximum of affine forms can follow; it shows."""
    _, error = coefficients.step_cost(MODEL, hardware.GB200, ranks=8)
    assert 0.3 < error.decode.largest < 0.5
