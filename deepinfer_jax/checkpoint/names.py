"""Where each weight of the model's tree lies in a released DeepSeek-V4.1 checkpoint.

Every weight of the tree is the stored matrices of `Weight.parts`, one below the other, reshaped.
Source: tensor names, shapes and dtypes of the released DeepSeek-V4.1-Flash checkpoint.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.declaration import model_parameters
from deepinfer_jax.model.parameters import Leaf, Tree, is_leaf

GROUP = 32  # channels (and, in a square, rows) under one scale


class Kind(enum.Enum):
    """How a matrix is stored; the quantised kinds have E8M0 scales in a tensor of their own."""

    BF16 = "BF16"
    F32 = "F32"
    FP8_SQUARES = "F8_E4M3 in squares"  # scale [ceil(out / 32), ceil(in / 32)]
    FP8_ROWS = "F8_E4M3 in rows"  # scale [out, in / 32]
    FP4_ROWS = "E2M1 in rows"  # two to a byte, scale [out, in / 32]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, by its dtype's name in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclasses.dataclass(frozen=True)
class Part:
    """One stored matrix or vector; `shape` counts numbers, not bytes."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(values,) or (values, scales), as the file has them."""
        if self.kind in (Kind.BF16, Kind.F32):
            return (Tensor(self.name, self.kind.value, self.shape),)
        rows, columns = self.shape
        packed = self.kind is Kind.FP4_ROWS
        values = (rows, columns // 2) if packed else self.shape
        tall = -(-rows // GROUP) if self.kind is Kind.FP8_SQUARES else rows
        scale = self.name.removesuffix(".weight") + ".scale"
        return (
            Tensor(self.name, "I8" if packed else "F8_E4M3", values),
            Tensor(scale, "F8_E8M0", (tall, -(-columns // GROUP))),
        )


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of the tree: its declaration, its path for messages, what it is made of."""

    leaf: Leaf
    path: str
    parts: tuple[Part, ...]


_SQUARES, _BF16, _F32 = Kind.FP8_SQUARES, Kind.BF16, Kind.F32
_BLOCK = {
    "attn_norm": ("attn_norm.weight", _BF16),
    "ffn_norm": ("ffn_norm.weight", _BF16),
    **{
        f"{ours}_mix.{part}": (f"hc_{ours}_{part}", _F32)
        for ours in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"attn.{x}": (f"attn.{x}.weight", _SQUARES) for x in ("wq_a", "wq_b", "wkv")},
    **{f"attn.{x}": (f"attn.{x}.weight", _SQUARES) for x in ("wo_a", "wo_b")},
    **{f"attn.{x}": (f"attn.{x}.weight", _BF16) for x in ("q_norm", "kv_norm")},
    "attn.sink": ("attn.attn_sink", _F32),
    **{f"compressor.{x}": (f"attn.compressor.{x}.weight", _BF16) for x in ("wkv", "wgate", "norm")},
    "indexer.wq_b": ("attn.indexer.wq_b.weight", _SQUARES),
    "indexer.weights": ("attn.indexer.weights_proj.weight", _BF16),
    "indexer.wk": ("attn.indexer.wk.weight", _BF16),
    "indexer.k_norm": ("attn.indexer.k_norm.weight", _BF16),
    "moe.router": ("ffn.gate.weight", _BF16),
    "moe.bias": ("ffn.gate.bias", _F32),
    "moe.bias_image": ("ffn.gate.bias_vl", _F32),
    "moe.shared_down": ("ffn.shared_experts.w2.weight", _SQUARES),
    "engram.table": ("engram.embed.weight", Kind.FP8_ROWS),
    "engram.wkv": ("engram.wkv.weight", _SQUARES),
    "engram.q_weight": ("engram.q_weight", _BF16),
    "engram.k_weight": ("engram.k_weight", _BF16),
}
_TOP = {name: f"{name}.weight" for name in ("embed", "norm", "head")}
_DRAFT = {  # which stage holds it, where, how
    "main_proj": (0, "main_proj.weight", _SQUARES),
    "main_norm": (0, "main_norm.weight", _BF16),
    "norm": (-1, "norm.weight", _BF16),
    "markov_embed": (-1, "markov_head.embed.weight", _BF16),
    "markov_head": (-1, "markov_head.head.weight", _BF16),
    "confidence": (-1, "confidence_head.proj.weight", _BF16),
}


def weights(config: ModelConfig) -> Tree:
    """A `Weight` for every declaration of `model_parameters(config)`, in the same tree."""

    def weight(path: tuple[Any, ...], leaf: Leaf) -> Weight:
        keys = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
        return Weight(leaf, ".".join(map(str, keys)), _parts(config, keys, leaf))

    return jax.tree_util.tree_map_with_path(weight, model_parameters(config), is_leaf=is_leaf)


def flat(config: ModelConfig) -> list[Weight]:
    """The weights in the order of `jax.tree.leaves`."""
    return jax.tree.leaves(weights(config), is_leaf=lambda node: isinstance(node, Weight))


def _parts(config: ModelConfig, keys: tuple[Any, ...], leaf: Leaf) -> tuple[Part, ...]:
    head, rest = keys[0], keys[1:]
    if head == "layers":
        return _block_parts(f"layers.{rest[0]}.", ".".join(rest[1:]), leaf)
    if head == "draft" and rest[0] == "layers":
        return _block_parts(f"mtp.{rest[1]}.", ".".join(rest[2:]), leaf)
    if head == "draft":
        stage, name, kind = _DRAFT[rest[0]]
        shape = (1, *leaf.shape) if rest[0] == "confidence" else leaf.shape
        return (Part(f"mtp.{stage % config.num_draft_layers}.{name}", kind, shape),)
    name = _vision_name(rest) if head == "vision" else _TOP[head]
    return (Part(name, _BF16, leaf.shape),)


def _block_parts(prefix: str, key: str, leaf: Leaf) -> tuple[Part, ...]:
    """A backbone layer or a draft stage, which have the same names below their prefix."""
    if key == "moe.shared_gate_up":
        rows, width = leaf.shape
        names = [f"{prefix}ffn.shared_experts.{w}.weight" for w in ("w1", "w3")]
        return tuple(Part(name, _SQUARES, (rows // 2, width)) for name in names)
    if key in ("moe.gate_up", "moe.down"):
        experts, rows, width = leaf.shape
        halves = ("w1", "w3") if key == "moe.gate_up" else ("w2",)
        names = [f"{prefix}ffn.experts.{e}.{w}.weight" for e in range(experts) for w in halves]
        return tuple(Part(name, Kind.FP4_ROWS, (rows // len(halves), width)) for name in names)
    name, kind = _BLOCK[key]
    shape = (math.prod(leaf.shape[:-1]), leaf.shape[-1]) if len(leaf.shape) > 2 else leaf.shape
    return (Part(prefix + name, kind, shape),)


def _vision_name(keys: tuple[Any, ...]) -> str:
    """Norms and the two matrices of an MLP have no bias, so the tree has them without a suffix."""
    name = ".".join(map(str, keys))
    if keys[0].startswith("image_"):
        return name
    name = name if keys[0] == "aligner" else "vision." + name
    name = name.replace("vision.patch_embed.", "vision.patch_embed.proj.")
    return name if keys[-1] in ("weight", "bias") else name + ".weight"
