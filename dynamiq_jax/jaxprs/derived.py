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

from dynamiq_jax.core.compat import evaluate, name_of
from dynamiq_jax.jaxprs.primitives import OWN_DERIVATIVE
from dynamiq_jax.jaxprs.walk import within


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
    # The axes of terms, in the mesh's order: which device's term is which row does not matter.
    axes = tuple(name for name in mesh.axis_names if name in reduced)
    moves = [is_inexact(x) for x in equation.outvars]
    is_typed = [bool(jax.typeof(x).sharding.spec.reduced) for x in own]

    def plainly(*values: Array) -> list[Any]:
        given = dict(zip(places, values, strict=True))
        return list(evaluate(equation, *(given.get(i, x) for i, x in enumerate(operands))))

    def moving(*values: Array) -> list[Array]:
        return [x for x, m in zip(plainly(*values), moves, strict=True) if m]

    def put(x: Array, spec: P) -> Array:
        return jax.reshard(x, NamedSharding(mesh, spec))

    def forward(*own: Array) -> tuple[list[Array], tuple[Array, ...]]:
        plain = tuple(map(untyped, own))
        found = moving(*plain)
        return [put(x, P(*_split(x), reduced=reduced)) for x in found], plain

    def backward(plain: tuple[Array, ...], gradients: list[Array]) -> tuple[Array, ...]:
        options = {"mesh": mesh, "check_vma": False}

        def rows(x: Array) -> Array:
            spec = P(*_split(x), unreduced=reduced)
            into = {"in_specs": spec, "out_specs": P(axes, *_split(x))}
            return jax.shard_map(lambda term: term[None], **into, **options)(put(x, spec))

        def terms(x: Array, like: Array, typed: bool) -> Array:
            if not typed:
                return put(jnp.sum(x, 0), P(*_split(like)))
            spec = P(axes, *_split(like))
            into = {"in_specs": spec, "out_specs": P(*_split(like), unreduced=reduced)}
            return jax.shard_map(lambda row: row[0], **into, **options)(put(x, spec))

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


def _split(x: Any) -> tuple[Any, ...]:
    """The entries of a value's spec, one for each dimension that the type names."""
    return tuple(jax.typeof(x).sharding.spec.partitions)
