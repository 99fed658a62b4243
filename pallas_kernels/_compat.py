"""Differences between JAX versions for Pallas calls. The only such file of this package."""

import inspect
from typing import Any

import jax

RUNS_MOSAIC = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU kernels take references to what they write into."""

_STRUCT_TAKES = inspect.signature(jax.ShapeDtypeStruct).parameters


def shape_struct(shape, dtype, *like) -> jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` that varies over every mesh axis that one of ``like`` varies over."""
    avals = [jax.typeof(x) for x in like]
    if "manual_axis_type" in _STRUCT_TAKES:
        kinds = [aval.manual_axis_type for aval in avals]
        varying = frozenset().union(*(kind.varying for kind in kinds))
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=type(kinds[0])(varying=varying))
    varying = frozenset().union(*(aval.vma for aval in avals))
    options: dict[str, Any] = {"vma": varying}
    return jax.ShapeDtypeStruct(shape, dtype, **options)
