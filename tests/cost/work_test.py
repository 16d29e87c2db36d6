"""Bytes and operations of a step against hand counts from V4.1's published sizes."""

import numpy as np
import pytest

from deepinfer_jax.config import CacheConfig
from deepinfer_jax.cost import operations, work
from deepinfer_jax.presets import tiny, v41_flash

FLASH = v41_flash()
EXPERT = 3 * 5120 * 2304


def part(step, name):
    (found,) = [p for p in step.parts if p.name == name]
    return found


@pytest.mark.parametrize(
    "local, active, total, tokens", [(4, 2, 8, 3), (6, 3, 24, 12), (1, 1, 2, 1)]
)
def test_touched_experts_against_drawing(local, active, total, tokens):
    generator = np.random.default_rng(0)
    seen = np.zeros(4000)
    for trial in range(len(seen)):
        order = generator.random((tokens, total)).argsort(axis=1)[:, :active]
        seen[trial] = len(np.unique(order[order < local]))
    expected = work.touched_experts(local, active, total, tokens)
    assert abs(seen.mean() - expected) < 4 * seen.std() / len(seen) ** 0.5 + 1e-9


def test_operations_are_the_counted_ones():
    step = work.decode_work(FLASH, 3, 3 * 326, 5, 8)
    counted = sum(p.operations for p in step.parts if not p.name.startswith("draft"))
    assert counted == pytest.approx(3 * 227_428_859_904, rel=1e-12)
    prompt = work.prefill_work(FLASH, [(300, 0), (300, 0)], 8)
    assert sum(p.operations for p in prompt.parts) == pytest.approx(2 * 10_098_508_603_392)


def test_decode_bytes_at_the_published_point():
    step = work.decode_work(FLASH, 64, 64 * 131_072, 3, 64)
    ring, chosen = 40 * 131 * 528, 38 * 512 * 288
    assert part(step, "attention core").bytes == 64 * (ring + chosen)
    index = 3 * 65_536 + 131_072 + 4 * 16_384
    assert part(step, "index scoring").bytes == 64 * index * 68
    # 16,384 rows of the group touch all of the rank's six experts.
    assert part(step, "routed experts").bytes == pytest.approx(40 * 6 * EXPERT * 17 / 32)
    assert part(step, "shared expert").bytes == pytest.approx(40 * EXPERT * 1025 / 1024)
    assert part(step, "head").bytes == 129_280 * 5120 * 2
    rows = 64 * 4 * 40 * 6 + 64 * 3 * 3 * 3  # the draft's three stages send three copies each
    assert step.dispatch_bytes == rows * (5120 + 160)
    assert step.combine_bytes == rows * 5120 * 2


def test_short_contexts_read_only_what_exists():
    step = work.decode_work(FLASH, 1, 100, 0, 8)
    full = 40 * 100 * 528 + 18 * 50 * 288 + 20 * 100 * 288
    assert part(step, "attention core").bytes == full
    assert part(step, "index scoring").bytes == (3 * 50 + 5 * 100) * 68


def test_weights_are_read_once_and_all_of_them():
    # One token on one rank with every expert touched would read the backbone; linear parts do.
    step = work.decode_work(FLASH, 512, 512 * 4096, 0, 1)
    fp8 = (40 * 126.6e6 + 40 * EXPERT) * 1025 / 1024
    linear = part(step, "attention linear").bytes + part(step, "shared expert").bytes
    assert linear == pytest.approx(fp8, rel=0.02)  # the indexers are the rest
    assert part(step, "routed experts").bytes == pytest.approx(
        40 * 384 * EXPERT * 17 / 32, rel=0.01
    )


def test_prefill_streams_and_truncation():
    whole = work.prefill_work(FLASH, [(4096, 0)], 64)
    compact = work.prefill_work(FLASH, [(4096, 0)], 64, CacheConfig(truncation="compact", keep=140))
    moved = part(whole, "streams").bytes - part(compact, "streams").bytes
    assert moved == 20 * (4096 - 140) * 2 * 2 * 4 * 5120 * 2
    assert whole.dispatch_bytes == 4096 * 40 * 6 * 5280
    assert compact.dispatch_bytes == (4096 * 20 + 140 * 20) * 6 * 5280
    counted = operations.prompt_operations(
        FLASH, 4096, 4096, CacheConfig(truncation="compact", keep=140)
    )
    assert sum(p.operations for p in compact.parts) == pytest.approx(counted.total)


def test_draft_is_left_out_without_drafts():
    names = [p.name for p in work.decode_work(FLASH, 4, 4096, 0, 8).parts]
    assert not [name for name in names if name.startswith("draft")]
    drafting = work.decode_work(FLASH, 4, 4096, 5, 8)
    per_row = 3 * (126_615_552 + 4 * EXPERT)  # attention, three routed and one shared expert
    context = 3 * 5120 * 5120 + 3 * 5120 * 512
    expected = 2 * (4 * 5 * per_row + 4 * 6 * context)
    assert part(drafting, "draft layers").operations == pytest.approx(expected, rel=1e-3)


def test_models_without_engram_or_draft_size_work():
    assert work.decode_work(tiny(), 2, 40, 2, 2).combine_bytes > 0


@pytest.mark.parametrize("arguments", [(0, 10, 0, 8), (1, -1, 0, 8), (1, 10, -1, 8), (1, 10, 0, 0)])
def test_refusals(arguments):
    with pytest.raises(ValueError, match="a decode step has a request"):
        work.decode_work(FLASH, *arguments)
