"""Placement policies by name, or by `package.module:function` for one's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from deepinfer_jax.policy import decode, prefill

POLICIES: dict[str, dict[str, Callable[..., Any]]] = {
    "prefill": {
        function.__name__: function
        for function in (
            prefill.pull,
            prefill.least_quota,
            prefill.round_robin,
            prefill.random,
            prefill.least_loaded,
            prefill.least_tokens,
            prefill.local_affinity,
            prefill.affinity_with_recompute,
            prefill.cache_aware,
            prefill.dynamo_cost,
            prefill.mooncake,
            prefill.dualpath,
        )
    },
    "decode": {
        function.__name__: function
        for function in (
            decode.two_load,
            decode.dualpath_z,
            decode.round_robin,
            decode.random,
            decode.least_requests,
            decode.least_tokens,
        )
    },
}


def names(kind: str) -> tuple[str, ...]:
    """Registered names of a kind (`prefill` or `decode`), in the order of the tables.

    Raises:
      ValueError: the kind is unknown.
    """
    if kind not in POLICIES:
        raise ValueError(f"policy kind {kind!r} is unknown: use one of {', '.join(POLICIES)}")
    return tuple(POLICIES[kind])


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """The policy of a kind by its registered name or as `package.module:function`.

    Raises:
      ValueError: no such kind, name, module or function; the message proposes the nearest name.
    """
    known = names(kind)
    if ":" in name:
        return _imported(name)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{kind} policy {name!r} is unknown: did you mean {near!r}? Known: {', '.join(known)}; "
            "your own goes as 'package.module:function'"
        )
    return POLICIES[kind][name]


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"policy {path!r} cannot be imported ({error}): give 'package.module:function' "
            "of a module on the import path"
        ) from error
    if not callable(function):
        raise ValueError(
            f"policy {path!r} is not callable: name a function(view, request, parameters)"
        )
    return function
