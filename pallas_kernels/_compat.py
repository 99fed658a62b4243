"""Differences between JAX versions for Pallas calls. The only such file of this package."""

import jax

RUNS_MOSAIC = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU kernels take references to what they write into."""


def shape_struct(shape, dtype, *like) -> jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` that varies over every mesh axis that one of ``like`` varies over."""
    kinds = [jax.typeof(x).manual_axis_type for x in like]
    varying = frozenset().union(*(kind.varying for kind in kinds))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=type(kinds[0])(varying=varying))
