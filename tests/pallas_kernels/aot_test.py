"""Every named shape of every kernel lowers for TPUs, and compiles for each generation (no TPU)."""

from __future__ import annotations

import pytest

from pallas_kernels import aot
from pallas_kernels.catalogue import SHAPES

NAMED = {f"{op}-{name}": shape for op, shapes in SHAPES.items() for name, shape in shapes.items()}
LIBTPU = pytest.mark.skipif(
    not aot.available(), reason="libtpu, the TPU compiler, is not installed"
)


@pytest.mark.parametrize("name", NAMED)
def test_lowers(name):
    shape = NAMED[name]
    assert (
        "tpu_custom_call" in aot.export_tpu(shape.function("tpu"), *shape.arguments()).mlir_module()
    )


@LIBTPU
@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.TPUS)
@pytest.mark.parametrize("name", NAMED)
def test_compiles(name, generation):
    shape = NAMED[name]
    made = aot.compile_tpu(shape.function("tpu"), generation, *shape.arguments())
    assert "tpu_custom_call" in made.as_text()


def test_an_unknown_generation_is_refused():
    with pytest.raises(ValueError, match="generation is 'v9'"):
        aot.compile_tpu(abs, "v9")
