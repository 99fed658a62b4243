"""Differences between JAX versions, and what its tracing state can tell. The only such file."""

import jax
from jax import lax


def varying_axes(x) -> frozenset[str]:
    """The mesh axes over which ``x`` is known to vary (empty where JAX does not track that)."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def tracks_varying(axis_name: str) -> bool:
    """Whether the surrounding map checks varying axes (shard_map's ``check_vma=True``)."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def to_varying(tree, axis_name: str):
    """``tree`` with every leaf cast to varying over ``axis_name``; already varying ones pass."""

    def cast(x):
        return x if axis_name in varying_axes(x) else lax.pcast(x, axis_name, to="varying")

    return jax.tree.map(cast, tree) if tracks_varying(axis_name) else tree


def all_gather_invarying(tree, axis_name: str):
    """Gathers to a new leading axis; where JAX tracks it, the result counts as replicated."""

    def gather(x):
        if axis_name not in varying_axes(x):  # pmap, vmap, check_vma=False
            return lax.all_gather(x, axis_name)
        return lax.all_gather(x, axis_name, to="invarying")

    return jax.tree.map(gather, tree)
