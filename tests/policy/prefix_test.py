"""Hash chains, collision-safe matching, and the chapter's lab 24 in full."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import prefix
from deepinfer_jax.policy.prefix import BlockIndex, Image, chain, hit_lengths, outside_image

IDS = st.lists(st.integers(0, 2), max_size=14)


def test_only_full_blocks_have_keys():
    assert [len(chain(range(n))) for n in (0, 127, 128, 255, 256)] == [0, 0, 1, 1, 2]


@settings(max_examples=300, deadline=None)
@given(a=IDS, b=IDS, block=st.integers(1, 4))
def test_equal_keys_mean_equal_prefixes(a, b, block):
    keys_a, keys_b = chain(a, block_tokens=block), chain(b, block_tokens=block)
    for i in range(min(len(keys_a), len(keys_b))):
        end = (i + 1) * block
        assert (keys_a[i] == keys_b[i]) == (a[:end] == b[:end])


@settings(max_examples=100, deadline=None)
@given(ids=IDS, cut=st.integers(0, 4))
def test_chain_continues_from_a_parent(ids, cut):
    keys = chain(ids, block_tokens=3)
    cut = min(cut, len(keys))
    parent = keys[cut - 1] if cut else b""
    assert keys[cut:] == chain(ids[3 * cut :], block_tokens=3, parent=parent)


def test_extra_keys_separate_and_do_not_run_together():
    ids = range(128)
    variants = [(), (b"",), (b"adapter",), (b"tenant",), (b"ab", b"c"), (b"a", b"bc"), (b"abc",)]
    assert len({chain(ids, extra) for extra in variants}) == len(variants)


def test_image_digest_enters_every_block_from_its_first_on():
    ids = [7] * 512
    plain = chain(ids)
    cat = chain(ids, images=[Image(130, 300, b"cat")])
    dog = chain(ids, images=[Image(130, 300, b"dog")])
    moved = chain(ids, images=[Image(131, 301, b"cat")])
    assert plain[0] == cat[0] == dog[0] == moved[0]
    for i in (1, 2, 3):
        assert len({plain[i], cat[i], dog[i], moved[i]}) == 4


def test_default_key_is_framed_blake2b():
    """Written out by hand once, so that keys stay the same between versions."""

    def framed(data):
        return len(data).to_bytes(4, "little") + data

    ids = np.arange(128, dtype="<u4").tobytes()
    data = framed(b"") + framed(ids) + (1).to_bytes(4, "little") + framed(b"salt")
    assert chain(range(128), [b"salt"]) == (hashlib.blake2b(data, digest_size=16).digest(),)


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_bad_ids_are_named(ids):
    with pytest.raises(ValueError, match=str(ids[0])):
        chain(ids)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        chain([1], block_tokens=0)


def common_prefix(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@settings(max_examples=300, deadline=None)
@given(stored=st.lists(IDS, max_size=5), asked=IDS)
def test_match_is_the_longest_stored_prefix(stored, asked):
    index = BlockIndex(block_tokens=3)
    for ids in stored:
        index.insert(ids)
    best = max((common_prefix(ids[: len(ids) // 3 * 3], asked) // 3 for ids in stored), default=0)
    assert index.match(asked) == chain(asked, block_tokens=3)[:best]
    assert len(index) == len({k for ids in stored for k in chain(ids, block_tokens=3)})


def test_documentation_walk_through():
    """vLLM's design page: blocks of 4, a request sharing 10 tokens hits 2 blocks."""
    index = BlockIndex(block_tokens=4)
    index.insert(range(15))
    assert len(index.match([*range(10), 99, 98, 97, 96])) == 2


@settings(max_examples=500, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "remove", "match"]), IDS, st.integers(0, 3)),
        max_size=20,
    ),
    values=st.integers(1, 5),
)
def test_collisions_cost_hits_never_content(steps, values):
    """With a hash of 1 to 5 values, every match still is content that was really inserted there."""
    index = BlockIndex(block_tokens=2, digest=lambda data: bytes([1 + sum(data) % values]))
    content = {}  # key -> the whole prefix of the block now stored under it
    for action, ids, number in steps:
        if action == "insert":
            for depth, key in enumerate(chain(ids, block_tokens=2, digest=index._digest)):
                if key not in content:
                    content[key] = tuple(ids[: 2 * depth + 2])
                elif content[key] != tuple(ids[: 2 * depth + 2]):
                    break
            index.insert(ids)
        elif action == "remove" and content:
            key = sorted(content)[number % len(content)]
            gone = index.remove(key)
            prefix_gone = content[key]
            followers = {k for k, c in content.items() if c[: len(prefix_gone)] == prefix_gone}
            assert set(gone) == followers
            for k in gone:
                del content[k]
        for depth, key in enumerate(index.match(ids)):
            assert content[key] == tuple(ids[: 2 * depth + 2])
        assert len(index) == len(content)


def test_a_full_collision_is_refused():
    """Every block hashes to one key: the first stays, all else misses."""
    index = BlockIndex(block_tokens=2, digest=lambda data: b"same")
    assert index.insert([1, 2, 3, 4]) == (b"same",)
    assert index.match([1, 2, 3, 4]) == (b"same",)
    assert index.match([1, 3]) == () and index.insert([1, 3]) == ()
    assert index.remove(b"same") == (b"same",) and len(index) == 0
    assert index.remove(b"same") == ()


# Lab 24


def test_lab_24_printed_rows():
    rows = {128: (0, 0, 0), 261: (0, 0, 0), 262: (128, 128, 0)}
    rows |= {390: (256, 256, 128), 902: (768, 768, 640), 1024: (768, 768, 640)}
    for length, (l1, present, missing) in rows.items():
        full = length // 128 * 128
        assert hit_lengths(length, full, True) == (l1, present)
        assert hit_lengths(length, full, False) == (l1, missing)


def test_lab_24_all_69666_cases():
    """Bounds, alignment, backoff, monotonicity, and the largest aligned candidate by search."""
    length, cached, swa = np.meshgrid(
        np.arange(2049), np.arange(0, 2049, 128), np.array([False, True]), indexing="ij"
    )
    assert length.size == 69_666
    l1, h = hit_lengths(length, cached, swa)
    candidates = np.arange(0, 2049, 128)
    allowed = (candidates <= np.maximum(length - 134, 0)[..., None]) & (
        candidates <= cached[..., None]
    )
    assert (l1 == np.where(allowed, candidates, 0).max(-1)).all()
    assert ((h >= 0) & (h <= l1) & (l1 <= cached) & (l1 <= np.maximum(length - 134, 0))).all()
    assert (l1 % 128 == 0).all() and (h % 128 == 0).all()
    assert (l1 - h == np.where((l1 > 0) & ~swa, 128, 0)).all()
    for axis in range(3):
        assert (np.diff(l1, axis=axis) >= 0).all() and (np.diff(h, axis=axis) >= 0).all()
    jitted = jax.jit(hit_lengths)(jnp.asarray(length), jnp.asarray(cached), jnp.asarray(swa))
    assert (np.asarray(jitted[0]) == l1).all() and (np.asarray(jitted[1]) == h).all()


def test_reserve_is_window_plus_backtracking():
    assert prefix.RESERVE == 134
    assert hit_lengths(268, 256, True, reserve=140) == (128, 128)
    assert hit_lengths(267, 256, True, reserve=140) == (0, 0)


# Images


def plain_outside(restart, images, block):
    while any(s < restart < e for s, e in images):
        restart -= block
    return restart


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 100), min_size=6, max_size=6, unique=True),
    order=st.permutations([0, 1, 2]),
)
def test_restart_leaves_every_image(blocks, cuts, order):
    cuts = sorted(cuts)
    images = [(cuts[2 * i], cuts[2 * i + 1]) for i in order]
    starts, ends = np.array(images).T
    expected = plain_outside(8 * blocks, images, 8)
    assert outside_image(np.array(8 * blocks), starts, ends, 8) == expected
    batch = np.array([8 * blocks, 0, 96])
    got = OUTSIDE(jnp.asarray(batch), jnp.asarray(starts), jnp.asarray(ends))
    assert got.tolist() == [plain_outside(b, images, 8) for b in batch]


OUTSIDE = jax.jit(lambda restart, starts, ends: outside_image(restart, starts, ends, 8))


def test_restart_by_hand():
    """Restart 768 inside [700, 900): 640 is outside; inside [600, 700) too, so 512."""
    assert outside_image(np.array(768), np.array([700, 0]), np.array([900, 0])) == 640
    assert outside_image(np.array(768), np.array([600, 700]), np.array([700, 900])) == 512
    assert outside_image(np.array(768), np.array([768]), np.array([900])) == 768
    assert outside_image(np.array(768), np.array([700]), np.array([768])) == 768
