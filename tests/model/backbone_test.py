"""The backbone by its invariants: chunks, steps, rollback, truncation, padding, neighbours, memories.

Rows are not rounded to the cache's formats here: rounding makes a step of 1e-3 out of a last bit
that XLA's CPU matmul sums in another order for another number of rows. With rounding, equality is
asked bitwise, of equal executables (packed bytes against values) or where sums keep their order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.cache.paged import bind, create_paged
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.model import backbone, draft
from deepinfer_jax.model.numerics import EXACT, RELEASED
from deepinfer_jax.model.rows import text_rows
from tests.model.five_layers import five_layers
from tests.oracle.random_weights import random_parameters

CONFIG = five_layers()
TOKENS = 96
EXACT_KEEP = (CONFIG.num_layers - CONFIG.boundary_layer) * (CONFIG.window - 1) + 1  # 22


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(CONFIG, 0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(2), (1, TOKENS), 0, CONFIG.vocab_size)


@functools.partial(
    jax.jit,
    static_argnames=("truncation", "keep", "numerics"),
    compiler_options={"xla_backend_optimization_level": 1},
)
def run(
    params, tokens, start, count, lookback, kept, memory, truncation="off", keep=0, numerics=EXACT
):
    rows = text_rows(CONFIG, tokens, start, count, lookback=lookback, kept_start=kept)
    out, memory = backbone.forward(
        params, CONFIG, rows, memory, truncation=truncation, keep=keep, numerics=numerics
    )
    return backbone.logits(params, CONFIG, out.hidden), memory, out.visits


def step(params, tokens, memory, start, stop, width=None, kept=None, **options):
    """Logits of positions start .. stop - 1, run as `width` rows; and the memory after them."""
    width = width or stop - start
    batch = tokens.shape[0]
    before = jnp.pad(tokens, ((0, 0), (3, 0)), constant_values=-1)[:, start : start + 3]
    rows = jnp.pad(tokens[:, start:stop], ((0, 0), (0, width - (stop - start))), constant_values=5)
    at = jnp.full(batch, start, jnp.int32)
    kept = jnp.zeros_like(at) if kept is None else jnp.full_like(at, kept)
    out, memory, visits = run(
        params, rows, at, jnp.full_like(at, stop - start), before, kept, memory, **options
    )
    return out[:, : stop - start] if not options else out, memory, visits


def fresh():
    return create_dense(CONFIG, 1, TOKENS)


@pytest.fixture(scope="module")
def whole(params, tokens):
    return step(params, tokens, fresh(), 0, TOKENS)


@pytest.mark.parametrize(
    "cuts",
    [
        (1, 2, 50, 51, 96),
        *(pytest.param(c, marks=pytest.mark.slow) for c in [(48, 96), (31, 62, 93, 96)]),
    ],
)
def test_chunks_equal_one_shot(params, tokens, whole, cuts):
    """All chunks run as 48 rows: padding rows change nothing."""
    memory, found, start = fresh(), [], 0
    for stop in cuts:
        for begin in range(start, stop, 48):
            end = min(begin + 48, stop)
            out, memory, _ = step(params, tokens, memory, begin, end, 48)
            found.append(out)
        start = stop
    np.testing.assert_allclose(np.concatenate(found, 1), whole[0], atol=1e-4)


def test_steps_with_rollback_equal_one_shot(params, tokens, whole):
    """Verify steps of six rows, of which the first 1 + a are right and the rest are junk."""
    _, memory, _ = step(params, tokens, fresh(), 0, 48)
    at, accepted = 48, [0, 5, 2, 1, 4, 0, 3, 5, 0, 2]
    for a in accepted:
        junk = tokens.at[:, at + 1 + a : at + 6].set(7)
        out, memory, _ = step(params, junk, memory, at, at + 6)
        np.testing.assert_allclose(out[:, : 1 + a], whole[0][:, at : at + 1 + a], atol=1e-4)
        at += 1 + a


def test_pages_and_rings_equal_dense(params, tokens, whole):
    found = in_pages(params, tokens, "values", EXACT)
    np.testing.assert_allclose(found, whole[0], atol=1e-4)


@pytest.mark.slow  # test_pages_and_rings_equal_dense is its quick part
def test_packed_bytes_equal_values_bitwise(params, tokens):
    """The released rounding; the same step over another kind of pool."""
    values, packed = (in_pages(params, tokens, kind, RELEASED) for kind in ("values", "bytes"))
    np.testing.assert_array_equal(values, packed)


def in_pages(params, tokens, kind, numerics):
    """Logits of two chunks over rings and pages."""
    cache = CacheConfig(block_tokens=16)
    memory = create_paged(CONFIG, cache, blocks=8, slots=3, format=kind, dtype=jnp.float32)
    memory = bind(memory, jnp.array([2]), jnp.array([[3, 1, 7, 2, 6, 5]]))
    found = []
    for start in (0, 48):
        out, memory, _ = step(
            params, tokens, memory, start, start + 48, truncation="off", numerics=numerics
        )
        found.append(out)
    return np.concatenate(found, 1)


def test_compact_equals_mask_bitwise(params, tokens):
    """Released rounding, two sequences of different lengths, kept rows across blocks and groups.

    XLA's CPU backend gives a sum over rows x width numbers to another kernel, of another order,
    from 4096 on, and a sequence's rows behind its last eighth to yet another. Here all rows (2 x 96)
    and kept rows (2 x 72) are beyond the one for every width (32 up) and clear of the other;
    `test_truncation_over_chunks` has it otherwise, within 1e-5.
    """
    pair = jnp.concatenate([tokens, (tokens + 9) % CONFIG.vocab_size])
    lengths, keep = np.array([TOKENS, TOKENS - 6]), 72
    nothing, start = jnp.full((2, 3), -1), jnp.zeros(2, jnp.int32)

    def go(truncation, kept):
        memory = create_dense(CONFIG, 2, TOKENS)
        begin = jnp.asarray(lengths - keep)
        return run(
            params, pair, start, jnp.asarray(lengths), nothing, begin, memory, truncation, kept,
            RELEASED,
        )  # fmt: skip

    mask, masked, _ = go("mask", 0)
    compact, compacted, visits = go("compact", keep)
    for made, every, length in zip(compact, mask, lengths, strict=True):
        np.testing.assert_array_equal(made, every[length - keep : length])
    jax.tree.map(np.testing.assert_array_equal, compacted, masked)
    rows = np.asarray(visits.sum(-1)) // CONFIG.num_active_experts
    assert rows.tolist() == [lengths.sum()] * 2 + [2 * keep] * 3  # the decoder: kept rows only


@pytest.mark.parametrize("keep", [15, EXACT_KEEP, pytest.param(40, marks=pytest.mark.slow)])
def test_the_last_row_is_exact_from_the_bound_on(params, tokens, whole, keep):
    kept = TOKENS - keep
    found, _, _ = step(
        params, tokens, fresh(), 0, TOKENS, kept=kept, truncation="compact", keep=keep
    )
    gap = np.abs(found[:, -1] - whole[0][:, -1]).max()
    assert gap < 1e-5 if keep >= EXACT_KEEP else gap > 1e-4


@pytest.mark.slow
def test_truncation_over_chunks(params, tokens):
    """A chunk before the rectangle leaves nothing in the decoder's rings; one inside it does."""
    kept, found, memory = 60, [], fresh()
    mask, _, _ = step(params, tokens, fresh(), 0, TOKENS, kept=kept, truncation="mask")
    options = {"kept": kept, "truncation": "compact", "keep": 36}
    for start, stop in ((0, 48), (48, TOKENS)):
        out, memory, _ = step(params, tokens, memory, start, stop, **options)
        found.append(out)
        if stop == 48:
            assert not memory.windows[CONFIG.boundary_layer].any() and memory.rows[2].any()
    np.testing.assert_allclose(found[1], mask[:, kept:], atol=1e-5)


def test_idle_sequences_and_neighbours(params, tokens):
    """Bitwise: what stands in another sequence, or in an idle one, is nobody else's business."""
    pair = jnp.concatenate([tokens, (tokens + 9) % CONFIG.vocab_size])[:, :48]
    at, none = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    back = jnp.full((2, 3), -1)

    def go(rows, count):
        memory = create_dense(CONFIG, 2, 48)
        return run(params, rows, at, jnp.array(count), back, none, memory)

    both, _, _ = go(pair, [48, 48])
    other, _, _ = go(pair.at[1].set(3), [48, 48])
    idle, memory, visits = go(pair, [48, 0])
    np.testing.assert_array_equal(both[0], other[0])
    np.testing.assert_array_equal(both[0], idle[0])
    assert not memory.windows[0][1].any() and not memory.rows[1][1].any()
    assert (visits.sum(-1) == 48 * CONFIG.num_active_experts).all()


def test_only_lengths_change_no_compilation(params, tokens):
    memory = fresh()
    step(params, tokens, memory, 0, 5, 48)
    before = run._cache_size()
    step(params, tokens, memory, 5, 40, 48)
    assert run._cache_size() == before


def test_drafting_reads_what_verified_tokens_left(params, tokens, whole):
    """Rejected rows in the rings behind the position change nothing."""
    propose = jax.jit(functools.partial(draft.propose, count=5), static_argnums=1)
    at = jnp.array([60])
    first = propose(params, CONFIG, tokens[:, 60], at, whole[1])
    _, memory, _ = step(params, tokens, fresh(), 0, 60)
    junk = tokens.at[:, 60:].set(7)
    _, memory, _ = step(params, junk, memory, 60, 66)
    second = propose(params, CONFIG, tokens[:, 60], at, memory)
    np.testing.assert_allclose(first.logits, second.logits, atol=1e-4)
    assert first.tokens.shape == (1, 5) and ((first.confidence > 0) & (first.confidence < 1)).all()


@pytest.mark.parametrize("options", [{"truncation": "half"}, {"truncation": "compact"}])
def test_bad_truncation(params, tokens, options):
    with pytest.raises(ValueError, match="truncation"):
        step(params, tokens, fresh(), 0, 4, **options)
