"""The rules of a hit, one by one: what keeps them passes, what breaks one is named."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.engine.prefix import check_hit
from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.policy.prefix import Image

BLOCK = 16
REPLAY = Hit(64, 48, swa_valid_start=48, store_from=64, blocks=(1, 2, 3, 4))  # one block again
LOADED = Hit(64, 64, swa_valid_start=0, store_from=64, blocks=(1, 2, 3, 4), image="state")


def request(length: int = 100, *images: tuple[int, int]) -> Request:
    return Request(9, [5] * length, images=tuple(Image(a, b, b"x") for a, b in images))


@pytest.mark.parametrize(
    "hit",
    [
        REPLAY,
        LOADED,
        dataclasses.replace(LOADED, store_from=0),  # nothing is computed again
        dataclasses.replace(LOADED, blocks=()),  # rows are copied in
        dataclasses.replace(REPLAY, compute_hit=0, swa_valid_start=0),
        Hit(0, 0),
    ],
)
def test_hits_that_keep_every_rule(hit: Hit) -> None:
    check_hit(hit, request(65), BLOCK)
    check_hit(hit, request(100, (0, 48), (64, 80)), BLOCK)  # restarts at edges of images


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_hit": 60}, "whole blocks of 16 tokens"),
        ({"compute_hit": 65}, "compute from there or before"),
        ({"compute_hit": -16, "swa_valid_start": -16}, "compute from there or before"),
        ({"swa_valid_start": 49}, "may not exceed compute_hit 48"),
        ({"store_from": 80}, "may not exceed compute_hit 48 and block_hit 64"),
        ({"store_from": 48}, "set store_from to 64"),
        ({"blocks": (1, 2, 3)}, "names 3 blocks for 64 tokens"),
        ({"blocks": (1, 2, 3, 4, 5)}, "names 5 blocks"),
    ],
)
def test_each_broken_rule_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"request 9 .*{message}"):
        check_hit(dataclasses.replace(REPLAY, **changes), request(), BLOCK)


def test_the_last_token_is_always_computed() -> None:
    with pytest.raises(ValueError, match="covers 64 of 64 tokens; the last one must be computed"):
        check_hit(REPLAY, request(64), BLOCK)


@pytest.mark.parametrize("edges", [(47, 49), (40, 60), (47, 90)])
def test_no_restart_inside_an_image(edges: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="restarts at 48, inside an image"):
        check_hit(REPLAY, request(100, edges), BLOCK)


@settings(deadline=None)
@given(
    blocks=st.integers(0, 6),
    again=st.integers(-1, 6),
    valid=st.integers(0, 100),
    store=st.integers(0, 100),
    length=st.integers(1, 110),
    named=st.integers(0, 7),
)
def test_accepted_hits_leave_each_position_one_owner(
    blocks: int, again: int, valid: int, store: int, length: int, named: int
) -> None:
    """Walk over the positions: what a hit means is checked where it says so, and nowhere else."""
    hit = Hit(blocks * BLOCK, (blocks - again) * BLOCK, valid, store, tuple(range(1, named + 1)))
    computed = set(range(hit.compute_hit, length))
    stored = {p for p in computed if p >= hit.store_from}
    reused = set(range(hit.block_hit))
    sound = (
        0 <= hit.compute_hit <= hit.block_hit
        and length - 1 not in reused
        and valid <= hit.compute_hit  # rings are whole where computing starts
        and store <= hit.block_hit  # every row behind the blocks is stored
        and not stored & reused  # and none in them
        and named in (0, blocks)
    )
    try:
        check_hit(hit, request(length), BLOCK)
    except ValueError:
        assert not sound
    else:
        assert sound
