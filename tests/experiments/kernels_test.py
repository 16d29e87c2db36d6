"""Dumps of the TPU compiler, read: a real excerpt whose numbers were counted by eye, and made ones."""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments.kernels import dumps, estimate, programs
from pallas_kernels import aot, catalogue
from pallas_kernels.traffic import Traffic, tile_bytes, traffic
from pallas_kernels.window_attention import shapes

# A kernel of four steps, each one product [16, 128] x [128, 128], compiled for v6e by libtpu
# 0.0.42.1; lines cut at 96 characters.
DATA = pathlib.Path("tests/testdata/kernels")
PROGRAM = """
%body.1 (a: (s32[], f32[16,128])) -> (s32[], f32[16,128]) {
  %f.1 = f32[16,128]{1,0:T(8,128)} fusion(%g), kind=kLoop, backend_config={"estimated_cycles":"70"}
}
%test.1 (a: (s32[], f32[16,128])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(24)
}
ENTRY %main (x: bf16[64,130]) -> f32[16,128] {
  %x = bf16[64,130]{1,0:T(8,128)(2,1)} parameter(0)
  %c = bf16[64,130]{0,1:T(8,128)(2,1)} copy(%x), backend_config={"estimated_cycles":"100"}
  %v = f32[16,128]{1,0:T(8,128)S(1)} fusion(%c), backend_config={"estimated_cycles":"5"}
  %w = (s32[], f32[16,128]{1,0}) while(%t), condition=%test.1, body=%body.1
  ROOT %k.2 = f32[16,128]{1,0} custom-call(%v), custom_call_target="tpu_custom_call", \
backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"57344"}]}
}
"""


def test_a_real_dump_falls_into_its_runs():
    text, use = (DATA / "bundles.txt").read_text(), (DATA / "slots.txt").read_text()
    found = dumps.runs(text)
    # a label, a branch, a label, a branch, its delay slots, the end
    edges = [0, 0x6, 0x37, 0x65, 0x6D, 0x71, 0x76]
    assert [(run.begin, run.end) for run in found] == list(itertools.pairwise(edges))
    assert [run.depth for run in found] == [0, 1, 1, 1, 1, 0]
    made = dumps.schedule(text, use, tiles=2)
    assert made.bundles == 118 and made.beside == 12
    assert [tile.bundles for tile in made.tiles] == [49, 46]
    # the two matrix units are busy in 8 bundles, one of them at a time, all in the second run
    assert made.tiles[0].busy["MXU"] == 0
    assert made.tiles[1].busy["MXU"] == pytest.approx(8 / 46 / 2, abs=1e-3)


def test_dumps_of_two_kernels_are_refused():
    use = (DATA / "slots.txt").read_text()
    text = (DATA / "bundles.txt").read_text().rsplit("\n", 2)[0]
    with pytest.raises(ValueError, match="117 bundles but 118 rows"):
        dumps.schedule(text, use)


def test_a_program_costs_its_own_instructions_loops_and_padding():
    found = programs.cost(PROGRAM)
    assert found.cycles == 100 + 5 + 24 * 70
    copied = 64 * 256 * 2 + 136 * 128 * 2  # [64, 130] padded; its transpose padded the other way
    fused = 136 * 128 * 2  # v lies in VMEM
    looped = 16 * 128 * 4
    assert found.hbm_bytes == copied + fused + looped
    assert programs.kernels(PROGRAM) == ["k.2"] and programs.scoped_vmem(PROGRAM) == 57344


def test_bytes_are_those_of_whole_tiles():
    assert tile_bytes((3, 5, 130), 2) == 3 * 8 * 256 * 2
    assert tile_bytes((1000,), 4) == 1024 * 4


def test_traffic_fetches_a_block_once_while_its_index_stays():
    shape = shapes.Shape(2, 512, 128, 64, 512, False, jnp.bfloat16)
    found = traffic(shape.function("tpu"), shape.arguments())
    steps = 512 // 8
    queries = 2 * 512 * 64 * 512 * 2
    bounds = 2 * steps * 8 * 128 * 4
    sinks = 64 * 128 * 4
    window = 2 * 4 * 2 * 128 * 512 * 2  # near and far, for each 128 queries of each sequence
    sums = 2 * steps * 16 * 128 * 4
    assert found.steps == 2 * steps
    assert found.written == queries + sums
    assert found.read == queries + bounds + sinks + window


def test_clocks_follow_from_public_peaks():
    assert {g: round(estimate.clock(g) / 1e9, 2) for g in aot.TPUS} == {
        "v5e": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
        "tpu7x": 2.2,
    }


def test_a_record_is_bound_by_the_slowest_of_schedule_memory_and_arithmetic():
    shape = catalogue.named("window_attention", "v41_prefill_4096")
    schedule = dumps.Schedule(100, (dumps.Tile(1750, {"MXU": 0.5}),), 0)
    none = programs.Cost(0, 0)
    make = lambda moved: estimate.record(shape, "v6e", [schedule], moved, none, none, 0)  # noqa: E731
    fast = make(Traffic(512, 0, 0))
    assert fast["limit"] == "schedule"
    assert fast["bound_seconds"] == pytest.approx(512 * 1e-6, rel=1e-3)
    slow = make(Traffic(512, 1_640_000_000, 0))
    assert slow["limit"] == "memory" and slow["bound_seconds"] == pytest.approx(1e-3)
    # 64 heads, 128 keys and 512 channels, two products, 4096 rows at 918 TFLOP/s
    assert fast["roofline_seconds"] >= 4096 * 64 * 128 * 512 * 4 / 918e12


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match=r"no kernel shape window_attention/huge; choose one of"):
        catalogue.named("window_attention", "huge")


@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="libtpu, the TPU compiler, is not installed")
def test_the_smoke_report_runs(tmp_path):
    command = [sys.executable, "-m", "experiments.kernel_report"]
    flags = ["--config=configs/kernels.py:smoke", f"--workdir={tmp_path}"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 0 and "v6e" in done.stdout
