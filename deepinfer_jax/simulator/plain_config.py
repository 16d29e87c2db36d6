"""Frozen dataclasses from nested mappings of plain values, with every name and type checked."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def choose(path: str, value: str, known: Sequence[str]) -> str:
    """`value` if it is one of `known`; raises ValueError with the nearest otherwise."""
    if value not in known:
        raise ValueError(
            f"{path}={value!r} is unknown: did you mean {nearest(str(value), known)!r}? "
            f"Known: {', '.join(known)}"
        )
    return value


def build(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """`kind(**values)`, sections built recursively; ints, floats and tuples are converted.

    Args:
      kind: a frozen dataclass whose fields are numbers, strings, tuples, mappings or dataclasses.
      values: may leave out fields with a default.
      path: of the section, for messages ("engines").

    Raises:
      ValueError: an unknown name (with the nearest), a missing one, or a value of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    prefix = f"{path}." if path else ""
    for name in values:
        if name not in fields:
            raise ValueError(
                f"config key {prefix}{name} is unknown: did you mean "
                f"{prefix}{nearest(name, list(fields))}?"
            )
    made = {
        name: _converted(hints[name], value, f"{prefix}{name}") for name, value in values.items()
    }
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"config key {prefix}{name} is missing: give it a value")
    return kind(**made)


def _converted(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    hint = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, path)  # type: ignore[arg-type]
    origin = typing.get_origin(hint) or hint
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is float and number and value == value:
        return float(value)
    if origin is int and number and value == int(value):
        return int(value)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(tuple(x) if isinstance(x, (list, tuple)) else x for x in value)
    if origin in (str, bool) and isinstance(value, origin):
        return value
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    wanted = getattr(origin, "__name__", str(origin))
    raise ValueError(f"config key {path}={value!r} is not of type {wanted}: give it such a value")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section."""
    out = dict(base)
    for name, value in changes.items():
        below = out.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        out[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return out


def changed(section: Any) -> list[str]:
    """Names of the fields of a dataclass whose value is not the default."""
    names = []
    for field in dataclasses.fields(section):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or getattr(section, field.name) != default:
            names.append(field.name)
    return names
