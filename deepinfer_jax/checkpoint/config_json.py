"""`ModelConfig` as plain JSON data, under its own field names."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer_jax.config import (
    DraftConfig,
    EngramConfig,
    ModelConfig,
    RopeConfig,
    VisionConfig,
)

_PARTS = {
    "rope": RopeConfig,
    "engram": EngramConfig,
    "draft": DraftConfig,
    "vision": VisionConfig,
}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Every field, nested parts as objects; `json.dumps` takes it."""
    return dataclasses.asdict(config)


def config_from_json(data: dict[str, Any]) -> ModelConfig:
    """The configuration that `config_to_json` gave.

    Raises:
      ValueError: a field is absent or unknown, or the sizes break a rule.
    """
    parts = {
        name: _build(kind, data[name])
        for name, kind in _PARTS.items()
        if data.get(name) is not None
    }
    return _build(ModelConfig, {**data, **parts})


def _build(kind: type[Any], data: dict[str, Any]) -> Any:
    """A dataclass from exactly its fields; JSON's lists are tuples."""
    fields = {field.name for field in dataclasses.fields(kind)}
    odd = sorted(fields ^ data.keys())
    if odd:
        raise ValueError(
            f"a saved {kind.__name__} differs in {', '.join(odd)} from this version's; save it again"
        )
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})
