"""The released numbers at the model: 902 tokens, window 128, rings of 134, keep 134 and 140."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax.config import CacheConfig
from tests.engine.modelled import MODEL, Scale, prompt
from tests.engine.prefix_cache_test import Service, distance

CACHE = CacheConfig(nextn=0, backtracking=6, truncation="mask", keep=140)
SCALE = Scale(dataclasses.replace(MODEL, window=128), CACHE, width=512, table=9, blocks=24)
TOKENS = prompt(902, 0)


def hit_and_cold(keep: int, reserve: int) -> tuple[int, float]:
    """(rows that a second request computed, distance of its logits from a cold prompt's)."""
    cache = dataclasses.replace(
        CACHE, keep=keep, reserve=reserve, unsafe_reserve=reserve < max(keep, 134)
    )
    service = Service(cache, poison=1e30, scale=SCALE)
    service.ask(TOKENS, outputs=2)
    found = service.ask(TOKENS, outputs=2)
    want = Service(dataclasses.replace(cache, reserve=0), source=False, scale=SCALE)
    return service.rows, distance(found, want.ask(TOKENS, outputs=2))


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "reserve", "rows"), [(134, 134, 134), (140, 140, 262)])
def test_reserve_of_at_least_keep_is_exact(keep: int, reserve: int, rows: int) -> None:
    """H = 768 with reserve 134 and 640 with reserve 140, of 902 tokens."""
    computed, gap = hit_and_cold(keep, reserve)
    assert computed == rows and gap < 1e-5


@pytest.mark.slow
def test_keep_140_with_reserve_134_reads_rows_that_nobody_restored() -> None:
    """Decoder windows begin at 762, the restart is at 768."""
    computed, gap = hit_and_cold(140, 134)
    assert computed == 134 and (gap > 1e-3 or np.isnan(gap))
