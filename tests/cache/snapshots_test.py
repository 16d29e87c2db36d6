"""Snapshots: released sizes, worked ring examples, round trips, guards, timing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import layout
from deepinfer_jax.cache.paged import PagedMemory, bind, create_paged
from deepinfer_jax.cache.snapshots import (
    check_load,
    check_select,
    from_bytes,
    load,
    select,
    to_bytes,
)
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.presets import tiny, v41_flash
from pallas_kernels import formats

V41 = v41_flash()
TINY = tiny()
ONE = dataclasses.replace(TINY, window=128)  # the released window, narrow rows
PLAIN = CacheConfig(truncation="compact", keep=140)
WIDE = dataclasses.replace(PLAIN, extra_state=True)
SMALL = CacheConfig(block_tokens=8, truncation="mask", keep=14)
SMALL_WIDE = dataclasses.replace(SMALL, extra_state=True, extra_size=8)
SELECT = jax.jit(select, static_argnums=3)
LOAD = jax.jit(load, donate_argnums=0)
READ = jax.jit(PagedMemory.read_window, static_argnums=1)
PACK = jax.jit(formats.pack_row_e4m3)
TO = jax.jit(to_bytes, static_argnums=(0, 1))
FROM = jax.jit(from_bytes, static_argnums=(0, 1, 2, 5, 6))


@pytest.mark.parametrize(
    ("cache", "stored", "live"),
    [
        (CacheConfig(), 1_415_040, 3_128_928),
        (WIDE, 1_415_040, 3_128_928),
        (CacheConfig(extra_state=True), 1_415_040, 3_128_928),
        (CacheConfig(backtracking=12), 1_478_400, 3_339_072),
        (CacheConfig(nextn=3), 1_393_920, 3_059_232),
        (CacheConfig(nextn=0), 1_362_560, 2_954_688),
    ],
)
def test_images_have_the_released_sizes(cache: CacheConfig, stored: int, live: int) -> None:
    def size(extent: str, form: str) -> int:
        def make() -> jax.Array:
            memory = create_paged(V41, cache, blocks=2, slots=3, format=form)
            return to_bytes(V41, cache, select(memory, 1, 256, extent))

        return jax.eval_shape(make).size

    for form in ("values", "bytes"):
        assert (size("stored", form), size("live", form)) == (stored, live)


def numbered(cache: CacheConfig, end: int, slot: int = 1) -> PagedMemory:
    """Rings whose rows hold their position, written up to `end`, other slots NaN; 128 wide."""
    memory = create_paged(ONE, cache, blocks=2, slots=3, dtype=jnp.float32)
    rows = layout.ring_rows(ONE, cache)[1]
    ring = np.full((3, rows, ONE.head_dim), np.nan, np.float32)
    for p in range(max(0, end - rows), end):
        ring[slot, p % rows] = p
    return dataclasses.replace(memory, windows=(jnp.asarray(ring),) * ONE.num_rings)


def held(image, ring: int = 0) -> list[int]:
    return np.asarray(image.windows[ring])[:, 0].astype(int).tolist()


def test_the_worked_ring_of_902_tokens() -> None:
    """R' = 262 has lost 634 .. 639 of the image as of 768; keep 140 makes R' = 402, which has them."""
    narrow = CacheConfig(extra_state=True)
    assert layout.ring_rows(ONE, narrow) == (134, 262) and layout.ring_rows(ONE, WIDE) == (134, 402)
    short = held(SELECT(numbered(narrow, 902), 1, 768, "stored"))
    assert [short[p % 134] for p in range(634, 640)] == [*range(896, 902)]
    assert [short[p % 134] for p in range(640, 768)] == [*range(640, 768)]
    for position in (768, 640):
        whole = held(SELECT(numbered(WIDE, 902), 1, position, "stored"))
        assert [whole[p % 134] for p in range(position - 134, position)] == [
            *range(position - 134, position)
        ]
    assert whole[104] == 506 and held(SELECT(numbered(PLAIN, 768), 1, 768, "stored"))[98] == 634


def test_an_image_as_of_256_holds_122_to_255() -> None:
    for cache, end in ((PLAIN, 256), (WIDE, 256), (WIDE, 300)):
        assert sorted(held(SELECT(numbered(cache, end), 1, 256, "stored"))) == [*range(122, 256)]


def test_a_stored_image_is_the_beginning_of_a_live_one() -> None:
    memory, _ = filled(SMALL, "values")
    stored, live = (
        np.asarray(TO(TINY, SMALL, SELECT(memory, 2, 32, extent))) for extent in ("stored", "live")
    )
    np.testing.assert_array_equal(stored, live[: stored.size])
    image = layout.state_layout(TINY, SMALL).image
    ring = image.ring(9)  # of the last draft stage, at its offset
    size = ring.rows * ring.row_bytes
    packed = np.asarray(PACK(memory.windows[9])[2]).reshape(-1)
    np.testing.assert_array_equal(live[ring.start : ring.start + size], packed[:size])
    raw = image.compression_ring(2)
    np.testing.assert_array_equal(
        live[raw.start : raw.stop].view(np.float32), np.asarray(memory.raw[2][2]).reshape(-1)
    )


def filled(cache: CacheConfig, form: str, end: int = 40) -> tuple[PagedMemory, np.ndarray]:
    """(memory with slot 2 written up to `end`, the rows of ring 0 by position; ring i adds i)."""
    memory = create_paged(TINY, cache, blocks=2, slots=4, format=form, dtype=jnp.float32)
    rng = np.random.default_rng(end)
    rows = rng.integers(-6, 7, (end, 32)).astype(np.float32)  # with i exact in E4M3
    ring, width = [], layout.ring_rows(TINY, cache)[1]
    for i in range(TINY.num_rings):
        pool = np.zeros((4, width, 32), np.float32)
        for p in range(max(0, end - width), end):
            pool[2, p % width] = rows[p] + i
        ring.append(pool)
    packed = jnp.asarray(np.stack(ring))
    if form == "bytes":
        packed = np.asarray(PACK(packed)).reshape(TINY.num_rings, 4, -1)
        packed = np.pad(packed, [(0, 0), (0, 0), (0, memory.windows[0].shape[1] - packed.shape[2])])
    raw = {2: jnp.asarray(rng.normal(size=memory.raw[2].shape), jnp.float32)}
    return dataclasses.replace(memory, windows=tuple(map(jnp.asarray, packed)), raw=raw), rows


@pytest.mark.parametrize("form", ["values", "bytes"])
@pytest.mark.parametrize("cache", [SMALL, SMALL_WIDE])
def test_select_change_load_select(cache: CacheConfig, form: str) -> None:
    """The chapter's listing 11.8: what was changed in the image is what a second select gives."""
    memory, _ = filled(cache, form)
    image = FROM(
        TINY,
        cache,
        "stored",
        TO(TINY, cache, SELECT(memory, 2, 40, "stored")) ^ 1,
        40,
        form,
        jnp.float32,
    )
    others = [np.asarray(w)[[0, 1, 2]] for w in memory.windows]
    dropped = [np.asarray(w) for w in memory.windows[TINY.boundary_layer :]]
    after = LOAD(memory, 3, image)
    again = SELECT(after, 3, 40, "stored")
    np.testing.assert_array_equal(image.windows, again.windows)
    for before, pool in zip(others, after.windows, strict=True):
        np.testing.assert_array_equal(before, np.asarray(pool)[[0, 1, 2]])
    for before, pool in zip(dropped, after.windows[TINY.boundary_layer :], strict=True):
        np.testing.assert_array_equal(before, pool)
    packed = TO(TINY, cache, again)
    np.testing.assert_array_equal(packed, TO(TINY, cache, image))


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [(SMALL, SMALL_WIDE, "values"), (SMALL_WIDE, SMALL, "bytes"), (SMALL, SMALL, "bytes")],
)
def test_a_live_image_moves_between_rings_of_other_widths(
    first: CacheConfig, second: CacheConfig, form: str
) -> None:
    """Through bytes, at any length; the receiver may step back by ring_slack rows."""
    for end in (14, 15, 23, 41):
        memory, rows = filled(first, form, end)
        check_select(TINY, first, "live", end, end)
        data = TO(TINY, first, SELECT(memory, 2, end, "live"))
        image = FROM(TINY, second, "live", data, end, form, jnp.float32)
        target = create_paged(TINY, second, blocks=2, slots=4, format=form, dtype=jnp.float32)
        target = bind(LOAD(target, 1, image), jnp.array([1]), jnp.array([[1]]))
        for back in (0, 6):
            start = end - back
            found = READ(target, 3, jnp.array([start]))[0]
            np.testing.assert_array_equal(found, rows[start - 8 : start] + 3)
        np.testing.assert_array_equal(target.raw[2][1], memory.raw[2][2])


@pytest.mark.parametrize(("cache", "most"), [(PLAIN, 6), (CacheConfig(backtracking=12), 12)])
def test_snapshot_timing(cache: CacheConfig, most: int) -> None:
    """Rows written past P may be 6 with R = 134; a step in flight makes it 11, which R = 140 holds."""
    for past in (0, 5, 6, 7, 11, 12, 13):
        image = held(SELECT(numbered(cache, 768 + past), 1, 768, "stored"))
        rows = layout.ring_rows(ONE, cache)[0]
        whole = [image[p % rows] for p in range(640, 768)] == [*range(640, 768)]
        assert whole == (past <= most)
        if whole:
            check_select(ONE, cache, "stored", 768, 768 + past)
        else:
            with pytest.raises(ValueError, match=f"gone more than {most} rows later"):
                check_select(ONE, cache, "stored", 768, 768 + past)


@pytest.mark.parametrize("cache", [PLAIN, CacheConfig(extra_state=True), WIDE])
def test_any_position_a_wide_ring_still_holds(cache: CacheConfig) -> None:
    """Whole windows at most R' - 128 rows later, whole images at most R' - 134 rows later."""
    narrow, wide = layout.ring_rows(ONE, cache)
    rng, kinds = np.random.default_rng(wide), set()
    for _ in range(40):
        position = 128 * int(rng.integers(2, 9))
        past = int(rng.choice([0, wide - narrow, wide - 128, rng.integers(0, wide)]))
        past = max(0, past + int(rng.integers(-1, 2)))
        image = held(SELECT(numbered(cache, position + past), 1, position, "stored"))
        first = [image[p % narrow] == p for p in range(position - narrow, position)]
        assert all(first[-128:]) == (past <= wide - 128)
        assert all(first) == (past <= wide - narrow)
        try:
            check_select(ONE, cache, "stored", position, position + past)
            kinds.add(True)
        except ValueError:
            assert not all(first[-128:])
            kinds.add(False)
    assert kinds == {True, False}


def test_positions_and_slots_compile_once() -> None:
    memory, _ = filled(SMALL, "values")
    image = SELECT(memory, 2, 40, "stored")
    memory = LOAD(memory, 1, image)
    counts = SELECT._cache_size(), LOAD._cache_size()
    for slot, position in ((1, 32), (3, 24)):
        memory = LOAD(memory, slot, SELECT(memory, 2, position, "stored"))
    assert counts == (SELECT._cache_size(), LOAD._cache_size())


def test_guards_say_what_they_guard() -> None:
    with pytest.raises(ValueError, match=r"a stored image as of 300; .* block_tokens 128"):
        check_select(V41, PLAIN, "stored", 300, 300)
    check_select(V41, PLAIN, "live", 300, 300)
    with pytest.raises(ValueError, match="rings written up to 127"):
        check_select(V41, PLAIN, "stored", 128, 127)
    with pytest.raises(ValueError, match="a stored image lacks 23 rings"):
        check_load(V41, CacheConfig(), "stored")
    check_load(V41, CacheConfig(), "live")
    check_load(V41, PLAIN, "stored")
    memory, _ = filled(SMALL, "values")
    image = select(memory, 2, 40, "stored")
    with pytest.raises(ValueError, match="truncation is 'off'"):
        load(dataclasses.replace(memory, cache=CacheConfig(block_tokens=8)), 1, image)
    with pytest.raises(ValueError, match="extent is 'all'; choose one of live, stored"):
        select(memory, 2, 40, "all")
    with pytest.raises(ValueError, match="sender and receiver differ"):
        from_bytes(V41, PLAIN, "live", jnp.zeros(1_415_040, jnp.uint8), 128)
