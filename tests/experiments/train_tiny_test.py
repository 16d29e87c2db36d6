"""The training room against the model it trains, and its parts against small answers by hand."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.model import backbone, draft, experts
from deepinfer_jax.model.numerics import EXACT
from deepinfer_jax.model.rows import text_rows
from experiments.training import (
    baselines,
    block,
    losses,
    measure,
    resume,
    state,
    text,
    whole,
    whole_experts,
)
from tests.model.five_layers import five_layers
from tests.oracle.random_weights import random_parameters

ROOT = pathlib.Path(__file__).parents[2]

MODEL = five_layers()


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_parameters(MODEL, 0))


def test_whole_sequences_equal_the_backbone(params):
    tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, MODEL.vocab_size)

    @jax.jit
    def served(tokens):
        start = jnp.zeros(2, jnp.int32)
        rows = text_rows(MODEL, tokens, start, start + 32)
        made, _ = backbone.forward(params, MODEL, rows, create_dense(MODEL, 2, 32), numerics=EXACT)
        return backbone.logits(params, MODEL, made.hidden), made.visits

    logits, visits = served(tokens)
    made = jax.jit(lambda t: whole.forward(params, MODEL, t, EXACT))(tokens)
    scale = float(jnp.abs(logits).max())
    np.testing.assert_allclose(made.logits / scale, logits / scale, atol=1e-4)
    np.testing.assert_array_equal(made.visits, visits)


def test_every_expert_equals_the_grouped_experts(params):
    x = jax.random.normal(jax.random.key(2), (2, 9, MODEL.hidden_size))
    weights = params["layers"][0]["moe"]
    every, visits = whole_experts.every_expert(weights, MODEL, x, 2)
    valid = jnp.ones((2, 9), bool)
    grouped, counted = experts.moe(weights, MODEL, x, valid, ~valid, 2)
    np.testing.assert_allclose(every, grouped, atol=1e-5)
    np.testing.assert_array_equal(visits, counted)


def test_blocks_equal_the_drafter(params):
    memory = create_dense(MODEL, 2, 16)
    rows = jax.random.normal(jax.random.key(3), (2, 16, MODEL.head_dim))
    memory = dataclasses.replace(memory, windows=(rows,) * MODEL.num_rings)
    token, at = jnp.array([5, 9]), jnp.array([3, 12])
    history = memory.read_window(MODEL.num_layers, at)

    @jax.jit
    def both(params):
        return (
            draft.block_hidden(params, MODEL, token, at, memory, 4, EXACT),
            block.hidden(params, MODEL, token, at, (history,), 4, EXACT),
        )

    served, made = both(params)
    np.testing.assert_allclose(made, served, atol=1e-4 * float(jnp.abs(served).max()))


def test_both_losses_have_a_gradient_for_each_weight_they_train(params):
    """Traced only."""
    tokens, anchors = jnp.zeros((2, 32), jnp.int32), jnp.zeros((2, 3), jnp.int32)

    def drafter(own, params, tokens):
        made = whole.forward(params, MODEL, tokens)
        return losses.draft_loss(own, params, MODEL, tokens, made, anchors, 0.5)

    backbone = jax.grad(lambda p, t: losses.backbone_loss(p, MODEL, t), has_aux=True)
    made, _ = jax.eval_shape(backbone, params, tokens)
    assert jax.tree.structure(made) == jax.tree.structure(params)
    own = params["draft"]
    made, (_, _, accepted) = jax.eval_shape(jax.grad(drafter, has_aux=True), own, params, tokens)
    assert jax.tree.structure(made) == jax.tree.structure(own)
    assert accepted.shape == (MODEL.draft.block_size,)


def test_bias_rises_where_visits_are_few():
    layers = ({"moe": {"bias": jnp.zeros(4)}},)
    moved = state.balance(layers, jnp.array([[0, 2, 4, 2]]), 0.5)
    np.testing.assert_array_equal(moved[0]["moe"]["bias"], [0.5, 0, -0.5, 0])


def test_bigram_counts_by_hand():
    found = baselines.bigram(np.array([0, 1, 0, 1, 0]), 2, weight=1.0)
    # unigram with one added: (4 / 7, 3 / 7); two of two steps from 0 go to 1
    np.testing.assert_allclose(found, [[4 / 21, 17 / 21], [18 / 21, 3 / 21]])


def test_calibration_judges_a_draft_only_after_accepted_ones():
    found = measure.calibration(np.array([0, 2]), np.array([[0.9, 0.1], [0.9, 0.9]]))
    assert found["bins"] == [{"drafts": 3, "confidence": pytest.approx(0.9), "accepted": 2 / 3}]
    assert found["expected_error"] == pytest.approx(0.9 - 2 / 3)
    assert [row["accepted"] for row in found["positions"]] == [0.5, 1.0]


def test_confidence_is_scaled_to_what_was_accepted():
    """Of ten drafts said to be right with 0.9, seven are: the logit ln 9 shrinks to ln (7 / 3)."""
    accepted, confidence = np.array([1] * 7 + [0] * 3), np.full((10, 1), 0.9)
    assert measure.confidence_scale(accepted, confidence) == pytest.approx(
        np.log(7 / 3) / np.log(9), abs=0.03
    )


def test_confidence_behind_a_wrong_draft_does_not_count():
    accepted = np.array([0, 0, 1])
    sure = np.array([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]])
    other = np.array([[0.1, 0.1], [0.1, 0.7], [0.9, 0.1]])
    assert measure.confidence_scale(accepted, sure) == measure.confidence_scale(accepted, other)


def test_split_and_tokens_round_trip():
    names = [f"a{i}.py" for i in range(1000)]
    assert 30 < sum(map(text.is_held_out, names)) < 100  # one in sixteen: 62
    tokenizer = text.train_tokenizer(["def f(x):\n    return x\n"] * 3, 270)
    stream = text.encode(tokenizer, ["def é"])
    assert stream[0] == 0 and stream[-1] == 1
    assert tokenizer.decode(stream[1:-1].tolist()) == "def é"


def test_a_text_shorter_than_the_context_is_refused():
    with pytest.raises(ValueError, match="give more text"):
        text.batch(np.zeros(4, np.int32), 1, 4, np.random.default_rng(0))


def test_confidence_is_judged_behind_right_drafts_only():
    right = jnp.array([[True, False, True], [True, True, False]])
    np.testing.assert_array_equal(losses._reached(right), [[1, 1, 0], [1, 1, 1]])


def test_states_are_taken_up_where_they_were_kept(tmp_path):
    made = state.create({"w": jnp.arange(3.0)}, 4, 0.1)
    moved = made.apply_gradients(grads={"w": jnp.ones(3)})
    first = resume.States(tmp_path / "phase", every=2)
    assert first.latest(made)[0] == 0
    first.keep(1, made, last=False)
    first.keep(2, moved, last=False)
    first.close()
    done, found = resume.States(tmp_path / "phase", every=2).latest(made)
    assert done == 2
    assert int(found.step) == 1
    jax.tree.map(np.testing.assert_array_equal, found.opt_state, moved.opt_state)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    def command(name):
        module = [sys.executable, "-m", "experiments.train_tiny"]
        return [*module, "--config=configs/train_tiny.py:smoke", f"--workdir={tmp_path / name}"]

    def digests(name):
        return json.loads((tmp_path / name / "summary.json").read_text())["held_out"]

    subprocess.run(command("whole"), cwd=ROOT, check=True)
    running = subprocess.Popen(command("cut"), cwd=ROOT)
    while not list(tmp_path.glob("cut/state/backbone/2/_CHECKPOINT_METADATA")):
        assert running.poll() is None
        time.sleep(0.05)
    running.kill()
    running.wait()
    assert not (tmp_path / "cut" / "checkpoint").exists()
    subprocess.run(command("cut"), cwd=ROOT, check=True)
    assert digests("cut") == digests("whole")
