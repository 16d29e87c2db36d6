"""What a request must be before an engine takes it: errors at the boundary."""

from __future__ import annotations

import itertools

from deepinfer_jax.config import EngineConfig, Role
from deepinfer_jax.engine.request import Request
from deepinfer_jax.rules import require


def check_request(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Every rule of a request for this engine.

    Args:
      vocab_size: ids run from 0 to it; those of an image's tokens may lie behind it.

    Raises:
      ValueError: the value, the rule and the remedy, for the first rule broken.
    """
    name = f"request {request.request_id}"
    require(request.prompt_length > 0, f"{name} has an empty prompt; give at least one token")
    shown = {at for image in request.images for at in range(image.start, image.end)}
    for at, token in enumerate(request.tokens):
        require(
            token >= 0 and (token < vocab_size or at in shown),
            f"{name} has token id {token} at position {at}; ids lie in [0, {vocab_size}), so check "
            "the tokenizer",
        )
    require(
        request.length <= config.max_model_len,
        f"{name} has {request.length} tokens; max_model_len is {config.max_model_len}, so shorten "
        "it or raise that",
    )
    require(
        request.max_tokens >= 1,
        f"{name} has max_tokens {request.max_tokens}; an engine samples at least 1",
    )
    _check_images(request, config)
    _check_checkpoints(request, config)


def check_role(request: Request, config: EngineConfig) -> None:
    """What the engine's role takes (the chapter, section 11.1): prompts, or what follows them.

    Raises:
      ValueError: a completion engine gets a prompt, a prompt engine a prefilled request, or a
        prompt comes with computed tokens.
    """
    name = f"request {request.request_id}"
    require(
        config.role != Role.COMPLETION or request.output_length > 0,
        f"{name} is a prompt and this is a completion engine; send it to a prompt engine first",
    )
    require(
        config.role != Role.PROMPT or request.output_length == 0,
        f"{name} is prefilled and this is a prompt engine; send it to a completion engine",
    )
    require(
        request.output_length > 0 or request.proc == 0,
        f"{name} has no output but {request.proc} computed tokens; a prefix comes from a "
        "`PrefixSource`, so leave proc 0",
    )


def check_prefilled(request: Request) -> None:
    """A request handed over: it has outputs, and all but the last token is computed."""
    name = f"request {request.request_id}"
    require(
        0 < request.output_length < request.max_tokens,
        f"{name} comes with {request.output_length} output tokens of {request.max_tokens}; hand "
        "over between the first and the last one",
    )
    require(
        request.proc == request.length - 1,
        f"{name} comes with {request.proc} of {request.length} tokens computed; all but the last "
        "must be, so finish its prompt first",
    )


def _check_images(request: Request, config: EngineConfig) -> None:
    name = f"request {request.request_id}"
    for image in request.images:
        require(
            0 <= image.start < image.end <= request.prompt_length,
            f"{name} has an image at [{image.start}, {image.end}); it must lie in the prompt of "
            f"{request.prompt_length} tokens",
        )
        require(
            image.end - image.start <= config.batched_tokens,
            f"{name} has an image of {image.end - image.start} tokens; no chunk may cut it, so it "
            f"must fit max_num_batched_tokens {config.batched_tokens}: shrink it or raise that",
        )
    for one, two in itertools.pairwise(request.images):
        require(
            one.end <= two.start,
            f"{name} has images at [{one.start}, {one.end}) and [{two.start}, {two.end}); they "
            "must ascend and not overlap",
        )


def _check_checkpoints(request: Request, config: EngineConfig) -> None:
    name, points = f"request {request.request_id}", request.checkpoints
    require(
        not points or config.chunked_prefill,
        f"{name} asks for chunks to end at {points}; this engine computes a prompt in one step, so "
        "allow chunked_prefill or drop them",
    )
    ascend = all(a < b for a, b in itertools.pairwise(points))
    require(
        ascend and all(0 < p <= request.length for p in points),
        f"{name} has checkpoints {points}; they must ascend within (0, {request.length}]",
    )
    for image in request.images:
        inside = [p for p in points if image.start < p < image.end]
        require(
            not inside,
            f"{name} has checkpoint {inside[:1]} inside the image at [{image.start}, {image.end}); "
            "no chunk may end there, so move it to the image's start or end",
        )
