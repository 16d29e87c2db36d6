"""The bytes model against every cell of DeepEP's tables (README); interpolation; bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cost import exchange, hardware

# DeepEP README, low latency: EP, dispatch us, dispatch GB/s, combine us, combine GB/s.
DEEPEP_LOW_LATENCY = [
    (8, 77, 98, 114, 127),
    (16, 118, 63, 195, 74),
    (32, 155, 48, 273, 53),
    (64, 173, 43, 314, 46),
    (128, 192, 39, 369, 39),
    (256, 194, 39, 360, 40),
]


def test_bytes_of_the_low_latency_benchmark():
    assert exchange.exchanged_bytes(128, 8, 7168) == (7_569_408, 14_680_064)


@pytest.mark.parametrize(
    "ep, dispatch_us, dispatch_gbs, combine_us, combine_gbs", DEEPEP_LOW_LATENCY
)
def test_every_low_latency_cell(ep, dispatch_us, dispatch_gbs, combine_us, combine_gbs):
    bandwidth = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, ep)
    assert not bandwidth.extrapolated
    assert dispatch_gbs * 1e9 == pytest.approx(bandwidth.dispatch, rel=0.02)
    assert combine_gbs * 1e9 == pytest.approx(bandwidth.combine, rel=0.02)
    took = exchange.exchange_time(128, 8, 7168, bandwidth)
    assert took.dispatch == pytest.approx(dispatch_us * 1e-6, rel=1e-9)
    assert took.combine == pytest.approx(combine_us * 1e-6, rel=1e-9)
    assert took.total == took.dispatch + took.combine


def test_times_follow_from_the_listed_bandwidths_alone():
    # Independent of the stored times: bytes over the printed GB/s, largest error 2.01 %.
    dispatch, combine = exchange.exchanged_bytes(128, 8, 7168)
    errors = []
    for _, dispatch_us, dispatch_gbs, combine_us, combine_gbs in DEEPEP_LOW_LATENCY:
        errors.append(dispatch / (dispatch_gbs * 1e9) / (dispatch_us * 1e-6) - 1)
        errors.append(combine / (combine_gbs * 1e9) / (combine_us * 1e-6) - 1)
    assert min(errors) > 0  # the README truncates
    assert max(errors) == pytest.approx(0.0201, abs=1e-4)


@pytest.mark.parametrize("ep, d, c", [(8, 153, 158), (16, 43, 43), (32, 58, 57), (64, 51, 50)])
def test_normal_kernel_bandwidths(ep, d, c):
    got = exchange.bandwidth_at(exchange.NORMAL_H800, ep)
    assert (got.dispatch, got.combine) == pytest.approx((d * 1e9, c * 1e9))


def test_v2_bandwidths():
    assert exchange.bandwidth_at(exchange.V2_SM100, 8).combine == pytest.approx(740e9)
    assert exchange.bandwidth_at(exchange.V2_SM90, 32).dispatch == pytest.approx(61e9)


def test_interpolation_is_linear_in_log_ep():
    # Half way between EP 16 and 64 on the log scale lies EP 32: remove it and the mean comes out.
    table = exchange.BandwidthTable("two", (16, 64), (100.0, 50.0), (80.0, 20.0))
    middle = exchange.bandwidth_at(table, 32)
    assert (middle.dispatch, middle.combine) == pytest.approx((75.0, 50.0))
    at_72 = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, 72)
    share = math.log(72 / 64) / math.log(2)
    assert at_72.dispatch == pytest.approx(
        (1 - share) * 7_569_408 / 173e-6 + share * 7_569_408 / 192e-6
    )


@pytest.mark.parametrize("ep, nearest", [(4, 8), (320, 256)])
def test_outside_the_table_is_held_and_flagged(ep, nearest):
    got = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, ep)
    assert got.extrapolated
    edge = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, nearest)
    assert (got.dispatch, got.combine) == (edge.dispatch, edge.combine)
    assert exchange.exchange_time(64, 8, 7168, got).extrapolated


@given(st.integers(8, 256), st.integers(8, 256))
def test_between_neighbours(a, b):
    low, high = sorted((a, b))
    faster = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, low)
    slower = exchange.bandwidth_at(exchange.LOW_LATENCY_H800, high)
    assert faster.dispatch >= slower.dispatch  # the dispatch column never rises with EP


def test_link_bound_lies_above_every_multi_node_measurement():
    for ep, dispatch_us, _, _, _ in DEEPEP_LOW_LATENCY[1:]:
        bound = exchange.link_bandwidth(hardware.H800, ep).dispatch
        assert 0.6 < 7_569_408 / (dispatch_us * 1e-6) / bound < 0.8
    assert exchange.link_bandwidth(hardware.H800, 16).dispatch == pytest.approx(100e9)
    assert exchange.link_bandwidth(hardware.GB200, 64).dispatch == pytest.approx(900e9 * 64 / 63)
    assert exchange.link_bandwidth(hardware.H800, 1).dispatch == math.inf


def test_node_limited_copies():
    assert exchange.node_copies(1, 8, 4) == 1
    # 8 draws on 4 nodes, by inclusion and exclusion: 4 * (1 - (3/4)**8).
    assert exchange.node_copies(12, 8, 4) == pytest.approx(3.5995483)


@pytest.mark.parametrize("ep", [0, -8])
def test_no_ranks(ep):
    with pytest.raises(ValueError, match="at least one rank"):
        exchange.bandwidth_at(exchange.NORMAL_H800, ep)
    with pytest.raises(ValueError, match="at least one rank"):
        exchange.link_bandwidth(hardware.H800, ep)
