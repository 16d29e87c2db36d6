"""Compression and index selection against plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.model import compressor, indexer
from deepinfer_jax.model.numerics import EXACT, Angles, frequencies, rms_norm, rotate
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.model.shares import Shares
from deepinfer_jax.model.topology import topology
from deepinfer_jax.presets import tiny
from tests.oracle.random_weights import random_parameters

CONFIG = tiny()
TOKENS = 40


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(CONFIG, 0)["layers"])


def rows_of(layer, params, x):
    """Rows and keys of every complete group, written out."""
    p, eps, r = params[layer], CONFIG.norm_eps, CONFIG.compress_ratios[layer]
    made = []
    for j in range(x.shape[0] // r):
        group = x[j * r : (j + 1) * r]
        latent = group @ p["compressor"]["wkv"].T
        if r > 1:
            gate = group @ p["compressor"]["wgate"].T
            latent = latent * np.exp(gate) / np.exp(gate).sum(0)
        latent = rms_norm(latent.sum(0), p["compressor"]["norm"], eps)
        freqs = frequencies(CONFIG.rope, CONFIG.rope_head_dim, compressed=True)
        at = Angles.at(jnp.asarray(j * r), freqs)
        key = rms_norm(latent @ p["indexer"]["wk"].T, p["indexer"]["k_norm"], eps)
        made.append((rotate(latent, at), rotate(key, at)))
    return [np.stack(part) for part in zip(*made, strict=True)]


@pytest.mark.parametrize("layer", [2, 4])
@pytest.mark.parametrize("cuts", [(21,), (4, 5, 11, 21), (1, 2, 3, 20, 21), (7, 7, 14, 21)])
def test_groups_whatever_the_chunks(params, layer, cuts):
    """Ratio 2 and 1; odd starts, odd ends, an empty step."""
    x = jax.random.normal(jax.random.key(1), (1, 21, CONFIG.hidden_size))
    memory = create_dense(CONFIG, 1, TOKENS)
    at = 0
    for cut in cuts:
        part = jnp.pad(x[:, at:cut], ((0, 0), (0, 21 - (cut - at)), (0, 0)), constant_values=9)
        zero = jnp.zeros(1, jnp.int32)
        rows = text_rows(CONFIG, jnp.zeros((1, 21), jnp.int32), zero + at, zero + cut - at)
        memory = compressor.remember(
            params[layer],
            CONFIG,
            topology(CONFIG).layers[layer],
            part,
            Shares(rows, rows),
            memory,
            EXACT,
        )
        at = cut
    row, key = rows_of(layer, params, x[0])
    count = len(row)
    np.testing.assert_allclose(memory.rows[layer][0, :count], row, atol=2e-6)
    np.testing.assert_allclose(memory.keys[layer][0, :count], key, atol=2e-6)
    assert not memory.rows[layer][0, count:].any() and not memory.keys[layer][0, count:].any()


def test_stored_groups_are_kept(params):
    x = jax.random.normal(jax.random.key(2), (1, 12, CONFIG.hidden_size))
    memory = create_dense(CONFIG, 1, TOKENS)
    rows = text_rows(CONFIG, jnp.zeros((1, 12), jnp.int32), jnp.array([0]), jnp.array([12]))
    rows = dataclasses.replace(rows, global_start=jnp.array([8]))
    layer = topology(CONFIG).layers[2]
    memory = compressor.remember(params[2], CONFIG, layer, x, Shares(rows, rows), memory, EXACT)
    assert not memory.rows[2][0, :4].any() and memory.rows[2][0, 4:6].all()


def best(scores, visible, k):
    """Top-k of the visible, ties to the lowest."""
    order = sorted(range(visible), key=lambda j: (-scores[j], j))
    return set(order[:k])


def choose(config, offers, query, weight, visible, candidates, keys):
    return indexer._choose(config, offers, (query, weight, visible, candidates), keys)


def drawn(groups, seed=0):
    rng = np.random.default_rng(seed)
    heads, width = CONFIG.index_num_heads, CONFIG.index_head_dim
    query = rng.standard_normal((1, 6, heads, width)).astype(np.float32)
    weight = rng.standard_normal((1, 6, heads)).astype(np.float32)
    return query, weight, rng.standard_normal((1, groups, width)).astype(np.float32)


def test_scores_and_top_k():
    query, weight, keys = drawn(TOKENS)
    visible = np.array([[0, 1, 5, 8, 9, 40]])
    made = choose(CONFIG, False, query, weight, jnp.asarray(visible), None, keys)
    for q in range(6):
        dots = np.einsum("hd,gd->hg", np.float64(query[0, q]), np.float64(keys[0]))
        scores = (np.maximum(dots, 0) * weight[0, q, :, None]).sum(0)
        chosen = {int(i) for i, ok in zip(made.index[0, q], made.valid[0, q], strict=True) if ok}
        assert chosen == best(scores, visible[0, q], CONFIG.index_topk)


def test_ties_go_to_the_lowest():
    query, weight, keys = drawn(TOKENS)
    made = choose(CONFIG, False, query, weight, jnp.full((1, 6), 33), None, np.ones_like(keys))
    for q in range(6):
        assert set(np.asarray(made.index[0, q])) == set(range(CONFIG.index_topk))


def test_candidates_are_the_best_blocks_and_the_newest():
    query, weight, keys = drawn(TOKENS, 5)
    visible = np.array([[1, 3, 13, 14, 37, 40]])
    made = choose(CONFIG, True, query, weight, jnp.asarray(visible), None, keys)
    scores = np.asarray(indexer.score(query, weight, keys))
    for q in range(6):
        n, size = visible[0, q], CONFIG.candidate_block_size
        blocks = {
            b: scores[0, q, b * size : min((b + 1) * size, n)].max() for b in range(-(-n // size))
        }
        blocks[(n - 1) // size] = np.inf
        chosen = sorted(blocks, key=lambda b: -blocks[b])[: CONFIG.candidate_topk_blocks]
        pool = {j for b in chosen for j in range(b * size, (b + 1) * size)}
        assert set(np.flatnonzero(np.asarray(made.candidates[0, q]))) == pool


def test_users_select_inside_the_candidates():
    query, weight, keys = drawn(TOKENS, 6)
    pool = np.zeros((1, 6, TOKENS), bool)
    pool[..., ::3] = True
    made = choose(CONFIG, False, query, weight, jnp.full((1, 6), 20), jnp.asarray(pool), keys)
    scores = np.asarray(indexer.score(query, weight, keys))
    for q in range(6):
        inside = np.where(pool[0, q], scores[0, q], -np.inf)
        chosen = set(np.asarray(made.index[0, q])[np.asarray(made.valid[0, q])])
        assert chosen == {j for j in best(inside, 20, CONFIG.index_topk) if pool[0, q, j]}


def test_nothing_is_scored_while_everything_fits(params):
    """G = 8 = index_topk: all visible rows, and none of a row that sees none."""
    memory = create_dense(CONFIG, 1, 8)
    layer = topology(CONFIG).layers[4]
    x = jnp.full((1, 3, CONFIG.hidden_size), jnp.nan)
    latent = jnp.full((1, 3, CONFIG.q_lora_rank), jnp.nan)
    angles = Angles.at(jnp.zeros((1, 3)), frequencies(CONFIG.rope, 8, compressed=True))
    made = indexer.select(
        params[4]["indexer"],
        CONFIG,
        layer,
        x,
        latent,
        jnp.array([[-1, 0, 6]]),
        angles,
        memory,
        None,
        EXACT,
    )
    assert made.candidates is None
    np.testing.assert_array_equal(made.valid.sum(-1), [[0, 1, 7]])
