"""Hardware presets against published rack totals and ratios; lookup and files."""

import dataclasses
import json

import pytest

from deepinfer_jax.cost import hardware


def test_presets_match_published_system_totals():
    # NVIDIA datasheets list whole systems; these totals are theirs, the per-device numbers ours.
    assert 8 * hardware.B200.hbm_bytes == pytest.approx(1440e9)
    assert 8 * hardware.B200.hbm_bytes_per_second == pytest.approx(64e12)
    assert 72 * hardware.GB200.hbm_bytes == pytest.approx(13.4e12, rel=0.001)
    assert 72 * hardware.GB200.hbm_bytes_per_second == pytest.approx(576e12)
    assert 72 * 2 * hardware.GB200.scale_up_bytes_per_second == pytest.approx(130e12, rel=0.005)
    assert 72 * 2 * hardware.GB200.fp4_flops == pytest.approx(1440e15)  # with sparsity
    assert 256 * hardware.TPU_V6E.bf16_flops == pytest.approx(234.9e15, rel=0.001)  # v6e pod
    assert 9216 * hardware.TPU_7X.fp8_flops == pytest.approx(42.5e18, rel=0.001)  # Ironwood pod


def test_mfu_peaks_of_the_released_engine():
    # Its utilisation log divides by 2 x the BF16 peak: 2250 on x86 SM100, 2500 on Arm SM100.
    assert hardware.B200.fp8_flops == 2 * 2250e12
    assert hardware.GB200.fp8_flops == 2 * 2500e12


@pytest.mark.parametrize("name", list(hardware.PRESETS))
def test_every_preset_is_ordered(name):
    h = hardware.PRESETS[name]
    assert h.bf16_flops <= h.fp8_flops <= h.fp4_flops
    assert h.storage_bytes_per_second <= h.scale_out_bytes_per_second
    assert h.scale_out_bytes_per_second < h.scale_up_bytes_per_second < h.hbm_bytes_per_second


@pytest.mark.parametrize(
    "spelling, name",
    [("h800", "H800"), ("TPU-v5p", "TPU v5p"), ("tpu_v6e", "TPU v6e"), ("TPU7x", "tpu7x")],
)
def test_lookup_ignores_case_and_punctuation(spelling, name):
    assert hardware.lookup(spelling).name == name


@pytest.mark.parametrize(
    "typo, nearest", [("H80O", "H800"), ("GB20", "GB200"), ("tpuv5", "TPU v5")]
)
def test_lookup_suggests_the_nearest(typo, nearest):
    with pytest.raises(ValueError, match=f"did you mean '{nearest}"):
        hardware.lookup(typo)


def write(tmp_path, **changes):
    values = dataclasses.asdict(hardware.H200) | {"name": "mine"} | changes
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return str(path)


def test_load_reads_every_field(tmp_path):
    loaded = hardware.resolve(write(tmp_path))
    assert loaded == dataclasses.replace(hardware.H200, name="mine")
    assert hardware.resolve("H200") == hardware.H200


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hbm_byte": 3.0}, "unknown key 'hbm_byte'; did you mean 'hbm_bytes'"),
        ({"fp8_flops": None}, "missing keys .'fp8_flops'"),
        ({"fp8_flops": -1.0}, "fp8_flops=-1.0 is not a positive number"),
        ({"fp8_flops": "2e15"}, "fp8_flops='2e15' is not a positive number"),
    ],
)
def test_load_is_strict(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        hardware.load(write(tmp_path, **changes))


def test_load_refuses_a_list(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="found list"):
        hardware.load(tmp_path / "list.json")


def test_this_machine_is_measured_not_invented(monkeypatch):
    # A clock that ticks once per reading makes the rates a known function of the sizes.
    ticks = iter(range(100))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: float(next(ticks)))
    measured = hardware.measure_this_machine(matmul_size=64, copy_bytes=4096, repeats=2)
    assert measured.bf16_flops == 2 * 64**3
    assert measured.hbm_bytes_per_second == 2 * 4096
    assert measured.name.startswith("this machine")
