"""Random prompts that continue each other's, and their segment trie by its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.simulator.workload import Workload


class Dice:
    """Draws of plain Python values."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return int(self.generator.integers(low, high + 1))

    def one_of(self, *choices: Any) -> Any:
        """One of the arguments."""
        return choices[self.between(0, len(choices) - 1)]

    def chance(self, probability: float) -> bool:
        """True with the probability."""
        return bool(self.generator.random() < probability)

    def some(self, probability: float, low: int, high: int, otherwise: Any = 0) -> Any:
        """An integer in [low, high] with the probability, else `otherwise`."""
        return self.between(low, high) if self.chance(probability) else otherwise

    def order(self, items: list[Any]) -> list[Any]:
        """A permutation."""
        return [items[int(i)] for i in self.generator.permutation(len(items))]


@dataclasses.dataclass
class Planned:
    """A request as a chain of block names, and where its segments must end."""

    arrival: int
    input_tokens: int
    output_tokens: int
    chain: tuple[int, ...]  # blocks of prompt and output
    match: int  # blocks
    publish: int
    output: int
    anchor: int  # another place where a segment ends


def random_requests(dice: Dice, block: int, reserve: int) -> list[Planned]:
    """Prompts that continue each other's, in few distinct moments."""
    count = dice.one_of(dice.between(5, 15), dice.between(10, 60))
    horizon = dice.one_of(0, 50, 1_000, 10_000, 50_000, 200_000)
    moments = [dice.between(0, horizon) for _ in range(dice.between(1, count))]
    arrivals = sorted(dice.one_of(*moments) for _ in range(count))
    longest, share = dice.one_of(3, 6, 10) * block, dice.one_of(0.0, 0.6, 0.95)
    most_output = dice.one_of(1, 6, 20, 40)
    repeats_outputs = dice.chance(0.7)
    planned: list[Planned] = []
    name = 0
    for arrival in arrivals:
        old: tuple[int, ...] = ()
        if planned and dice.chance(share):
            before = dice.one_of(*planned)
            old = before.chain[: dice.between(0, len(before.chain))]
        tokens = max(1, min(len(old) * block, 12 * block) + dice.between(0, longest))
        if dice.chance(0.1):
            tokens = max(1, len(old) * block)
        output = dice.between(1, most_output)
        blocks = (tokens + output) // block
        chain = old[:blocks] + tuple(range(name, name + max(0, blocks - len(old))))
        name += blocks
        publish = tokens // block
        ends = blocks if repeats_outputs and dice.chance(0.8) else publish
        match = max(0, tokens - reserve) // block
        cut = min(ends, max(0, tokens + output - reserve) // block)
        anchor = cut if dice.chance(0.6) else ends
        planned.append(Planned(arrival, tokens, output, chain, match, publish, ends, anchor))
    return planned


def workload_of(planned: list[Planned]) -> Workload:
    """Maximal segments: a chain is cut where chains branch and where something ends."""
    ends: set[tuple[int, ...]] = set()
    children: dict[tuple[int, ...], set[int]] = {}
    for p in planned:
        ends |= {p.chain[:n] for n in (p.match, p.publish, p.output, p.anchor)}
        for n in range(max(p.match, p.publish, p.output, p.anchor)):
            children.setdefault(p.chain[:n], set()).add(p.chain[n])
    ends |= {prefix for prefix, following in children.items() if len(following) > 1}
    ends.discard(())
    nodes = [(), *sorted(ends, key=lambda prefix: (len(prefix), prefix))]
    number = {prefix: i for i, prefix in enumerate(nodes)}
    parents = [0]
    for prefix in nodes[1:]:
        above = len(prefix) - 1
        while prefix[:above] not in number:
            above -= 1
        parents.append(number[prefix[:above]])

    def of_requests(values: list[int]) -> Any:
        return np.asarray(values, np.int32)

    return Workload(
        arrival=np.asarray([p.arrival for p in planned], np.int64),
        input_tokens=of_requests([p.input_tokens for p in planned]),
        output_tokens=of_requests([p.output_tokens for p in planned]),
        image_tokens=of_requests([0] * len(planned)),
        match_node=of_requests([number[p.chain[: p.match]] for p in planned]),
        publish_node=of_requests([number[p.chain[: p.publish]] for p in planned]),
        output_node=of_requests([number[p.chain[: p.output]] for p in planned]),
        node_parent=of_requests(parents),
        node_start=of_requests([len(nodes[parent]) for parent in parents]),
        node_end=of_requests([len(prefix) for prefix in nodes]),
    )
