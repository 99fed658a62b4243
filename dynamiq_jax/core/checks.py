"""Checks of the arguments that name the workers of a collective."""

import math
import operator
from collections.abc import Sequence
from typing import Literal

from jax import lax
from jax.sharding import AbstractMesh, Mesh

from dynamiq_jax.core.axis import Axis, AxisName

Op = Literal["sum", "mean"]
"""The operation over workers."""


def axis_counts(n_workers: int | tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of all axes, from one size or from several."""
    given = tuple(n_workers) if isinstance(n_workers, tuple | list) else (n_workers,)
    try:
        sizes = tuple(map(operator.index, given))
    except TypeError:
        sizes = None
    if sizes is None or any(isinstance(size, bool) for size in given):
        axis = next((size for size in given if isinstance(size, str)), "data")
        raise ValueError(
            f"n_workers={n_workers!r} is not a number of workers; pass an int, or one for each "
            f"axis, such as mesh.shape[{axis!r}], or inside a map jax.lax.axis_size({axis!r})"
        )
    if not sizes or min(sizes) < 1:
        raise ValueError(f"n_workers={n_workers} must be at least 1")
    return sizes


def check_axis(
    axis_name: AxisName | list[str], axis_index_groups: Sequence[Sequence[int]] | None = None
) -> Axis:
    """The workers of a collective, from its arguments."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise NotImplementedError(
            f"axis_name={axis_name!r}: expected the name of a mapped axis (a str), or a tuple of "
            "names; positional axes of jax.lax.psum are not supported"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; pass each once")
    axis = Axis(names)
    if axis_index_groups is None or not names:
        return axis
    try:
        groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    except TypeError as error:
        raise ValueError(
            f"axis_index_groups={axis_index_groups!r} are not lists of worker indices ({error}); "
            "pass for example [[0, 1], [2, 3]]"
        ) from error
    n_workers = math.prod(axis_sizes(axis, "the collective"))
    if sorted(worker for group in groups for worker in group) != list(range(n_workers)):
        raise ValueError(
            f"axis_index_groups={groups} must cover all indices exactly once, and axis "
            f"{axis.name!r} has those from 0 to {n_workers - 1}; pass a partition of these"
        )
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"axis_index_groups={groups} has groups of {sizes} workers; pass groups that are all "
            "the same size"
        )
    return Axis(names, groups)


def axis_sizes(axis: Axis, collective: str = "the reduction") -> tuple[int, ...]:
    """The workers on every axis, which must be mapped for ``collective``; groups count as one."""
    if axis.groups is not None:
        return (axis.size,)
    try:
        return tuple(map(lax.axis_size, axis.names))
    except NameError as error:
        raise NameError(
            f"Found an {error}. To fix this, please call {collective} under `jax.shard_map`, "
            "`jax.pmap` or `jax.vmap` with an axis of this name."
        ) from None


def sizes_on(mesh: Mesh | AbstractMesh, axis: Axis) -> tuple[int, ...]:
    """The workers on every axis of a mesh; refuses a mesh without these axes."""
    missing = [name for name in axis.names if name not in mesh.shape]
    if missing:
        raise ValueError(f"axis_name={missing[0]!r} is not in the mesh; it has {mesh.axis_names}")
    return tuple(mesh.shape[name] for name in axis.names)


def check_groups(axis: Axis, *, all_reduce: bool) -> None:
    """Refuses groups of workers where `jax.lax` does not support them."""
    if axis.groups is None:
        return
    given = f"axis_index_groups={axis.groups}"
    remedy = "give each group an axis of its own and pass its name, as axis_name='gpu' of axes "
    remedy += "('node', 'gpu')"
    if axis.vmapped:
        raise NotImplementedError(f"{given}: jax.vmap has no groups of workers; {remedy}")
    if all_reduce and axis.tracked:
        raise NotImplementedError(
            f"{given}: under jax.shard_map with check_vma=True no sum is replicated within groups "
            f"alone; pass check_vma=False, or {remedy}"
        )
