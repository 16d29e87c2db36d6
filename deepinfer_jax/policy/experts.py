"""Expert placement (EPLB): which experts get replicas, and which rank holds which physical slot.

Letters: `L` layers, `E` logical experts, `R` physical slots (replicas included), `G` ranks, `S`
steps of statistics. Slot s lies on rank s // (R / G). Unlike the other policies these are greedy
algorithms over many items, written with `lax.scan` and mapped over layers; they run jitted on the
host too. Loads are float32, ties go to the lowest index, sorts are stable.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.policy.view import Array, namespace

TIE_BREAK = 1e-4
"""Tokens per expert number that the peak-aware policy adds before comparing (released engine)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the replicas of every expert are."""

    physical_to_logical: Array  # int32 [L, R]
    logical_to_physical: Array  # int32 [L, E, R - E + 1] slots of each expert, R where unused
    replicas: Array  # int32 [L, E]


def initial_placement(layers: int, experts: int, slots: int) -> Placement:
    """The placement before any statistics: the experts in order, then from the first again."""
    row = jnp.arange(slots, dtype=jnp.int32) % experts
    return from_slots(jnp.tile(row, (layers, 1)), experts)


@functools.partial(jax.jit, static_argnames="experts")
def from_slots(physical_to_logical: Array, experts: int) -> Placement:
    """A placement from its slots [L, R] alone; replicas are numbered in slot order."""
    same = physical_to_logical[:, :, None] == physical_to_logical[:, None, :]
    number = jnp.sum(jnp.tril(same, -1), axis=2)
    return jax.vmap(functools.partial(_inverted, experts=experts))(physical_to_logical, number)


def _inverted(slots: Array, number: Array, experts: int) -> Placement:
    """A layer's placement from its slots [R] and their replica numbers [R]."""
    size = slots.shape[0]
    table = jnp.full((experts, size - experts + 1), size, jnp.int32)
    table = table.at[slots, number].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    replicas = jnp.zeros(experts, jnp.int32).at[slots].add(1)
    return Placement(slots.astype(jnp.int32), table, replicas)


def _permuted(values: Array, destination: Array) -> Array:
    """`values` [n] moved to their destinations, a permutation. Compiles faster than a sort."""
    return jnp.zeros_like(values).at[destination].set(values)


# Hierarchical and global policy


def rebalance(weight: Array, slots: int, groups: int, nodes: int, ranks: int) -> Placement:
    """Placement by mean load: groups to nodes, replicas within nodes, replicas to ranks.

    Hierarchical when `groups` is a multiple of `nodes`: an expert group stays on one node.
    Otherwise global: replicas over all experts, packed over all ranks (groups = nodes = 1 does so).
    Source: deepseek-ai/EPLB (README and behaviour).

    Args:
      weight: load of each logical expert, [L, E].
      slots: physical slots R, a multiple of `ranks`, at least E.
      groups: expert groups, dividing E.
      nodes: machines, dividing `ranks`.
      ranks: GPUs.

    Raises:
      ValueError: a number does not divide as said.
    """
    if groups % nodes:
        groups = nodes = 1
    experts = weight.shape[1]
    _check_divides("experts", experts, "groups", groups)
    _check_divides("ranks", ranks, "nodes", nodes)
    _check_slots(experts, slots, ranks)
    return _rebalance(jnp.asarray(weight, jnp.float32), slots, groups, nodes, ranks)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _rebalance(weight: Array, slots: int, groups: int, nodes: int, ranks: int) -> Placement:
    return jax.vmap(lambda w: _rebalance_layer(w, slots, groups, nodes, ranks))(weight)


def _rebalance_layer(weight: Array, slots: int, groups: int, nodes: int, ranks: int) -> Placement:
    experts = weight.shape[0]
    node, place = pack(weight.reshape(groups, -1).sum(axis=1), nodes)
    # Experts in node order: by node, by the group's place on it, by number within the group.
    by_node = _permuted(jnp.arange(groups), node * (groups // nodes) + place)
    size = experts // groups
    order = (by_node[:, None] * size + jnp.arange(size)).reshape(nodes, -1)
    local = weight[order]
    chosen, number, count = jax.vmap(lambda w: replicate(w, slots // nodes))(local)
    load = jnp.take_along_axis(local / count, chosen, axis=1)
    rank, position = jax.vmap(lambda w: pack(w, ranks // nodes))(load)
    slot = jnp.arange(nodes)[:, None] * (slots // nodes) + rank * (slots // ranks) + position
    logical = jnp.take_along_axis(order, chosen, axis=1).reshape(-1)
    slot = slot.reshape(-1)
    return _inverted(_permuted(logical, slot), _permuted(number.reshape(-1), slot), experts)


def pack(weight: Array, packs: int) -> tuple[Array, Array]:
    """Items to packs of equal count, heaviest first, each to the lightest pack with room.

    One item per pack: item i goes to pack i, whatever its weight.

    Args:
      weight: [n] float32, n a multiple of `packs`.
      packs: how many.

    Returns:
      (pack of each item [n], its place in the pack [n]).
    """
    items = weight.shape[0]
    if items == packs:
        return jnp.arange(items), jnp.zeros(items, jnp.int32)
    numbers = jnp.arange(packs)

    def put(carry: tuple[Array, Array], item: Array) -> tuple[tuple[Array, Array], tuple]:
        load, count = carry
        chosen = jnp.argmin(jnp.where(count < items // packs, load, jnp.inf))
        here = numbers == chosen
        place = jnp.sum(jnp.where(here, count, 0))
        return (load + jnp.where(here, item, 0), count + here), (chosen, place)

    order = jnp.argsort(-weight, stable=True)
    start = (jnp.zeros(packs, weight.dtype), jnp.zeros(packs, jnp.int32))
    _, (chosen, place) = lax.scan(put, start, weight[order])
    return _permuted(chosen, order), _permuted(place, order)


def replicate(weight: Array, slots: int) -> tuple[Array, Array, Array]:
    """Extra replicas one by one to the expert with the largest load per replica.

    Args:
      weight: [e] float32.
      slots: at least e.

    Returns:
      (expert of each slot [slots], its replica number [slots], replicas per expert [e]); the first
      e slots hold the experts in order.
    """
    experts = weight.shape[0]
    numbers = jnp.arange(experts)

    def add(count: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        chosen = jnp.argmax(weight / count)
        here = numbers == chosen
        return count + here, (chosen, jnp.sum(jnp.where(here, count, 0)))

    count, (chosen, number) = lax.scan(
        add, jnp.ones(experts, jnp.int32), None, length=slots - experts
    )
    first = jnp.zeros(experts, number.dtype)
    return jnp.concatenate([numbers, chosen]), jnp.concatenate([first, number]), count


# Peak-aware policy


@functools.partial(jax.jit, static_argnames=("slots", "ranks"))
def rebalance_peak_aware(tokens: Array, slots: int, ranks: int) -> Placement:
    """Placement that minimises the sum over steps of each step's peak, not the mean load's peak.

    Source: behaviour of the released DeepInfer engine.

    Args:
      tokens: tokens each logical expert received in each step of the window, [S, L, E].
      slots: physical slots R, a multiple of `ranks`, at least E.
      ranks: EP size.

    Raises:
      ValueError: `slots` is too small or not a multiple of `ranks`.
    """
    _check_slots(tokens.shape[2], slots, ranks)
    layer = functools.partial(_peak_layer, slots=slots, ranks=ranks)
    chosen = jax.vmap(layer, in_axes=1)(tokens.astype(jnp.float32))
    return from_slots(chosen, tokens.shape[2])


def _peak_layer(tokens: Array, slots: int, ranks: int) -> Array:
    chosen, count = _replicate_peaks(tokens, slots)
    if slots == ranks:
        return chosen
    rank, place = _pack_peaks((tokens / count)[:, chosen], ranks)
    return _permuted(chosen, rank * (slots // ranks) + place)


def _replicate_peaks(tokens: Array, slots: int) -> tuple[Array, Array]:
    """Each further replica to the expert whose gain lowers the sum of step peaks most. [S, E]."""
    experts = tokens.shape[1]
    numbers = jnp.arange(experts)
    biased = tokens + TIE_BREAK * numbers.astype(tokens.dtype)

    def add(count: Array, _: None) -> tuple[Array, Array]:
        load = biased / count
        top, owner = jnp.max(load, axis=1), jnp.argmax(load, axis=1)
        owns = owner[:, None] == numbers
        runner_up = jnp.max(jnp.where(owns, -jnp.inf, load), axis=1)
        lowered = jnp.max(jnp.where(owns, biased / (count + 1), -jnp.inf), axis=1)
        # Another replica changes a step's peak only for the expert that makes it.
        peak = jnp.where(owns, jnp.maximum(runner_up, lowered)[:, None], top[:, None])
        chosen = jnp.argmin(jnp.sum(peak, axis=0))
        return count + (numbers == chosen), chosen

    count, chosen = lax.scan(add, jnp.ones(experts, jnp.int32), None, length=slots - experts)
    return jnp.concatenate([numbers, chosen]), count


def _pack_peaks(load: Array, ranks: int) -> tuple[Array, Array]:
    """Replicas [S, R], heaviest in total first, to the rank that raises the peaks least."""
    steps, items = load.shape
    numbers = jnp.arange(ranks)

    def put(carry: tuple[Array, Array], item: Array) -> tuple[tuple[Array, Array], tuple]:
        held, count = carry  # [S, ranks], [ranks]
        after = held + item[:, None]
        peak = jnp.max(held, axis=1)
        cost = jnp.sum(jnp.maximum(peak[:, None], after), axis=0)
        chosen = jnp.argmin(jnp.where(count < items // ranks, cost, jnp.inf))
        here = numbers == chosen
        place = jnp.sum(jnp.where(here, count, 0))
        return (jnp.where(here, after, held), count + here), (chosen, place)

    order = jnp.argsort(-jnp.sum(load, axis=0), stable=True)
    start = (jnp.zeros((steps, ranks), load.dtype), jnp.zeros(ranks, jnp.int32))
    _, (chosen, place) = lax.scan(put, start, load.T[order])
    return _permuted(chosen, order), _permuted(place, order)


# Statistics


def logical_tokens(tokens: Array, physical_to_logical: Array, experts: int) -> Array:
    """Tokens per logical expert from tokens per physical slot.

    Args:
      tokens: [..., L, R], for example a window [S, L, R].
      physical_to_logical: [L, R], the placement while they were counted.
      experts: E.

    Returns:
      [..., L, E], the dtype of `tokens`.
    """
    tokens = jnp.asarray(tokens)
    layers = jnp.arange(tokens.shape[-2])[:, None]
    zeros = jnp.zeros((*tokens.shape[:-1], experts), tokens.dtype)
    return zeros.at[..., layers, physical_to_logical].add(tokens)


def rank_loads(weight: Array, placement: Placement, ranks: int) -> Array:
    """Load of each rank when an expert's load [L, E] is split evenly over its replicas: [L, G]."""
    share = weight / placement.replicas
    slots = jnp.take_along_axis(share, placement.physical_to_logical, axis=1)
    return slots.reshape(slots.shape[0], ranks, -1).sum(axis=2)


def mean_of_ratios(loads: Array) -> Array:
    """Balancedness as SGLang has it: the mean over layers of mean / max load. [L, G] -> (0, 1]."""
    xp = namespace(loads)
    top = loads.max(axis=-1)
    return xp.mean(xp.where(top > 0, loads.mean(axis=-1) / xp.where(top > 0, top, 1), 1.0))


def ratio_of_sums(loads: Array) -> Array:
    """Balancedness as vLLM logs it: sum of means / sum of maxima over layers. [..., G] -> (0, 1].

    Its inverse over steps and layers is the released engine's `moe_lb`.
    """
    xp = namespace(loads)
    top = xp.sum(loads.max(axis=-1))
    return xp.where(top > 0, xp.sum(loads.mean(axis=-1)) / xp.where(top > 0, top, 1), 1.0)


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if divisor < 1 or value % divisor:
        raise ValueError(
            f"{name} = {value} is not a multiple of {divisor_name} = {divisor}: "
            f"choose {divisor_name} among the divisors of {value}"
        )


def _check_slots(experts: int, slots: int, ranks: int) -> None:
    _check_divides("slots", slots, "ranks", ranks)
    if slots < experts:
        raise ValueError(
            f"slots = {slots} is below experts = {experts}: every expert needs at least one slot"
        )
