"""Differences between JAX versions, and what its tracing state can tell. The only such file."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

AxisNames = str | tuple[str, ...]
"""One mapped axis, or several that count as one: workers are numbered in row-major order."""


def axis_tuple(axis_name: AxisNames) -> tuple[str, ...]:
    """The names as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name


def varying_axes(x) -> frozenset[str]:
    """The mesh axes over which ``x`` is known to vary (empty where JAX does not track that)."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def varies_over(x, axis_name: AxisNames) -> bool:
    """Whether ``x`` is known to vary over every one of the axes."""
    return varying_axes(x).issuperset(axis_tuple(axis_name))


def tracks_varying(axis_name: AxisNames) -> bool:
    """Whether the surrounding map checks varying axes (shard_map's ``check_vma=True``)."""
    return varies_over(lax.axis_index(axis_name), axis_name)


def to_varying(tree, axis_name: AxisNames):
    """``tree`` with every leaf cast to varying over all axes; already varying ones pass."""

    def cast(x):
        missing = tuple(a for a in axis_tuple(axis_name) if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if tracks_varying(axis_name) else tree


def all_gather_invarying(x: Array, axis_name: AxisNames) -> Array:
    """Gathers to a new leading axis; where JAX tracks it, the result counts as replicated."""
    if varies_over(x, axis_name):
        return lax.all_gather(x, axis_name, to="invarying")
    return all_gather(x, axis_name)  # pmap, vmap, check_vma=False


def assume_invarying(x: Array, axis_name: AxisNames) -> Array:
    """``x``, which has the same bits on all workers: JAX counts it as replicated from here on."""
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
mlir.register_lowering(_assume_invarying_p, lambda ctx, x, **_: [x])


def all_gather(x: Array, axis_name: AxisNames) -> Array:
    """`lax.all_gather` to a new leading axis, also over several axes of `jax.vmap`."""
    if not _several_vmapped(axis_name):
        return lax.all_gather(x, axis_name)
    gathered = functools.reduce(lax.all_gather, reversed(axis_name), x)
    return gathered.reshape(-1, *x.shape)


def ppermute(x: Array, axis_name: AxisNames, permutation: list[tuple[int, int]]) -> Array:
    """`lax.ppermute` by a whole permutation, also over several axes of `jax.vmap`."""
    if not _several_vmapped(axis_name):
        return lax.ppermute(x, axis_name, permutation)
    source = jnp.array([s for s, _ in sorted(permutation, key=lambda pair: pair[1])])
    return all_gather(x, axis_name)[source[lax.axis_index(axis_name)]]


def all_to_all(x: Array, axis_name: AxisNames) -> Array:
    """Sends x[j] to worker j; result[i] came from worker i."""
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def psum_scatter(x: Array, axis_name: AxisNames) -> Array:
    """The sum of x[me] over workers; also over several axes of `jax.vmap`."""
    if not _several_vmapped(axis_name):
        return lax.psum_scatter(x, axis_name)
    return lax.psum(x, axis_name)[lax.axis_index(axis_name)]


def zero_tangent(x: Array) -> Array | np.ndarray:
    """The tangent of a constant: zeros, of dtype float0 for integers."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def axis_size(axis_name: AxisNames) -> int:
    """Workers on the axis or axes."""
    return math.prod(lax.axis_size(name) for name in axis_tuple(axis_name))


def _several_vmapped(axis_name: AxisNames) -> bool:
    """JAX's batching rules of most collectives take one axis only (their tracers have a dim)."""
    if isinstance(axis_name, str) or len(axis_name) == 1:
        return False
    return any(hasattr(lax.axis_index(name), "batch_dim") for name in axis_name)
