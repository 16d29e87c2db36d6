"""The hierarchical expert placement once more, as plain loops: what jitted code is timed against.

A stand-in for deepseek-ai/EPLB where that file is not at hand, with the same loops over the same
things in numpy: items one by one in Python, replicas one by one over all layers at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rebalance = Callable[[np.ndarray, int, int, int, int], np.ndarray]
"""(load float32 [L, E], slots, groups, nodes, ranks) -> expert of each slot [L, slots]."""


def rebalance(weight: np.ndarray, slots: int, groups: int, nodes: int, ranks: int) -> np.ndarray:
    """Expert of each slot, int64 [L, slots]; arguments as of `policy.experts.rebalance`."""
    if groups % nodes:
        groups = nodes = 1
    layers, experts = weight.shape
    size = experts // groups
    node, place = pack(weight.reshape(layers, groups, size).sum(-1), nodes)
    first = (node * (groups // nodes) + place) * size
    by_node = np.argsort((first[..., None] + np.arange(size)).reshape(layers, experts), axis=1)
    local = np.take_along_axis(weight, by_node, 1).reshape(layers * nodes, experts // nodes)
    chosen, count = replicate(local, slots // nodes)
    load = np.take_along_axis(local / count, chosen, 1)
    rank, position = pack(load, ranks // nodes)
    order = np.argsort(rank * (slots // ranks) + position, axis=1)
    chosen = np.take_along_axis(chosen, order, 1).reshape(layers, nodes, -1)
    chosen = chosen + np.arange(nodes)[:, None] * (experts // nodes)
    return np.take_along_axis(by_node, chosen.reshape(layers, slots), 1)


def pack(weight: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack and place of items [X, n]: heaviest first, to the lightest pack with room."""
    rows, items = weight.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    chosen, place = np.zeros((2, rows, items), np.int64)
    for row in range(rows):
        load, count = [np.float32(0)] * packs, [0] * packs
        for item in order[row]:
            best = min((p for p in range(packs) if count[p] < room), key=load.__getitem__)
            chosen[row, item], place[row, item] = best, count[best]
            load[best] += weight[row, item]
            count[best] += 1
    return chosen, place


def replicate(weight: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert of each slot [X, slots] and replicas [X, e]: more go to the heaviest per replica."""
    rows, experts = weight.shape
    chosen = np.tile(np.arange(slots), (rows, 1))
    count, at = np.ones((rows, experts), np.int32), np.arange(rows)
    for slot in range(experts, slots):
        chosen[:, slot] = (weight / count).argmax(1)
        count[at, chosen[:, slot]] += 1
    return chosen, count.astype(np.float32)
