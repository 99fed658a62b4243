"""Differences between JAX versions, and what its tracing state can tell. The only such file."""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src import config
from jax._src.core import ShardingTypeError
from jax._src.pjit import reshard_p
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import batching, mlir, partial_eval


def coordination_client() -> Any:
    """The client of JAX's coordination service; `None` where `jax.distributed` was not started."""
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed  # there is no public way to it

    return distributed.global_state.client


def varying_axes(x) -> frozenset[str]:
    """The mesh axes over which ``x`` is known to vary (empty where JAX does not track that)."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    return aval.manual_axis_type.varying


def half_reduced_axes(x) -> frozenset[str]:
    """The mesh axes over which JAX calls ``x`` "reduced" or "unreduced"."""
    kind = jax.typeof(x).manual_axis_type
    return kind.reduced | kind.unreduced


def is_constant(x) -> bool:
    """Whether ``x`` is a value that was there before any map: no tracer."""
    return not isinstance(x, jax.core.Tracer)


def is_transposed(x) -> bool:
    """Whether ``x`` is traced by `jax.linear_transpose`: what it reaches never runs forward."""
    # The tracer's class is private. No public way was found: a linear function is transposed by
    # partial evaluation, and the types of its arguments are as anywhere else.
    return isinstance(x, partial_eval.JaxprTracer)


def transposes_a_map() -> bool:
    """Whether the innermost `jax.shard_map` runs backwards: `jax.grad` is outside of it.

    JAX does not tell. Its function that transposes a map is on the stack then, nearer than the one
    that runs the user's function.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_SHARD_MAP_FILE):
            return "trans" in frame.f_code.co_name
        frame = frame.f_back
    return False


# JAX reuses what it has traced of an inner `jax.jit`, unless the context of the trace differs. Its
# options are such a context, and there is no public way to make one.
traced_for = config.int_state(
    name="dynamiq_jax_traced_for",
    default=0,
    help="number of the trace of dynamiq_jax.value_and_grad; 0 outside",
    include_in_jit_key=True,
    include_in_trace_context=True,
)
"""``with traced_for(number):`` traces anew what was traced for another number."""

_SHARD_MAP_FILE = os.path.join("jax", "_src", "shard_map.py")


def assume_invarying(x: Array, names: tuple[str, ...]) -> Array:
    """``x``, which has the same bits on all workers; JAX counts it as replicated from here on."""
    axes = varying_axes(x) & set(names)
    return _assume_invarying_p.bind(x, axes=axes) if axes else x


def _less_varying(x, *, axes: frozenset[str]):
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - axes))


# JAX has no operation for this: what permutations have brought counts as varying for ever.
_assume_invarying_p = Primitive("assume_invarying")
_assume_invarying_p.def_abstract_eval(_less_varying)
_assume_invarying_p.def_impl(lambda x, **_: x)
batching.defvectorized(_assume_invarying_p)
mlir.register_lowering(_assume_invarying_p, lambda ctx, x, **_: [x])


def zero_tangent(x: Array) -> Array | np.ndarray:
    """The tangent of a constant: zeros, of dtype float0 for integers."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


_inline = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)  # before JAX had it: True
inlined = functools.partial(jax.jit, inline=_inline)
"""`jax.jit` of which nothing is left within another: one program for operations called eagerly."""


def vmapped(name: str) -> bool:
    """Whether the axis is `jax.vmap`'s (its tracers have a dim), outside of `jax.jit`."""
    # A batch tracer's slot is private. No public way was found: an axis has a name and a size
    # whichever map it belongs to, and batching rules are asked only after a collective is bound.
    return hasattr(lax.axis_index(name), "batch_dim")


def with_constants(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, and the values of its ``constvars``: JAX 0.11 made one class of two."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError, ShardingTypeError)
"""Errors that JAX raises where it has no rule for an array's type; others are mistakes."""

reshard_primitive = reshard_p
"""The primitive of `jax.reshard`, which has no public name."""


def linear_program(back: Any) -> Jaxpr:
    """The linear program that `jax.vjp` transposes; its last inputs are the primals' tangents."""
    return with_constants(back.jaxpr)[0]


def name_of(equation: JaxprEqn) -> str:
    """The name of an equation's primitive; JAX 0.12 has ``vjp_node[...]`` around linear ones."""
    return equation.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def inner_jaxprs(equation: JaxprEqn) -> list[Any]:
    """The jaxprs in an equation's parameters: of calls, loops and branches."""
    kinds = Jaxpr, ClosedJaxpr
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds))
    return [value for value in values if isinstance(value, kinds)]


@functools.cache
def _empty_jaxpr() -> Jaxpr:
    """A jaxpr to be filled: there is no public way to make the debug information of one."""
    return with_constants(jax.make_jaxpr(lambda: ())())[0]


def evaluate(equation: JaxprEqn, *args: Any) -> Sequence[Any]:
    """The results of one equation for these operands: JAX runs a jaxpr of it alone."""
    given = {v: x for v, x in zip(equation.invars, args, strict=True) if not isinstance(v, Literal)}
    alone = _empty_jaxpr().replace(
        invars=list(given),
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return jax.core.eval_jaxpr(alone, (), *given.values())
