"""Loops and branches whose carry XLA:CPU updates in place.

XLA decides before it schedules whether an update may overwrite its operand, and so it only trusts data
dependencies: an array is copied, whole, when something that reads its old value does not provably
run before the write, when a nested loop reads it without writing it, and when it passes through a
conditional. With arrays of a million requests one such copy per event costs more than the simulation.
So a branch is a loop of at most one turn, and each loop body is rewritten: every write of a large
array is made to depend on all earlier reads of that array, and an array that is read after its last
write gets its last element written onto itself. The values do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, primitives

Array = Any

LARGE = 64
"""Smaller arrays may be copied: that costs less than keeping them in place."""


def _is_large(atom: Any) -> bool:
    return not isinstance(atom, Literal) and atom.aval.ndim > 0 and atom.aval.size >= LARGE


class _Reads:
    """Results of the reads of each large array since its last write."""

    def __init__(self, zero: Array) -> None:
        self._zero = zero
        self._pending: dict[Any, list[Array]] = {}

    def note(self, atom: Any, result: Array) -> None:
        self._pending.setdefault(atom, []).append(result)

    def waiting(self, atom: Any) -> bool:
        return bool(self._pending.get(atom))

    def take(self, atoms: list[Any]) -> Array | None:
        """An int32 0 that depends on all pending reads of `atoms`; None if there are none."""
        results = [r for atom in atoms for r in self._pending.pop(atom, ())]
        if not results:
            return None
        firsts = [
            lax.convert_element_type(lax.reshape(r, (r.size,))[0], jnp.int32) for r in results
        ]
        total = firsts[0]
        for first in firsts[1:]:
            total = lax.max(total, first)  # not ^: two equal reads would cancel out
        return lax.min(self._zero.astype(jnp.int32), lax.abs(total))


def _tie(value: Array, nought: Array) -> Array:
    """`value`, after `nought`."""
    if value.dtype == jnp.bool_:
        return value ^ (nought != 0)
    return value + lax.convert_element_type(nought, value.dtype)


def _carried(equation: Any) -> list[int]:
    """Positions of the operands that an equation may overwrite."""
    if equation.primitive is primitives.dynamic_update_slice_p:
        return [0]
    if equation.primitive is primitives.while_p:
        return list(
            range(
                equation.params["cond_nconsts"] + equation.params["body_nconsts"],
                len(equation.invars),
            )
        )
    return []


def _order(equation: Any, operands: list[Array], reads: _Reads) -> None:
    """Makes a write wait for the reads of what it overwrites, through one of its small operands."""
    carried = _carried(equation)
    nought = reads.take([equation.invars[i] for i in carried if _is_large(equation.invars[i])])
    if nought is None:
        return
    if equation.primitive is primitives.dynamic_update_slice_p:
        operands[1] = _tie(operands[1], nought)
        return
    scalars = [i for i in carried if jnp.ndim(operands[i]) == 0]
    operands[scalars[0]] = _tie(jnp.asarray(operands[scalars[0]]), nought)


def _evaluate(closed: ClosedJaxpr, arguments: list[Array], zero: Array) -> list[Array]:
    """Runs a jaxpr with its writes ordered after the reads of what they overwrite."""
    jaxpr = closed.jaxpr
    values: dict[Any, Array] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    reads = _Reads(zero)

    def value(atom: Any) -> Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        _order(equation, operands, reads)
        with equation.ctx.manager:
            results = equation.primitive.bind(
                *operands, **equation.primitive.get_bind_params(equation.params)
            )
        results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
        carried = _carried(equation)
        for i, atom in enumerate(equation.invars):
            if _is_large(atom) and i not in carried:
                reads.note(atom, results[0])
    return [_settle(atom, value(atom), reads) for atom in jaxpr.outvars]


def _settle(atom: Any, array: Array, reads: _Reads) -> Array:
    """An output array, after the reads that followed its last write."""
    if not (_is_large(atom) and reads.waiting(atom)):
        return array
    nought = reads.take([atom])
    assert nought is not None
    last = [n - 1 for n in array.shape]
    element = lax.dynamic_slice(array, last, [1] * array.ndim)
    return lax.dynamic_update_slice(array, _tie(element, nought), last)


def while_loop(
    condition: Callable[[Any], Array], body: Callable[[Any], Any], init: Any, zero: Array
) -> Any:
    """`lax.while_loop` whose large arrays stay in place.

    Args:
      condition, body, init: as for `lax.while_loop`; the carry must have a scalar.
      zero: an integer 0 that the compiler cannot know to be 0.
    """
    leaves, tree = jax.tree.flatten(init)
    leaves = [jnp.asarray(x) for x in leaves]
    step = jax.make_jaxpr(lambda *x: jax.tree.leaves(body(jax.tree.unflatten(tree, x))))(*leaves)
    ask = jax.make_jaxpr(lambda *x: condition(jax.tree.unflatten(tree, x)))(*leaves)
    touched = _touched(step.jaxpr) | _touched(ask.jaxpr, outputs=False)
    active = [i for i in range(len(leaves)) if i in touched]

    def whole(carry: list[Array]) -> list[Array]:
        full = list(leaves)
        for i, x in zip(active, carry, strict=True):
            full[i] = x
        return full

    def turn(carry: list[Array]) -> list[Array]:
        after = _evaluate(step, whole(carry), zero)
        return [after[i] for i in active]

    done = lax.while_loop(
        lambda carry: jaxpr_as_fun(ask)(*whole(carry))[0], turn, [leaves[i] for i in active]
    )
    return jax.tree.unflatten(tree, whole(done))


def _touched(jaxpr: Any, outputs: bool = True) -> set[int]:
    """Positions of inputs that are read, or whose output differs from them."""
    inputs = {variable: i for i, variable in enumerate(jaxpr.invars)}
    used = {
        inputs[v]
        for e in jaxpr.eqns
        for v in e.invars
        if not isinstance(v, Literal) and v in inputs
    }
    if not outputs:
        return used
    moved = {i for i, v in enumerate(jaxpr.outvars) if v is not jaxpr.invars[i]}
    sources = [jaxpr.outvars[i] for i in moved]
    return used | moved | {inputs[v] for v in sources if not isinstance(v, Literal) and v in inputs}


def fori_loop(upper: int, body: Callable[[Array, Any], Any], init: Any, zero: Array) -> Any:
    """`lax.fori_loop` from 0 whose large arrays stay in place."""
    _, result = while_loop(
        lambda carry: carry[0] < upper,
        lambda carry: (carry[0] + 1, body(*carry)),
        (jnp.int32(0), init),
        zero,
    )
    return result


def when(predicate: Array, then: Callable[[Any], Any], state: Any, zero: Array) -> Any:
    """`then(state)` where `predicate` holds, else `state`."""
    once = (jnp.asarray(predicate, bool), state)
    return while_loop(lambda x: x[0], lambda x: (jnp.asarray(False), then(x[1])), once, zero)[1]


def either(
    predicate: Array,
    then: Callable[[Any], Any],
    otherwise: Callable[[Any], Any],
    state: Any,
    zero: Array,
) -> Any:
    """`then(state)` where `predicate` holds, else `otherwise(state)`."""
    return when(~predicate, otherwise, when(predicate, then, state, zero), zero)
