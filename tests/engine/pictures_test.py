"""Prompts with images through the whole engine, against the model over the whole text at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.dense import create_dense
from deepinfer_jax.config import ModelConfig, Role, VisionConfig
from deepinfer_jax.engine.device import Device
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.pictures import MultimodalPrompt, PictureEncoder
from deepinfer_jax.engine.prefix_cache import PrefixCache
from deepinfer_jax.engine.sampling_params import SamplingParams
from deepinfer_jax.model import backbone, image_patches, vision
from deepinfer_jax.model.images import contained_size, image_grid
from deepinfer_jax.model.rows import text_rows
from deepinfer_jax.parallel.mesh import make_mesh
from tests.engine.small_engine import BUCKETS, config, micro, parameters

VISION = VisionConfig(
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=24,
    patch_size=2,
    downsample_ratio=3,
    max_image_tokens=20,
    min_pixels=4,
    image_token_id=60,
)
MODEL: ModelConfig = dataclasses.replace(
    micro(), vision=VISION, draft=None, compress_ratios=micro().compress_ratios[:4]
)
CONFIG = config(truncation="mask", keep=14, nextn=0, num_blocks=60)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONGEST = 80


@pytest.fixture(scope="module")
def weights() -> dict:
    return parameters(MODEL)


@pytest.fixture(scope="module")
def device(weights: dict) -> Device:
    made = Device(weights, MODEL, CONFIG, buckets=BUCKETS)
    made.warm_up(images=True, pictures=True)
    return made


def llm(device: Device, cache: PrefixCache | None = None, **changes: object) -> LLM:
    """An LLM over the warm device; `llm.rows` has the rows of each prompt step."""
    rows: list[int] = []
    made = dataclasses.replace(CONFIG, **changes)
    one = LLM(
        device.params,
        MODEL,
        made,
        buckets=BUCKETS,
        prefix_cache=cache,
        record=lambda step: rows.extend([step.rows] if step.is_prompt else []),
    )
    one.engine.device = device
    if cache is not None:
        cache.attach(one.engine.scheduler.roster.storage.blocks, device.snapshot)
    one.rows = rows  # type: ignore[attr-defined]
    return one


def picture(seed: int, height: int = 14, width: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def prompts() -> list[MultimodalPrompt]:
    """Images first, last, two of them, of several shapes, and a text that fills more than a chunk."""
    return [
        MultimodalPrompt([text(1, 5), picture(2), text(3, 7)]),
        MultimodalPrompt([picture(4, 6, 18), text(5, 9)]),  # the id that begins a text comes first
        MultimodalPrompt([text(6, 22), picture(7), text(8, 2), picture(9, 6, 18), text(10, 4)]),
        MultimodalPrompt([text(11, 40), picture(12)]),
    ]


@functools.partial(jax.jit, static_argnums=3)
def encoded(params, patches, grids, cells):
    """Features of images, as the encoder gives them."""
    return vision.encode(params, VISION, patches, grids, cells)


def spelled(weights: dict, prompt: MultimodalPrompt) -> tuple[list[int], dict[int, np.ndarray]]:
    """Ids of a prompt, those of images -1, and the vector of each place in an image; step by step."""
    ids, vectors = [MODEL.bos_token_id] * isinstance(prompt.parts[0], np.ndarray), {}
    for part in prompt.parts:
        if not isinstance(part, np.ndarray):
            ids += part
            continue
        height, width = part.shape[:2]
        grid = image_grid(width, height, VISION)
        assert contained_size(width, height, grid) == (width, height)  # nothing to resample
        patches, grids = image_patches.pack([image_patches.patches(part, grid)], [grid])
        cells = grid.cell_rows * grid.cell_columns
        features = np.asarray(encoded(weights["vision"], patches, grids, cells))[0]
        features = features.reshape(grid.cell_rows, grid.cell_columns, -1)
        names = ("image_start", "image_newline", "image_end")
        start, newline, end = (np.asarray(weights["vision"][n]) for n in names)
        span = [start, *(v for row in features for v in (*row, newline)), end]
        vectors |= {len(ids) + i: v for i, v in enumerate(span)}
        ids += [-1] * len(span)
    return ids, vectors


@jax.jit
def whole(params, tokens, count, image, vectors, kept):
    """Logits [V] of the last of a text's tokens, all computed at once."""
    none, keep = jnp.zeros(1, jnp.int32), CONFIG.cache.keep
    rows = text_rows(MODEL, tokens, none, count, kept_start=kept)
    rows = dataclasses.replace(rows, is_image=image, embeddings=vectors)
    memory = create_dense(MODEL, 1, LONGEST, jnp.float32)
    out, _ = backbone.forward(params, MODEL, rows, memory, truncation="mask", keep=keep)
    last = jnp.take_along_axis(out.hidden, (count - 1)[:, None, None], axis=1)
    return backbone.logits(params, MODEL, last)[0, 0]


def answer_of(weights: dict, prompt: MultimodalPrompt, count: int) -> list[int]:
    """Greedy tokens, each from the whole text before it; margins must be clear."""
    ids, shown = spelled(weights, prompt)
    kept = jnp.array([max(0, len(ids) - CONFIG.cache.keep)], jnp.int32)
    image = np.zeros((1, LONGEST), bool)
    vectors = np.zeros((1, LONGEST, MODEL.hidden_size), np.float32)
    for at, vector in shown.items():
        image[0, at], vectors[0, at] = True, vector
    known = list(ids)
    for _ in range(count):
        tokens = np.array([known + [-1] * (LONGEST - len(known))], np.int32)
        size = jnp.array([len(known)], jnp.int32)
        logits = np.asarray(whole(weights, tokens, size, image, vectors, kept))
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4, "too close to call; take another seed"
        known.append(int(logits.argmax()))
    return known[len(ids) :]


@pytest.fixture(scope="module")
def wanted(weights: dict) -> list[list[int]]:
    """The answers to `prompts()`."""
    return [answer_of(weights, prompt, 8) for prompt in prompts()]


def tokens(one: LLM, given: list[MultimodalPrompt]) -> list[list[int]]:
    return [list(result.answers[0].tokens) for result in one.generate(given, GREEDY)]


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_are_the_models(device: Device, wanted: list, overlap: bool) -> None:
    """In chunks, several requests at a time."""
    assert tokens(llm(device, overlap=overlap), prompts()) == wanted


def test_other_pixels_give_another_answer(device: Device) -> None:
    """So that the tests here can fail: the answers depend on the image."""
    one, two = (MultimodalPrompt([text(1, 5), picture(seed), text(3, 7)]) for seed in (2, 3))
    assert len({tuple(t) for t in tokens(llm(device), [one, two])}) == 2


def test_prefixes_are_reused_for_the_same_image_only(device: Device) -> None:
    """Both prompts have the same ids; the second's image is another."""
    history = [text(21, 18), picture(22), text(23, 30)]
    other = [history[0], picture(24), history[2]]
    cache = PrefixCache(MODEL, CONFIG.cache)
    plain, reusing = llm(device), llm(device, cache)
    computed = []
    for parts in (history, other, history):
        before = len(reusing.rows)
        prompt = [MultimodalPrompt(parts)]
        assert tokens(reusing, prompt) == tokens(plain, prompt)
        computed.append(sum(reusing.rows[before:]))
    assert computed[1] == computed[0], "one block is known, and computed again for its window"
    assert computed[2] < computed[0] - 16


def test_preempted_prompts_are_computed_again(device: Device) -> None:
    """A small pool: requests lose their storage, and their images are read again."""
    crowded = llm(device, num_blocks=12)
    found = crowded.generate(prompts(), dataclasses.replace(GREEDY, max_tokens=25))
    assert sum(crowded.rows) > sum(len(result.prompt) for result in found)
    assert all(len(result.answers[0].tokens) == 25 for result in found)


def test_a_completion_engine_takes_them_over(device: Device, weights: dict, wanted: list) -> None:
    prompt = dataclasses.replace(CONFIG, role=Role.PROMPT, overlap=False)
    completion = dataclasses.replace(CONFIG, role=Role.COMPLETION, stop_preempted=True)
    one = LLM(weights, MODEL, completion, prompt_config=prompt, buckets=BUCKETS)
    for engine in (one.engine.prompt, one.engine.completion):
        engine.device.programs, engine.device.compiled = device.programs, device.compiled
    assert tokens(one, prompts()[:2]) == wanted[:2]


@pytest.mark.slow
def test_ranks_of_a_mesh(weights: dict, wanted: list) -> None:
    """Two ranks, of which one has a text while the other has images."""
    one = LLM(weights, MODEL, CONFIG, mesh=make_mesh(1, 2), buckets=BUCKETS)
    one.warm_up(pictures=True)
    words = MultimodalPrompt([text(1, 5)])
    assert tokens(one, [words, *prompts()])[1:] == wanted


def test_penalties_and_texts_before_images(device: Device) -> None:
    """Ids of images are no words: they are not counted."""
    wish = SamplingParams(temperature=0.0, max_tokens=4, repetition_penalty=1.3, ignore_eos=True)
    (result,) = llm(device).generate(prompts()[0], wish)
    assert len(result.answers[0].tokens) == 4


def test_images_are_resampled_to_their_grid(weights: dict) -> None:
    """A photograph of one colour is as good as a small one; its span is within the budget."""
    encoder = PictureEncoder(weights, MODEL)
    large, small = (np.full((n, n, 3), 90, np.uint8) for n in (600, 24))
    (ids, vectors), (few, same) = encoder.encode(large), encoder.encode(small)
    assert len(ids) == len(vectors) <= VISION.max_image_tokens
    assert len(few) == len(same)
    assert ids[0] == MODEL.vocab_size + 2
    assert set(ids[1:]) == {MODEL.vocab_size + 1}
    assert np.isfinite(vectors).all()


def test_refusals(device: Device) -> None:
    one, good = llm(device), prompts()[0]
    with pytest.raises(ValueError, match="an image is float64"):
        one.generate(MultimodalPrompt([picture(1) / 255]), GREEDY)
    with pytest.raises(ValueError, match="at least one pixel"):
        one.generate(MultimodalPrompt([picture(1)[:0]]), GREEDY)
    with pytest.raises(ValueError, match="empty prompt"):
        one.generate(MultimodalPrompt([]), GREEDY)
    whole_prompts = LLM(device.params, MODEL, config(nextn=0), buckets=BUCKETS)
    with pytest.raises(ValueError, match="prompt_logprobs are of a text's tokens"):
        whole_prompts.generate(good, dataclasses.replace(GREEDY, prompt_logprobs=1))
    with pytest.raises(ValueError, match="token id 301 at position 0"):
        one.generate([[301, 302]], GREEDY)
    blind = LLM(device.params, dataclasses.replace(MODEL, vision=None), CONFIG, buckets=BUCKETS)
    with pytest.raises(ValueError, match="no vision part"):
        blind.generate(good, GREEDY)
    assert not one.engine.unfinished
