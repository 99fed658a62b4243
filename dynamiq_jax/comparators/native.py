"""The bases of methods that sum by `lax.psum`: of flat arrays, and of leaves as matrices."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import MIN_LEAF_SIZE, Limits, Method
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import Bucket, Leaf

Wire = Literal["bf16", "f32"]
"""Floats that native sums are in."""

ROUNDING = 1e-9
"""Tolerance for float error in products that should be whole numbers, as 0.07 * 100."""


def native_sum(
    x: Float[Array, "*shape"], wire: Wire, axis: Axis
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The rounded ``x`` of this worker, and the sum over all workers, both f32."""
    if wire == "f32":
        return x, axis.psum(x)
    # Rounded in f32 already: XLA may drop a cast to bf16 and back, and memory must not.
    sent = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return sent, axis.psum(sent.astype(jnp.bfloat16)).astype(jnp.float32)


class NativeSumMethod(Method):
    """The base of methods that sum by `lax.psum` alone."""

    __slots__ = ()

    @property
    def native_by_default(self) -> bool:
        """It sums by `lax.psum`."""
        return True

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies."""
        if topology is not None:
            raise NotImplementedError(
                f"topology={topology!r}: {type(self).__name__} sums by native psum only; leave "
                "topology=None"
            )


def matrix_of(leaf: Leaf) -> tuple[int, int]:
    """Rows and columns: all axes but the last, and the last one; a vector is a single row."""
    columns = leaf.shape[-1] if leaf.shape else 1
    return math.prod(leaf.shape[:-1]), columns


class MatrixMethod(NativeSumMethod):
    """The base of methods that take leaves as matrices, each alone, by native collectives.

    A leaf's rows are all of its axes but the last, its columns the last one; on a mesh, those of
    the part that one device holds. Vectors and small matrices are summed exactly.
    The members of `Method` see the matrix as a flat array, row after row, and know its shape from
    the field ``matrix``, which `of_matrix` fills in for every bucket. Where it is `None` an array
    is a single row.
    """

    __slots__ = ()

    matrix: tuple[int, int] | None
    """Rows and columns."""

    @property
    def min_side(self) -> int:
        """Matrices with fewer rows or columns are summed exactly."""
        raise NotImplementedError

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """The least size of a leaf; every leaf is a bucket by itself."""
        return Limits(given.get("min_leaf_size", MIN_LEAF_SIZE), 0, 0, 0)

    def declines(self, leaf: Leaf) -> str | None:
        """Vectors and matrices that are too small."""
        if len(leaf.shape) < 2:
            return "not a matrix"
        rows, columns = matrix_of(leaf)
        if min(rows, columns) < self.min_side:
            return f"matrix of {rows} x {columns} < min_side {self.min_side}"
        return None

    def of_bucket(self, bucket: Bucket) -> Self:
        """The method for one leaf, whose rows and columns it knows."""
        (leaf,) = bucket.leaves
        return replace(self, matrix=matrix_of(leaf))  # type: ignore[type-var]

    def shape_of(self, size: int) -> tuple[int, int]:
        """Rows and columns of a flat array of ``size`` coordinates."""
        rows, columns = self.matrix or (1, size)
        assert rows * columns == size
        return rows, columns

    def headroom(self, size: int, n_workers: int) -> float:
        """A power of two: over it, rows and columns times unit vectors have finite sums.

        Those of all workers, however large their finite numbers are.
        """
        return 2.0 ** math.ceil(math.log2(2 * n_workers * math.sqrt(max(self.shape_of(size)))))
