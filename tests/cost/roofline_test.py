"""Each part is the longer branch; efficiencies act where they say; formats run at their rates."""

import dataclasses

import pytest

from deepinfer_jax.cost import hardware, operations, roofline
from deepinfer_jax.cost.exchange import Bandwidth
from deepinfer_jax.cost.roofline import Efficiency
from deepinfer_jax.cost.work import StepWork, Work
from deepinfer_jax.presets import v41_flash

UNIT = hardware.Hardware("unit", 50.0, 100.0, 200.0, 10.0, 1.0, 1.0, 1.0, 1.0, 1)
WORK = StepWork(
    (
        Work("bound by arithmetic", operations.FP8, 300.0, 10.0),
        Work("bound by memory", operations.BF16, 100.0, 50.0),
    ),
    20.0,
    40.0,
)
LINKS = Bandwidth(10.0, 20.0, False)


def test_parts_take_the_longer_branch():
    step = roofline.step_time(WORK, UNIT, LINKS)
    assert [(p.compute, p.memory) for p in step.parts] == [(3.0, 1.0), (1.0, 5.0)]
    assert step.local == 8.0
    assert step.exchange == 4.0
    assert step.seconds == 12.0


@pytest.mark.parametrize(
    "changes, seconds",
    [
        ({"compute": 0.5}, 6 + 5 + 4),
        ({"memory": 0.5}, 3 + 10 + 4),
        ({"exchange": 0.5}, 3 + 5 + 8),
        ({"exposed_exchange": 0.25}, 3 + 5 + 1),
        ({"overhead": 2.5}, 3 + 5 + 4 + 2.5),
        ({"of_part": (("bound by memory", 0.1),)}, 3 + 50 + 4),
    ],
)
def test_efficiencies(changes, seconds):
    assert roofline.step_time(WORK, UNIT, LINKS, Efficiency(**changes)).seconds == pytest.approx(
        seconds
    )


def test_uniform_efficiency_scales_the_step():
    slow = roofline.step_time(WORK, UNIT, LINKS, Efficiency.uniform(0.25))
    assert slow.seconds == pytest.approx(4 * 12.0)


def test_format_rates():
    # A multiply-add is two FLOPs and costs 1, 2, 4, 8 units in FP4, FP8, BF16, FP32 (TF32).
    for hw in hardware.PRESETS.values():
        rates = {
            operations.FP4: hw.fp4_flops / 2 * 1,
            operations.FP8: hw.fp8_flops / 2 * 2,
            operations.BF16: hw.bf16_flops / 2 * 4,
            operations.FP32: hw.bf16_flops / 2 / 2 * 8,
        }
        for number_format, rate in rates.items():
            assert roofline.operation_rate(hw, number_format) == rate


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"compute": 0.0}, "efficiency compute=0.0"),
        ({"exchange": 1.5}, "efficiency exchange=1.5"),
        ({"of_part": (("head", 0.0),)}, "efficiency head=0.0"),
        ({"overhead": -1.0}, "overhead=-1.0"),
        ({"exposed_exchange": 1.1}, "exposed_exchange=1.1"),
    ],
)
def test_efficiency_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        Efficiency(**changes)


def test_unknown_part():
    with pytest.raises(ValueError, match=r"no part \['heads'\]"):
        roofline.step_time(WORK, UNIT, LINKS, Efficiency(of_part=(("heads", 0.5),)))


def test_long_prefill_is_bound_by_arithmetic():
    """At 16K tokens the linear parts run at peak, so model FLOPs over peak bound the step."""
    model = v41_flash()
    step = roofline.prefill_time(model, hardware.B200, [(8192, 0), (8192, 0)], 64)
    counted = 2 * operations.prompt_operations(model, 8192, 8192).total
    assert 1.0 <= step.local / (counted / hardware.B200.fp8_flops) < 1.2
    assert step.extrapolated


def test_decode_grows_with_requests_and_context():
    model = v41_flash()

    def seconds(requests, context):
        kv = requests * context
        return roofline.decode_time(model, hardware.GB200, requests, kv, 64, nextn=3).seconds

    assert seconds(1, 1024) < seconds(1, 131_072) < seconds(64, 131_072) < 64 * seconds(1, 131_072)
    # Eight GPUs hold 48 experts each instead of six: a lone request per rank reads more of them.
    few = roofline.decode_time(model, hardware.GB200, 64, 64 * 4096, 8)
    many = roofline.decode_time(model, hardware.GB200, 64, 64 * 4096, 64)
    read = [{p.name: p.memory for p in step.parts}["routed experts"] for step in (few, many)]
    assert read[0] > 7 * read[1]


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        roofline.PEAK.compute = 0.5
