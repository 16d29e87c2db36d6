"""Public wide-EP rows: the bound holds everywhere, and the errors are the ones we state."""

import itertools

import pytest

from deepinfer_jax.cost import wide_ep
from deepinfer_jax.cost.roofline import Efficiency


def test_parameter_counts_of_v3():
    model = wide_ep.DEEPSEEK_V3
    q = 7168 * 1536 + 1536 * 128 * 192
    kv = 7168 * 576 + 512 * 128 * 256
    assert model.attention == q + kv + 128 * 128 * 7168
    assert model.active_parameters / 1e9 == pytest.approx(36.5, abs=0.1)
    embedding = model.head
    routed = model.moe_layers * model.experts * model.expert
    idle = model.moe_layers * model.active * model.expert
    assert (model.active_parameters + embedding + routed - idle) / 1e9 == pytest.approx(
        671, rel=0.002
    )


def test_every_row_lies_below_its_bound():
    rows = wide_ep.wide_ep_rows()
    assert len(rows) == 12
    for row in rows:
        assert row.bound >= row.hidden > row.serial
        assert row.bound > row.published


def test_stated_errors():
    """Nothing is tuned, so these are findings; they change only when the model changes."""
    errors = {row.name: row.errors[2] for row in wide_ep.wide_ep_rows()}
    sglang = [error for name, error in errors.items() if name.startswith("SGLang")]
    vllm = [error for name, error in errors.items() if name.startswith("vLLM")]
    assert len(sglang) == len(vllm) == 6
    assert min(sglang) > -0.10 and max(sglang) < 0.10
    assert min(vllm) > 0.15 and max(vllm) < 0.50


def test_published_orders_are_reproduced():
    rows = {row.name: row for row in wide_ep.wide_ep_rows()}
    prompts = [rows[f"SGLang 96xH100 prefill EP32, {n} in"] for n in (1024, 2048, 4096)]
    groups = [rows[f"vLLM H200 decode EP{n}, 256 per rank"] for n in (32, 72, 96)]
    for ordered in (prompts, groups):
        for earlier, later in itertools.pairwise(ordered):
            assert earlier.published > later.published
            assert earlier.serial > later.serial


def test_decode_step_by_hand():
    """SGLang decode, serial, at peaks: exchange 58 layers of DeepEP at EP 72 plus the parts."""
    row = wide_ep.PUBLIC_ROWS[4]
    seconds = row.requests / wide_ep.predict(row, hidden_exchange=False)
    core = 256 * 2048 * 128 * 1088 * 2 * 61 / 989.4e12
    memory = 256 * 2048 * 1152 * 61 / 3.35e12
    exchange = 2 * 58 * 487e-6  # 173 + 314 us for 128 rows at EP 64; a little more at EP 72
    assert max(core, memory) + exchange < seconds < max(core, memory) + 1.03 * exchange + 0.012


def test_efficiency_can_only_slow():
    for row in wide_ep.PUBLIC_ROWS:
        assert wide_ep.predict(row, Efficiency(compute=0.5)) <= wide_ep.predict(row)


def test_table_names_every_row():
    text = wide_ep.format_rows(wide_ep.wide_ep_rows())
    assert all(row.name in text for row in wide_ep.PUBLIC_ROWS)
    assert len(text.splitlines()) == 13
