"""Where cached prefixes come from, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from deepinfer_jax.engine.request import Hit, Request
from deepinfer_jax.rules import require


class PrefixSource(Protocol):
    """A cache of prefixes. The engine's thread calls it between steps; it may not block."""

    def match(self, request: Request) -> Hit | None:
        """The hit of a prompt about to be admitted, or None.

        Blocks it names are owned by the source at least until the scheduler pins them, before any
        other call of the source.
        """
        ...

    def publish(self, request: Request, count: int) -> None:
        """The first `count` blocks of the request's table are full, and no step writes them again.

        The source pins those that it keeps. Called again as the request grows.
        """
        ...

    def reclaim(self, count: int) -> None:
        """Let go of blocks until `count` more are free, or of all that nobody else owns.

        Never called between a `match` and the pinning of its blocks.
        """
        ...

    def held(self) -> Iterable[int]:
        """Blocks the source owns, each once."""
        ...


def check_hit(hit: Hit, request: Request, block_tokens: int) -> None:
    """The rules of a hit; ValueError names the one it breaks."""
    name = f"the hit of request {request.request_id}"
    require(
        hit.block_hit % block_tokens == 0 and 0 <= hit.compute_hit <= hit.block_hit,
        f"{name} reuses {hit.block_hit} tokens and computes from {hit.compute_hit}; reuse whole "
        f"blocks of {block_tokens} tokens and compute from there or before",
    )
    require(
        hit.block_hit < request.length,
        f"{name} covers {hit.block_hit} of {request.length} tokens; the last one must be computed "
        "for an output, so reserve some",
    )
    require(
        hit.swa_valid_start <= hit.compute_hit and hit.store_from <= hit.block_hit,
        f"{name} has swa_valid_start {hit.swa_valid_start} and store_from {hit.store_from}; they "
        f"may not exceed compute_hit {hit.compute_hit} and block_hit {hit.block_hit}",
    )
    require(
        hit.compute_hit == hit.block_hit or hit.store_from == hit.block_hit,
        f"{name} computes tokens {hit.compute_hit} .. {hit.block_hit - 1} again and stores them from "
        f"{hit.store_from}; cached rows stay as they are, so set store_from to {hit.block_hit}",
    )
    require(
        len(hit.blocks) in (0, hit.block_hit // block_tokens),
        f"{name} names {len(hit.blocks)} blocks for {hit.block_hit} tokens; name all, or none "
        "where they are to be copied in",
    )
    inside = [i for i in request.images if i.start < hit.compute_hit < i.end]
    require(
        not inside,
        f"{name} restarts at {hit.compute_hit}, inside an image; step back by whole blocks "
        "(`policy.prefix.outside_image`)",
    )
