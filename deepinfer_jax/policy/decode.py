"""Decode placement: the documented two-load rule and the policies it is compared with.

A policy is `f(view, request, parameters) -> rank`, or `J` when no rank is eligible. When no
eligible rank has room, the same rule chooses among all eligible ranks and the request waits there.
Ties go to the lowest rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_jax.policy.view import (
    PARTS,
    Array,
    DecodeView,
    PolicyParameters,
    RequestView,
    in_parts,
    masked_argmin,
    namespace,
    nth,
)

DecodePolicy = Callable[[DecodeView, RequestView, PolicyParameters], Array]


def candidates(view: DecodeView) -> Array:
    """Eligible ranks with room, or all eligible ranks when none has. bool [J]."""
    xp = namespace(view.eligible, view.room)
    fitting = view.eligible & view.room
    return xp.where(xp.any(fitting), fitting, view.eligible)


def two_load(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Short requests go to the lowest concurrency, long ones to the smallest total KV.

    Short: context below `short_below` tokens. Source: the chapter, section 11.5.
    """
    xp = namespace(view.requests)
    short = request.context_tokens < parameters.short_below
    return masked_argmin(candidates(view), xp.where(short, view.requests, view.tokens))


def dualpath_z(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """The group with least total tokens; in it the lowest concurrency under Z, else fewest tokens.

    Totals count the group's eligible ranks E; only groups with a candidate rank compete. A rank is
    under Z when its tokens + the request's <= Z = `dualpath_slack` * (request + total) / |E|. With
    concurrency [1, 10], held [100K, 20K] and length 1K, Z is 63.5K and rank 1 is taken.
    Source: DualPath, arXiv 2602.21548, section 4, with one request in the queue.
    """
    xp = namespace(view.tokens)
    allowed = candidates(view)
    total = _group_sum(view.group, xp.where(view.eligible, view.tokens, 0))[view.group]
    ranks = _group_sum(view.group, view.eligible.astype(int))[view.group]
    first = masked_argmin(allowed, total)
    chosen = view.group[xp.minimum(first, view.group.shape[0] - 1)]
    inside = allowed & (view.group == chosen)
    after = view.tokens + request.context_tokens
    mean = in_parts(parameters.dualpath_slack) * (request.context_tokens + total)
    under = inside & (PARTS * ranks * after <= mean)
    level = xp.any(under)
    key = xp.where(level, view.requests, view.tokens)
    return masked_argmin(xp.where(level, under, inside), key)


def _group_sum(group: Array, values: Array) -> Array:
    """Sum of `values` [J] over each group, as [J] indexed by group."""
    if namespace(group, values) is np:
        out = np.zeros_like(values)
        np.add.at(out, group, values)
        return out
    return namespace(group, values).zeros_like(values).at[group].add(values)


def round_robin(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Candidate ranks in turn: the (decisions mod their number)-th."""
    return nth(candidates(view), request.decisions)


def random(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """A candidate rank by the request's draw: the (draw mod their number)-th."""
    return nth(candidates(view), request.draw)


def least_requests(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Fewest assigned requests."""
    return masked_argmin(candidates(view), view.requests)


def least_tokens(view: DecodeView, request: RequestView, parameters: PolicyParameters) -> Array:
    """Fewest KV tokens."""
    return masked_argmin(candidates(view), view.tokens)
