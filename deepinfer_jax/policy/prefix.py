"""Prefix reuse: block keys by hash chain, matching that compares ids, and the two hit lengths."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer_jax.policy.view import Array, namespace

BLOCK_TOKENS = 128
WINDOW = 128
BACKTRACKING = 6
RESERVE = WINDOW + BACKTRACKING
"""Prompt tokens always computed: 134, the window plus the ring's extra rows (chapter, 11.4)."""

Digest = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    """The default block key: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Image:
    """An image in a prompt: tokens [start, end) and the digest of its pixels."""

    start: int
    end: int
    digest: bytes


def chain(
    token_ids: Sequence[int] | np.ndarray,
    extra_keys: Sequence[bytes] = (),
    block_tokens: int = BLOCK_TOKENS,
    parent: bytes = b"",
    images: Sequence[Image] = (),
    digest: Digest = digest,
) -> tuple[bytes, ...]:
    """Keys of the full blocks: key i hashes key i - 1, the block's ids, and the extra keys.

    Equal keys mean equal whole prefixes, up to collisions of `digest`. A partial last block has no
    key. Source: the chapter, section 11.2; vLLM's prefix caching has the same form.

    Args:
      token_ids: ids in [0, 2**32).
      extra_keys: what else the KV depends on, in every block: adapter, tenant salt, ...
      block_tokens: tokens per block.
      parent: key of the block before `token_ids[0]`; empty at the start of a sequence.
      images: of this sequence; each enters the keys of the blocks it overlaps.
      digest: bytes -> key.

    Raises:
      ValueError: an id does not fit, or the block size is not positive.
    """
    keys = []
    for content in _contents(token_ids, extra_keys, block_tokens, images):
        parent = digest(_framed(parent) + content)
        keys.append(parent)
    return tuple(keys)


def _contents(
    token_ids: Sequence[int] | np.ndarray,
    extra_keys: Sequence[bytes],
    block_tokens: int,
    images: Sequence[Image],
) -> list[bytes]:
    """What each full block's KV depends on besides its predecessors, as unambiguous bytes."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}: a block holds at least one token")
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**32:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"token id {wrong} is outside [0, 2**32): check the tokenizer")
    rows = ids[: ids.size // block_tokens * block_tokens].reshape(-1, block_tokens)
    extra = len(extra_keys).to_bytes(4, "little") + b"".join(map(_framed, extra_keys))
    contents = []
    for number, row in enumerate(rows.astype("<u4")):
        start = number * block_tokens
        seen = [i for i in images if i.start < start + block_tokens and i.end > start]
        # The image's offset matters: equal placeholders may lie at other rows of the same image.
        marks = [_framed(i.digest) + _framed(b"%d" % (i.start - start)) for i in seen]
        contents.append(_framed(row.tobytes()) + extra + b"".join(marks))
    return contents


def _framed(data: bytes) -> bytes:
    """Length before data, so that no two lists of byte strings join to the same bytes."""
    return len(data).to_bytes(4, "little") + data


@dataclasses.dataclass
class _Block:
    parent: bytes
    content: bytes
    children: set[bytes] = dataclasses.field(default_factory=set)


class BlockIndex:
    """Which blocks are present. Compares stored ids, so a colliding hash costs a hit, never a byte.

    Invariant: every block's predecessor is present. By induction along the chain, a matched block
    has the same ids and extra keys, and so have all blocks before it.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, digest: Digest = digest) -> None:
        self.block_tokens = block_tokens
        self._digest = digest
        self._blocks: dict[bytes, _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def match(
        self,
        token_ids: Sequence[int] | np.ndarray,
        extra_keys: Sequence[bytes] = (),
        images: Sequence[Image] = (),
    ) -> tuple[bytes, ...]:
        """Keys of the leading blocks that are present; times `block_tokens` it is `C`."""
        keys = []
        parent = b""
        for content in _contents(token_ids, extra_keys, self.block_tokens, images):
            key = self._digest(_framed(parent) + content)
            if not self._holds(key, parent, content):
                break
            keys.append(key)
            parent = key
        return tuple(keys)

    def insert(
        self,
        token_ids: Sequence[int] | np.ndarray,
        extra_keys: Sequence[bytes] = (),
        images: Sequence[Image] = (),
    ) -> tuple[bytes, ...]:
        """Add the full blocks that are missing and return their keys, in order.

        Stops at the first collision: the block that came first keeps the key, and what follows
        the refused block could not be reached.
        """
        added = []
        parent = b""
        for content in _contents(token_ids, extra_keys, self.block_tokens, images):
            key = self._digest(_framed(parent) + content)
            if key not in self._blocks:
                self._blocks[key] = _Block(parent, content)
                if parent:
                    self._blocks[parent].children.add(key)
                added.append(key)
            elif not self._holds(key, parent, content):
                break
            parent = key
        return tuple(added)

    def remove(self, key: bytes) -> tuple[bytes, ...]:
        """Drop a block and all that follow it; returns the keys dropped, none if absent."""
        if key not in self._blocks:
            return ()
        parent = self._blocks[key].parent
        if parent:
            self._blocks[parent].children.discard(key)
        dropped = []
        pending = [key]
        while pending:
            dropped.append(pending.pop())
            pending.extend(self._blocks.pop(dropped[-1]).children)
        return tuple(dropped)

    def _holds(self, key: bytes, parent: bytes, content: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.parent == parent and block.content == content


def hit_lengths(
    input_tokens: Array,
    cached_tokens: Array,
    has_swa: Array,
    block_tokens: int = BLOCK_TOKENS,
    reserve: int = RESERVE,
) -> tuple[Array, Array]:
    """The two lengths of a hit: block KV reused, and where computation restarts.

    `L1 = block * floor(min(max(0, L - reserve), C) / block)`; `H = L1` with sliding-window state at
    L1, else one block less. L = 902 with all cached: (768, 768), or (768, 640) without the state.
    Source: the chapter, section 11.4 (lab 24).

    Args:
      input_tokens: L, any shape.
      cached_tokens: C, a contiguous prefix present in the store.
      has_swa: bool: the state at L1 is live.
      block_tokens: tokens per block.
      reserve: tokens never taken from the cache; window + backtracking of the configuration.

    Returns:
      (L1, H), multiples of `block_tokens` with 0 <= H <= L1.
    """
    xp = namespace(input_tokens, cached_tokens, has_swa)
    usable = xp.minimum(xp.maximum(input_tokens - reserve, 0), cached_tokens)
    block_hit = usable // block_tokens * block_tokens
    backed_off = xp.maximum(block_hit - block_tokens, 0)
    return block_hit, xp.where(has_swa, block_hit, backed_off)


def outside_image(
    restart: Array, image_starts: Array, image_ends: Array, block_tokens: int = BLOCK_TOKENS
) -> Array:
    """The restart, stepped back by whole blocks until it lies inside no image.

    A restart at an image's first token or just after its last one is outside.

    Args:
      restart: H, a multiple of `block_tokens`, [...].
      image_starts: first tokens, [..., I]; unused entries have start = end.
      image_ends: one past the last tokens, [..., I].
      block_tokens: tokens per step.
    """
    xp = namespace(restart, image_starts, image_ends)
    # One pass leaves every image the restart is in, perhaps into an earlier one: I passes do.
    for _ in range(image_starts.shape[-1]):
        inside = (image_starts < restart[..., None]) & (restart[..., None] < image_ends)
        steps = -(-(restart[..., None] - image_starts) // block_tokens)
        restart = restart - block_tokens * xp.max(xp.where(inside, steps, 0), axis=-1)
    return restart
