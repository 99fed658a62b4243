"""Differences between JAX versions, and what its tracing state can tell. The only such file."""

import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import batching, mlir, partial_eval


class _Inline:
    """`jax.Inline` before JAX had it."""

    JAX_EARLY = True


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Groups of an axis's workers, each of which is an axis of its own: ``axis_index_groups``."""

    names: str | tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    """Of equal size; every worker is in one."""

    def gathered(self) -> dict:
        """Arguments of `jax.lax`'s collectives."""
        return {"axis_name": self.names, "axis_index_groups": self.groups}


AxisNames = str | tuple[str, ...] | Groups
"""One mapped axis, or several that count as one: workers are numbered in row-major order.

Or groups of workers, which users pass as ``axis_index_groups``: then every function here means the
workers of one group, numbered as the group lists them.
"""


def axis_tuple(axis_name: AxisNames) -> tuple[str, ...]:
    """The names as a tuple."""
    if isinstance(axis_name, Groups):
        axis_name = axis_name.names
    return (axis_name,) if isinstance(axis_name, str) else axis_name


def coordination_client() -> Any:
    """What talks to JAX's coordination service; `None` where `jax.distributed` was not started."""
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed  # there is no public way to it

    return distributed.global_state.client


def varying_axes(x) -> frozenset[str]:
    """The mesh axes over which ``x`` is known to vary (empty where JAX does not track that)."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def varies_over(x, axis_name: AxisNames) -> bool:
    """Whether ``x`` is known to vary over every one of the axes."""
    return varying_axes(x).issuperset(axis_tuple(axis_name))


def replicated(x, axis_name: AxisNames) -> bool:
    """Whether ``x`` is known to be the same on all workers."""
    return (varying_axes(x) | _half_reduced_axes(x)).isdisjoint(axis_tuple(axis_name))


def plainly_varies(x, axis_name: AxisNames) -> bool:
    """Whether ``x`` is known to vary over the axes, and over no axis is half of a reduction."""
    return varies_over(x, axis_name) and not _half_reduced_axes(x)


def _half_reduced_axes(x) -> frozenset[str]:
    """Those over which JAX calls ``x`` "reduced" or "unreduced"."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset().union(*(getattr(manual, kind, ()) for kind in ("reduced", "unreduced")))


def is_constant(x) -> bool:
    """Whether ``x`` is a value that was there before any map: no tracer."""
    return not isinstance(x, jax.core.Tracer)


def is_transposed(x) -> bool:
    """Whether ``x`` is traced by `jax.linear_transpose`: what it reaches never runs forward."""
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


_SHARD_MAP_FILE = os.path.join("jax", "_src", "shard_map.py")


def tracks_varying(axis_name: AxisNames) -> bool:
    """Whether the surrounding map checks varying axes (shard_map's ``check_vma=True``)."""
    names = axis_tuple(axis_name)
    found = [False]
    if names:  # Traced, so that nothing runs where the caller is not in jit.
        jax.eval_shape(lambda: found.append(varies_over(lax.axis_index(names), names)))
    return found[-1]


def to_varying(tree, axis_name: AxisNames):
    """``tree`` with every leaf cast to varying over all axes; already varying ones pass."""

    def cast(x):
        missing = tuple(a for a in axis_tuple(axis_name) if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if tracks_varying(axis_name) else tree


def all_gather_invarying(x: Array, axis_name: AxisNames) -> Array:
    """Gathers to a new leading axis; where JAX tracks it, the result counts as replicated."""
    if varies_over(x, axis_name) and not isinstance(axis_name, Groups):
        return lax.all_gather(x, axis_name, to="invarying")
    return all_gather(x, axis_name)  # pmap, vmap, check_vma=False


def assume_invarying(x: Array, axis_name: AxisNames) -> Array:
    """``x``, which has the same bits on all workers: JAX counts it as replicated from here on."""
    if isinstance(axis_name, Groups):
        return x
    axes = varying_axes(x) & set(axis_tuple(axis_name))
    return _assume_invarying_p.bind(x, axes=axes) if axes else x


def _less_varying(x, *, axes: frozenset[str]):
    kind = getattr(x, "manual_axis_type", None)
    if kind is None:
        return x.update(vma=x.vma - axes)
    return x.update(manual_axis_type=kind.update(varying=kind.varying - axes))


# JAX has no operation for this: what permutations have brought counts as varying for ever.
_assume_invarying_p = Primitive("assume_invarying")
_assume_invarying_p.def_abstract_eval(_less_varying)
_assume_invarying_p.def_impl(lambda x, **_: x)
batching.defvectorized(_assume_invarying_p)
mlir.register_lowering(_assume_invarying_p, lambda ctx, x, **_: [x])


def all_gather(x: Array, axis_name: AxisNames) -> Array:
    """`lax.all_gather` to a new leading axis, also over several axes of `jax.vmap`."""
    if isinstance(axis_name, Groups):
        return lax.all_gather(x, **axis_name.gathered())
    if not several_vmapped(axis_name):
        return lax.all_gather(x, axis_name)
    gathered = functools.reduce(lax.all_gather, reversed(axis_name), x)
    return gathered.reshape(-1, *x.shape)


def all_gather_to(x: Array, axis_name: AxisNames, to: str) -> Array:
    """`all_gather`, whose result is "varying", "invarying" or "reduced" where JAX tracks that."""
    if to != "varying" and tracks_varying(axis_name):
        return lax.all_gather(x, axis_name, to=to)
    return all_gather(x, axis_name)


def gathered_as(x: Array, axis_name: AxisNames, to: str) -> Array:
    """What was gathered, replicated where JAX tracks that, as `all_gather_to` returns it."""
    if to == "reduced" and tracks_varying(axis_name):
        return lax.pcast(x, axis_tuple(axis_name), to="reduced")
    return x


def ppermute(x: Array, axis_name: AxisNames, permutation: list[tuple[int, int]]) -> Array:
    """`lax.ppermute` by a whole permutation, also over several axes of `jax.vmap`."""
    if isinstance(axis_name, Groups):
        pairs = [(group[s], group[d]) for group in axis_name.groups for s, d in permutation]
        return lax.ppermute(x, axis_name.names, pairs)
    if not several_vmapped(axis_name):
        return lax.ppermute(x, axis_name, permutation)
    source = jnp.array([s for s, _ in sorted(permutation, key=lambda pair: pair[1])])
    return all_gather(x, axis_name)[source[lax.axis_index(axis_name)]]


def all_to_all(x: Array, axis_name: AxisNames) -> Array:
    """Sends x[j] to worker j; result[i] came from worker i."""
    options = {"split_axis": 0, "concat_axis": 0, "tiled": True}
    if isinstance(axis_name, Groups):
        return lax.all_to_all(x, **axis_name.gathered(), **options)
    return lax.all_to_all(x, axis_name, **options)


def psum_scatter(x: Array, axis_name: AxisNames) -> Array:
    """The sum of x[me] over workers; also over several axes of `jax.vmap`."""
    if isinstance(axis_name, Groups):
        return lax.psum_scatter(x, **axis_name.gathered())
    if not several_vmapped(axis_name):
        return lax.psum_scatter(x, axis_name)
    return lax.psum(x, axis_name)[lax.axis_index(axis_name)]


def psum(tree, axis_name: AxisNames):
    """`lax.psum`; of groups also where JAX tracks varying axes, and the sums still vary."""
    if not isinstance(axis_name, Groups):
        return lax.psum(tree, axis_name)
    if not tracks_varying(axis_name):
        return lax.psum(tree, **axis_name.gathered())

    def total(x):
        n = axis_size(axis_name)
        parts = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
        return all_gather(psum_scatter(parts, axis_name), axis_name).reshape(-1)[: x.size]

    def one(x):
        constant = is_constant(x)
        return lax.psum(x, **axis_name.gathered()) if constant else total(x).reshape(x.shape)

    return jax.tree.map(one, tree)


def pmean(tree, axis_name: AxisNames):
    """`lax.pmean`."""
    if not isinstance(axis_name, Groups):
        return lax.pmean(tree, axis_name)
    return lax.pmean(tree, **axis_name.gathered())


def pmax(tree, axis_name: AxisNames):
    """`lax.pmax`; of groups it still varies where JAX tracks that."""
    if not isinstance(axis_name, Groups):
        return lax.pmax(tree, axis_name)
    return jax.tree.map(lambda x: jnp.max(all_gather(x, axis_name), axis=0), tree)


def axis_index(axis_name: AxisNames) -> Array:
    """This worker's number, int32."""
    if not isinstance(axis_name, Groups):
        return lax.axis_index(axis_name)
    place = np.empty(sum(map(len, axis_name.groups)), np.int32)
    for group in axis_name.groups:
        place[list(group)] = np.arange(len(group))
    return jnp.asarray(place)[lax.axis_index(axis_name.names)]


def zero_tangent(x: Array) -> Array | np.ndarray:
    """The tangent of a constant: zeros, of dtype float0 for integers."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def axis_size(axis_name: AxisNames) -> int:
    """Workers on the axis or axes, or in a group."""
    if isinstance(axis_name, Groups):
        return len(axis_name.groups[0])
    return math.prod(lax.axis_size(name) for name in axis_tuple(axis_name))


inlined = functools.partial(jax.jit, inline=getattr(jax, "Inline", _Inline).JAX_EARLY)
"""`jax.jit` of which nothing is left within another: one program for operations called eagerly."""


def several_vmapped(axis_name: AxisNames) -> bool:
    """Whether it is several axes, some of them `jax.vmap`'s: most batching rules take one only."""
    return len(axis_tuple(axis_name)) > 1 and vmapped(axis_name)


def vmapped(axis_name: AxisNames) -> bool:
    """Whether one of the axes is `jax.vmap`'s (its tracers have a dim), outside of `jax.jit`."""
    return any(hasattr(lax.axis_index(name), "batch_dim") for name in axis_tuple(axis_name))


def with_constants(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, and the values of its ``constvars``: JAX 0.11 made one class of two."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def inner_jaxprs(equation: JaxprEqn) -> list[Any]:
    """The jaxprs in an equation's parameters: of calls, loops and branches."""
    kinds = Jaxpr, ClosedJaxpr
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds))
    return [value for value in values if isinstance(value, kinds)]


def bind_equation(equation: JaxprEqn, *args: Any) -> Sequence[Any]:
    """What an equation makes of these values, as `jax.core.eval_jaxpr` would run it."""
    params = equation.primitive.get_bind_params(equation.params)
    names = str(equation.source_info.name_stack)
    with jax.named_scope(names) if names else contextlib.nullcontext(), equation.ctx.manager:
        made = equation.primitive.bind(*args, **params)
    return made if equation.primitive.multiple_results else [made]
