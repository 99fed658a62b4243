"""Values that follow from parameters alone, on Explicit meshes: a derivative for any operation.

A value that is typed as reduced is the same on every device. Its gradient is unreduced: every
device holds a term of it. An operation on parameters alone, as in weight norm, has a derivative
that is linear in the gradient. So each device may apply it to its own term, and the terms of the
result are those of the parameter's gradient. JAX has no such rule for most operations. Here the
terms become the rows of an array that the data axes split, and the derivative is vmapped over them.
No device sends anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import (
    constant_of,
    evaluate,
    evaluate_here,
    inner_jaxprs,
    name_of,
    varying_axes,
)
from dynamiq_jax.jaxprs.primitives import CASTS, JITS, OWN_DERIVATIVE, collective_of
from dynamiq_jax.jaxprs.walk import interpret, within
from dynamiq_jax.tree.leaves import axes_of


def has_own_derivative(equation: JaxprEqn) -> bool:
    """Whether users may have written the derivative of an equation, or of one inside of it."""
    return any(own.effects or name_of(own).startswith(OWN_DERIVATIVE) for own in within(equation))


def is_inexact(x: Any) -> bool:
    """Whether an array, or a variable of a jaxpr, has gradients."""
    return jnp.issubdtype(getattr(x, "aval", x).dtype, jnp.inexact)


def untyped(x: Any) -> Any:
    """``x``, typed as neither reduced nor unreduced."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec.reduced:
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, P(*sharding.spec.partitions)))


def keeps_terms(run: Callable[..., Sequence[Any]], typed: Sequence[Array]) -> bool:
    """Whether the gradients of typed operands of ``run`` are unreduced, over the same axes.

    Traces ``run`` and its derivative. Raises JAX's error where JAX has no rule.
    """

    def back(*typed: Array) -> Any:
        results = lambda *typed: [untyped(x) for x in run(*typed) if is_inexact(x)]
        found, pullback = jax.vjp(results, *typed)
        return pullback([0 * x for x in found])

    gradients = jax.eval_shape(back, *typed)
    return all(
        own.sharding.spec.unreduced == jax.typeof(x).sharding.spec.reduced
        for own, x in zip(gradients, typed, strict=True)
    )


def derive(
    equation: JaxprEqn, operands: Sequence[Any], places: Sequence[int], *own: Array
) -> list[Any]:
    """The results of an equation, typed as reduced as some of its operands are.

    Args:
      equation: one of which `has_own_derivative` is `False`.
      operands: its operands; those at ``places`` count for nothing.
      places: the numbers of operands that have derivatives.
      own: these. One at least is typed as reduced. Gradients of others are summed, by JAX.

    Returns:
      The results; those without gradients, such as integers, are not typed.
    """
    sharding = next(s for s in (jax.typeof(x).sharding for x in own) if s.spec.reduced)
    mesh, reduced = sharding.mesh, sharding.spec.reduced
    axes = _in_order(sharding)
    moves = [is_inexact(x) for x in equation.outvars]
    is_typed = [bool(jax.typeof(x).sharding.spec.reduced) for x in own]

    def plainly(*values: Array) -> list[Any]:
        given = dict(zip(places, values, strict=True))
        return list(evaluate(equation, *(given.get(i, x) for i, x in enumerate(operands))))

    def moving(*values: Array) -> list[Array]:
        return [x for x, m in zip(plainly(*values), moves, strict=True) if m]

    def forward(*own: Array) -> tuple[list[Array], tuple[Array, ...]]:
        plain = tuple(map(untyped, own))
        found = moving(*plain)
        return [_put(mesh, x, P(*_split(x), reduced=reduced)) for x in found], plain

    def backward(plain: tuple[Array, ...], gradients: list[Array]) -> tuple[Array, ...]:
        def rows(x: Array) -> Array:
            return _rows(mesh, axes, x, P(*_split(x), unreduced=reduced))

        def terms(x: Array, like: Array, typed: bool) -> Array:
            if not typed:
                return _put(mesh, jnp.sum(x, 0), P(*_split(like)))
            return _terms(mesh, axes, x, like)

        found = jax.vmap(jax.vjp(moving, *plain)[1])(list(map(rows, gradients)))
        return tuple(map(terms, found, plain, is_typed))

    typed_results = jax.custom_vjp(lambda *own: forward(*own)[0])
    typed_results.defvjp(forward, backward)
    found = iter(typed_results(*own) if any(moves) else ())
    if all(moves):
        return list(found)
    # Integers and the like come from values without derivatives.
    fixed = plainly(*(lax.stop_gradient(untyped(lax.stop_gradient(x))) for x in own))
    return [next(found) if m else x for m, x in zip(moves, fixed, strict=True)]


def map_rows(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """The results of a `jax.shard_map` for typed operands; `None` if it has none that it sums.

    A map gets what is the same on all devices whole, and its derivative sums the gradients of all
    devices. Here such an operand goes in as the rows of an array, one on each device. So the
    derivative leaves each device its term.
    """
    params = equation.params
    manual = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    names, specs = frozenset(params[manual]), list(params["in_specs"])
    shardings = [jax.typeof(x).sharding for x in operands]
    typed = {i: _in_order(s) for i, s in enumerate(shardings) if s.spec.reduced}
    if any(not {*axes} <= names - axes_of(specs[i]) for i, axes in typed.items()):
        return None
    given = list(operands)
    for i, axes in typed.items():
        given[i] = _rows_of_copies(shardings[i].mesh, axes, operands[i])
        specs[i] = P(axes, *specs[i])

    def inner(*xs: Any) -> tuple[Any, ...]:
        own = [x[0] if i in typed else x for i, x in enumerate(xs)]
        run = _more_varying if params["check_vma"] else _plainly
        return tuple(run(params["jaxpr"], own))

    options = {key: params[key] for key in ("out_specs", "check_vma")}
    mesh = shardings[next(iter(typed))].mesh
    return jax.shard_map(inner, mesh=mesh, in_specs=tuple(specs), axis_names=names, **options)(
        *given
    )


def _plainly(program: Any, args: Sequence[Any]) -> list[Any]:
    rule = lambda equation, operands: evaluate(equation, *operands)
    return interpret(program, args, rule, literal=constant_of, constant=jnp.asarray)


def _more_varying(program: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a map's program for operands that vary over more axes than it was traced for.

    JAX raises an error if they meet a loop or a branch, whose program has types of its own.

    Raises:
      NotImplementedError: they meet a derivative that users wrote for the sum of all terms.
    """

    def rule(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = name_of(equation)
        pairs = zip(operands, equation.invars, strict=True)
        if has_own_derivative(equation) and any(
            varying_axes(x) - varying_axes(v.aval) for x, v in pairs
        ):
            raise NotImplementedError(f"terms in {name}")
        if name in CASTS:
            return Axis(equation.params["axes"]).to_varying(operands)
        if name in JITS:
            return _more_varying(inner_jaxprs(equation)[0], operands)
        if collective_of(name) is None:
            names = frozenset().union(*map(varying_axes, operands))
            operands = Axis(tuple(names)).to_varying(operands) if names else operands
        return evaluate_here(equation, operands, lambda program: program)

    return interpret(program, args, rule, literal=constant_of, constant=jnp.asarray)


def _rows_of_copies(mesh: Any, axes: tuple[str, ...], x: Array) -> Array:
    """The copies of a typed value as rows that data axes split; their gradients are its terms."""

    def forward(x: Array) -> tuple[Array, Array]:
        plain = untyped(x)
        return _rows(mesh, axes, plain, P(*_split(plain))), plain

    def backward(plain: Array, gradient: Array) -> tuple[Array]:
        return (_terms(mesh, axes, gradient, plain),)

    rows = jax.custom_vjp(lambda x: forward(x)[0])
    rows.defvjp(forward, backward)
    return rows(x)


def _rows(mesh: Any, axes: tuple[str, ...], x: Array, spec: P) -> Array:
    """Rows that ``axes`` split: each is what a device has of ``x``."""
    into: dict[str, Any] = {"in_specs": spec, "out_specs": P(axes, *spec.partitions)}
    run = jax.shard_map(lambda own: own[None], mesh=mesh, check_vma=False, **into)
    return run(_put(mesh, x, spec))


def _terms(mesh: Any, axes: tuple[str, ...], rows: Array, like: Array) -> Array:
    """The unreduced value, split as ``like`` is, of which each device has a term: its row."""
    spec = P(axes, *_split(like))
    into: dict[str, Any] = {
        "in_specs": spec,
        "out_specs": P(*_split(like), unreduced=frozenset(axes)),
    }
    run = jax.shard_map(lambda row: row[0], mesh=mesh, check_vma=False, **into)
    return run(_put(mesh, rows, spec))


def _put(mesh: Any, x: Array, spec: P) -> Array:
    return jax.reshard(x, NamedSharding(mesh, spec))


def _in_order(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of terms, in the mesh's order: which device's term is which row does not matter."""
    return tuple(name for name in sharding.mesh.axis_names if name in sharding.spec.reduced)


def _split(x: Any) -> tuple[Any, ...]:
    """The entries of a value's spec, one for each dimension that the type names."""
    return tuple(jax.typeof(x).sharding.spec.partitions)
