"""Programs that treat the rows of a stack alike, run on other numbers of rows.

Every value is an array whose dimension ``row`` counts rows, or an array that no row has changed.
A program treats rows alike if every equation is one of the rules below.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.extend.core import JaxprEqn

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import constant_of, evaluate, inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.constraints import run_equation
from dynamiq_jax.jaxprs.primitives import CALLS, ELEMENTWISE
from dynamiq_jax.jaxprs.walk import interpret, scan_parts


class _Value(NamedTuple):
    data: Array
    row: int | None = None


class _OtherError(Exception):
    """An equation treats rows unlike each other, or has no rule here."""


class _Types(NamedTuple):
    """How values are typed."""

    cast: Callable[[Any], Any]
    """Gives a value the type of all others."""
    evaluate: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
    """The results of an equation for operands of this type."""


def run(program: Any, stacks: Sequence[Array], shared: Sequence[Array], axis: Axis) -> list[Array]:
    """The results of a program for stacks of any number of rows, inside of a map.

    Args:
      program: a program that `treats_alike` the rows of its first arguments.
      stacks: these arguments; their first dimension counts rows.
      shared: the other arguments.
      axis: the axis of the map; all values are typed as varying over it.
    """
    here = lambda equation, data: run_equation(equation, axis, data)
    types = _Types(axis.to_varying, here)
    return [value.data for value in _run(program, _values(stacks, shared), types)]


def treats_alike(program: Any, count: int) -> bool:
    """Whether a program treats the rows of its first ``count`` arguments alike.

    Rows of an argument are along its first dimension, and those of a result, too.
    """
    types: list[Any] = [v.aval for v in with_constants(program)[0].invars]
    found: list[_Value] = []

    def trace(*args: Any) -> None:
        types = _Types(lambda x: x, lambda equation, data: evaluate(equation, *data))
        found.extend(_run(program, _values(args[:count], args[count:]), types))

    try:
        jax.eval_shape(trace, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types))
    except _OtherError:
        return False
    return all(value.row == 0 for value in found)


def _values(stacks: Sequence[Array], shared: Sequence[Array]) -> list[_Value]:
    return [*(_Value(x, 0) for x in stacks), *map(_Value, shared)]


def _run(program: Any, args: Sequence[_Value], types: _Types) -> list[_Value]:
    return interpret(
        program,
        [_Value(types.cast(x.data), x.row) for x in args],
        lambda equation, operands: _results(equation, operands, types),
        literal=lambda atom: _Value(types.cast(constant_of(atom))),
        constant=lambda x: _Value(types.cast(x)),
    )


def _results(equation: JaxprEqn, operands: list[_Value], types: _Types) -> list[_Value]:
    name, data = name_of(equation), [x.data for x in operands]
    if name in CALLS and (programs := inner_jaxprs(equation)):
        return _run(programs[0], operands, types)
    if all(x.row is None for x in operands):
        return [_Value(types.cast(x)) for x in types.evaluate(equation, data)]
    if name == "scan":
        return _scan(equation, operands, types)
    if name in ELEMENTWISE:
        return [_Value(_bound(equation, data), _common(operands))]
    if name.startswith("reduce_") and "axes" in equation.params:
        (row,) = [x.row for x in operands]
        return [_Value(_bound(equation, data), _without(row, equation.params["axes"]))]
    rule = RULES.get(name)
    if rule is None:
        raise _OtherError(name)
    return [rule(equation, operands)]


def _bound(equation: JaxprEqn, data: Sequence[Array]) -> Array:
    return equation.primitive.bind(*data, **equation.params)


def _common(operands: list[_Value]) -> int | None:
    """The row that all operands but scalars have."""
    rows = {x.row for x in operands if x.data.ndim}
    # As of a row and a value for all rows, whose shape has the traced number of rows.
    if len(rows) > 1:
        raise _OtherError("elementwise")
    return rows.pop()


def _without(row: int | None, axes: Sequence[int]) -> int:
    """The place of ``row`` without the dimensions ``axes``."""
    if row is None or row in axes:
        raise _OtherError("reduced")
    return row - sum(axis < row for axis in axes)


def _transpose(equation: JaxprEqn, operands: list[_Value]) -> _Value:
    order = equation.params["permutation"]
    (x,) = operands
    return _Value(lax.transpose(x.data, order), order.index(x.row))


def _squeeze(equation: JaxprEqn, operands: list[_Value]) -> _Value:
    axes = equation.params["dimensions"]
    (x,) = operands
    return _Value(lax.squeeze(x.data, axes), _without(x.row, axes))


def _broadcast(equation: JaxprEqn, operands: list[_Value]) -> _Value:
    x, *others = operands
    places, shape = equation.params["broadcast_dimensions"], list(equation.params["shape"])
    if others or x.row is None:
        raise _OtherError("broadcast_in_dim")
    row = places[x.row]
    if shape[row] != _length(equation, x):
        raise _OtherError("broadcast_in_dim")
    shape[row] = x.data.shape[x.row]
    return _Value(lax.broadcast_in_dim(x.data, shape, places), row)


def _reshape(equation: JaxprEqn, operands: list[_Value]) -> _Value:
    x, *others = operands
    if others or x.row is None or equation.params["dimensions"] is not None:
        raise _OtherError("reshape")
    shape = list(equation.params["new_sizes"])
    # Rows stay rows if as many entries are before them as there were, in blocks of the same number.
    before = math.prod(equation.invars[0].aval.shape[: x.row])  # type: ignore[attr-defined]
    length = _length(equation, x)
    places = (d for d, k in enumerate(shape) if math.prod(shape[:d]) == before and k == length)
    if (row := next(places, None)) is None:
        raise _OtherError("reshape")
    shape[row] = x.data.shape[x.row]
    return _Value(lax.reshape(x.data, shape), row)


def _length(equation: JaxprEqn, x: _Value) -> int:
    """The number of rows that an equation was traced for."""
    return equation.invars[0].aval.shape[x.row]  # type: ignore[attr-defined]


def _dot(equation: JaxprEqn, operands: list[_Value]) -> _Value:
    (contracted, batched) = equation.params["dimension_numbers"]
    free = [
        [d for d in range(x.data.ndim) if d not in (*own, *batch)]
        for x, own, batch in zip(operands, contracted, batched, strict=True)
    ]
    left, right = (x.row for x in operands)
    n_batch = len(batched[0])
    if left is not None and right is not None:
        pairs = list(zip(*batched, strict=True))
        # Rows of both operands must meet one to one.
        if (left, right) not in pairs:
            raise _OtherError("dot_general")
        row = pairs.index((left, right))
    elif left in free[0]:
        # The result's dimensions: batches, the free ones of the left operand, those of the right
        # one.
        row = n_batch + free[0].index(left)
    elif right in free[1]:
        row = n_batch + len(free[0]) + free[1].index(right)
    else:
        raise _OtherError("dot_general")
    return _Value(_bound(equation, [x.data for x in operands]), row)


RULES = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dot_general": _dot,
}


def _scan(equation: JaxprEqn, operands: list[_Value], types: _Types) -> list[_Value]:
    parts, (body,) = scan_parts(equation), inner_jaxprs(equation)
    last = parts.constants + parts.carried
    constants, carry, over = (
        operands[: parts.constants],
        operands[parts.constants : last],
        operands[last:],
    )
    # A scan over rows treats them one after the other.
    if any(x.row == 0 for x in over):
        raise _OtherError("scan")
    told: list[int | None] = []

    def step(carried: list[Array], taken: list[Array]) -> tuple[list[Array], list[Array]]:
        now = [_Value(x, like.row) for x, like in zip(carried, carry, strict=True)]
        # The scan takes the first dimension away.
        rows = (None if like.row is None else like.row - 1 for like in over)
        own = [_Value(x, row) for x, row in zip(taken, rows, strict=True)]
        made = _run(body, [*constants, *now, *own], types)
        # The next turn would find rows along another dimension.
        if [x.row for x in made[: len(carry)]] != [x.row for x in carry]:
            raise _OtherError("scan")
        told[:] = [None if x.row is None else x.row + 1 for x in made[len(carry) :]]
        values = [x.data for x in made]
        return values[: len(carry)], values[len(carry) :]

    params = equation.params
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    ended, made = lax.scan(step, [x.data for x in carry], [x.data for x in over], **options)
    rows = [*(x.row for x in carry), *told]
    return list(map(_Value, [*ended, *made], rows))
