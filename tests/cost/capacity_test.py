"""Sizing against lab 23, the day-6 overview and the chapter's storage figures."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.cost import capacity


@pytest.mark.parametrize("reused, prefill", [(0, 3), (0.75, 1)])
def test_lab_23(reused, prefill):
    assert capacity.prefill_gpus(4, 1024, reused, 2048, 0.8) == prefill
    assert capacity.decode_gpus(4, 64, 128, 0.8) == 3


@given(st.integers(1, 500), st.integers(1, 10**5), st.integers(0, 99), st.integers(1, 100))
def test_ceiling_is_exact_on_decimals(rate, length, reused_percent, utilisation_percent):
    got = capacity.prefill_gpus(rate, length, reused_percent / 100, 2048, utilisation_percent / 100)
    need = Fraction(rate * length * (100 - reused_percent), 2048 * utilisation_percent)
    assert got == -(-need.numerator // need.denominator)


def test_a_whole_answer_is_not_rounded_up():
    # 3 * 0.1 / 0.1 is 3.0000000000000004 in binary.
    assert capacity.decode_gpus(3, 1, 1, 0.1) == 30
    assert math.ceil(3 * 0.1 / 0.1) == 4


def test_request_hits_and_token_hits_are_different_demands():
    # A hundred requests that all hit ten of a thousand tokens: 1 % reused, not 100 %.
    assert capacity.prefill_gpus(100, 1000, 0.01, 1000) == 99
    assert capacity.prefill_gpus(100, 1000, 1.0, 1000) == 0


def test_day_6():
    prefill = capacity.nodes_for_daily_tokens(608e9, 73.7e3)
    decode = capacity.nodes_for_daily_tokens(168e9, 14.8e3)
    assert round(prefill, 1) == 95.5
    assert round(decode, 1) == 131.4
    assert round(prefill + decode, 1) == 226.9
    assert prefill + decode == pytest.approx(226.75, rel=0.001)
    assert capacity.nodes_for_daily_tokens((608 - 342) * 1e9, 32.2e3) == pytest.approx(
        prefill, rel=0.002
    )


def test_storage_server():
    server = capacity.StorageServer()
    assert server.raw_bytes / 1e12 == pytest.approx(614.6)
    assert server.usable_bytes / 1e12 == pytest.approx(512.2, abs=0.05)
    assert server.fill_rate(24) / 1e9 == pytest.approx(5.93, abs=0.005)
    assert 8 * server.fill_rate(24) / 1e9 == pytest.approx(47, abs=0.5)
    assert 100 * 2**50 / server.raw_bytes == pytest.approx(183, abs=0.5)
    assert 100 * 2**50 / server.raw_bytes * server.tokens(890) == pytest.approx(1.05e14, rel=0.01)


def test_storage_servers_fill_exactly():
    server = capacity.StorageServer()
    tokens_per_second = server.fill_rate(24) / 890
    assert capacity.storage_servers(0.999 * tokens_per_second, 890, 24) == 1
    assert capacity.storage_servers(1.001 * tokens_per_second, 890, 24) == 2
    assert capacity.storage_servers(0.999 * tokens_per_second, 890, 72) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: capacity.prefill_gpus(1, 1, 1.5, 1), "share of tokens"),
        (lambda: capacity.prefill_gpus(1, 1, 0, 1, 0), "utilisation=0"),
        (lambda: capacity.decode_gpus(1, 1, -5), "tokens_per_second_per_gpu=-5"),
        (lambda: capacity.storage_servers(1, 890, 0), "retention_hours=0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
