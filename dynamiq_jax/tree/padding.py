"""Zeros at the end of one dimension of a leaf, so that workers split it into equal slices."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.tree.placement import names_of

LAYERS = 256
"""A leading dimension shorter than this may count layers, which `overlapped` handles one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """The number of zeros at the end of a dimension of a leaf; by default none.

    The *padded* leaf has these zeros, so its slices have equal lengths. The dimension is counted
    from the end, so that it is the same for stacked leaves.
    """

    dimension: int = -1
    zeros: int = 0

    def padded(self, x: Array) -> Array:
        """The leaf with its zeros."""
        if not self.zeros:
            return x
        own = x.ndim + self.dimension
        config = [(0, self.zeros if d == own else 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), config)

    def cut(self, x: Array) -> Array:
        """The leaf without its zeros, from the padded leaf."""
        if not self.zeros:
            return x
        own = x.ndim + self.dimension
        return lax.slice_in_dim(x, 0, x.shape[own] - self.zeros, axis=own)

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The padded leaf's shape."""
        return self._longer(shape, self.zeros)

    def shape_of(self, padded: tuple[int, ...]) -> tuple[int, ...]:
        """The leaf's shape, from the shape of the padded leaf."""
        return self._longer(padded, -self.zeros)

    def _longer(self, shape: tuple[int, ...], by: int) -> tuple[int, ...]:
        own = len(shape) + self.dimension
        return tuple(x + by * (d == own) for d, x in enumerate(shape))

    def cleared(self, own: Array, axis: Axis) -> Array:
        """This worker's slice of the padded leaf, with zeros where the leaf has ended."""
        if not self.zeros:
            return own
        rows = own.shape[self.dimension]
        along = lax.broadcasted_iota(jnp.int32, own.shape, own.ndim + self.dimension)
        places = axis.index * rows + along
        return jnp.where(places < rows * axis.size - self.zeros, own, jnp.zeros_like(own))


def padding_of(shape: tuple[int, ...], spec: P, workers: Mapping[str, int]) -> Padding:
    """The padding of a leaf of this shape, which the workers split as ``spec`` says.

    ``workers`` has the size of every axis of the workers.
    """
    n = math.prod(workers.values())
    for dimension, entry in enumerate(spec):
        if {*names_of(entry)} & {*workers}:
            return Padding(dimension - len(shape), -shape[dimension] % n)
    return Padding()


def split_dimension(lengths: Sequence[int], n: int, taken: Collection[int] = ()) -> int | None:
    """The dimension along which ``n`` workers split a leaf; `None` if it has none.

    It is the first dimension that is a multiple of ``n``. If there is none, it is a dimension
    longer than ``n`` that no other axes have ``taken``: the one that needs the least padding for
    its length. A leading dimension below `LAYERS` is tried last.
    """
    late = lambda d: d == 0 and lengths[d] < LAYERS
    order = sorted(range(len(lengths)), key=late)
    divides = (d for d in order if lengths[d] and lengths[d] % n == 0)
    if (found := next(divides, None)) is not None:
        return found
    # A shorter one would get more zeros than coordinates, and zeros travel.
    longer = [d for d in order if lengths[d] > n and d not in taken]
    return min(longer, key=lambda d: (late(d), -lengths[d] % n / lengths[d]), default=None)
