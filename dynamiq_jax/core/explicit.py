"""JAX's unstable parts that only Explicit axes need, see `core.compat`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.compat import (
    aside,
    name_of,
    one_worker,
    private,
    trace_number,
    tried,
    unknown,
    with_constants,
)


def _knows_contexts() -> bool:
    """Whether JAX traces an inner `jax.jit` once for each number."""
    found = []
    inner = jax.jit(lambda x: (found.append(trace_number.value), 2 * x)[1])
    for number in (1, 2, 1):
        with trace_number(number):
            jax.make_jaxpr(lambda x: inner(x))(jax.ShapeDtypeStruct((), jnp.float32))
    return found == [1, 2]


class _TracedFor:
    """``with traced_for(number):`` traces anew what was traced for another number."""

    @property
    def value(self) -> int:
        """The number of the trace around."""
        return trace_number.value

    __call__ = staticmethod(tried("the contexts of its traces", _knows_contexts)(trace_number))


traced_for = _TracedFor()


_EXPLICIT = AbstractMesh((2,), ("worker",), axis_types=(AxisType.Explicit,))


def _typed(spec: P) -> jax.ShapeDtypeStruct:
    """A matrix of 2 x 2 on the mesh of examples."""
    return jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=NamedSharding(_EXPLICIT, spec))


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Errors that JAX raises where it has no rule for an array's type; others are mistakes.

    One of them has no public name: JAX raises it for a sum of arrays that are split differently.
    """
    operands = _typed(P("worker")), _typed(P(None, "worker"))
    try:
        aside(lambda: jax.eval_shape(jnp.add, *operands))
    except Exception as error:
        if "shard" in str(error):
            return TypeError, ValueError, NotImplementedError, AssertionError, type(error)
    raise RuntimeError(unknown("sums of arrays on Explicit axes that are split differently"))


@functools.cache
def unrolls_typed() -> bool:
    """Whether JAX unrolls a loop of typed rows in part, for which it joins dimensions of them."""
    whole = NamedSharding(_EXPLICIT, P(unreduced=frozenset({"worker"})))
    rows = jax.ShapeDtypeStruct((2, 2, 2), jnp.float32, sharding=whole)
    try:
        aside(lambda: jax.eval_shape(lambda x: lax.reshape(x, (4, 2)), rows))
    except ValueError:
        return False
    return True


def check_partitioner() -> None:
    """Refuses XLA's former partitioner, which does not know values that are not summed yet.

    Raises:
      ValueError: `jax_use_shardy_partitioner` is off.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise ValueError(
            "jax_use_shardy_partitioner is False, and compression on Explicit axes needs Shardy: "
            "only it leaves gradients unreduced. Leave the option at its default, True; or take a "
            "mesh of Auto axes, as dq.make_mesh(..., axis_types=(AxisType.Auto,) * n)"
        )


def _knows_vjp() -> bool:
    """Whether `linear_program` of a map is an equation whose name `name_of` knows."""
    found = []

    def run(x: Array) -> Array:
        value, pullback = jax.vjp(one_worker(lambda x: 2 * x), x)
        back: Any = pullback  # its program is private
        found.extend(map(name_of, with_constants(back.jaxpr)[0].eqns))
        return value

    jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), jnp.float32))
    return found == ["shard_map"]


@tried("the linear program of jax.vjp", _knows_vjp)
def linear_program(back: Any) -> Jaxpr:
    """The linear program that `jax.vjp` transposes; its last inputs are the primals' tangents."""
    with private("the linear program of jax.vjp"):
        return with_constants(back.jaxpr)[0]
