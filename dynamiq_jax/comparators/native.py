"""The bases of methods that sum by `lax.psum`: of flat arrays, of leaves as matrices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import (
    LARGEST,
    MIN_LEAF_SIZE,
    Call,
    Limits,
    Method,
    State,
    TellsLosses,
    clipped,
)
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import Bucket, Leaf

Wire = Literal["bf16", "f32"]
"""Floats that native sums are in."""
WIRE_BITS = {"bf16": 16, "f32": 32}

ROUNDING = 1e-9
"""Tolerance for float error in products that should be whole numbers, as 0.07 * 100."""


class StepState(NamedTuple):
    """The state of methods that take turns or draw anew."""

    step: Int[Array, ""]
    """Number of the step, int32, the same on all workers."""


def native_sum(
    x: Float[Array, "*shape"], wire: Wire, axis: Axis
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The rounded ``x`` of this worker, and the sum over all workers, both f32."""
    if wire == "f32":
        return x, axis.psum(x)
    # Rounded in f32 already: XLA may drop a cast to bf16 and back, and memory must not.
    sent = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return sent, axis.psum(sent.astype(jnp.bfloat16)).astype(jnp.float32)


def with_room(x: Float[Array, "*shape"], call: Call) -> Float[Array, "*shape"]:
    """Values that a sum has room for; the rest waits in memory, if there is one."""
    room = LARGEST / call.n_workers if call.keep_error else LARGEST
    return jnp.clip(x, -room, room)


def check_density(density: float) -> None:
    """Raises ValueError for a part that is nothing, or more than all."""
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be above 0 and at most 1, such as 0.25")


class NativeMethod(Method):
    """The base of methods that run on XLA's own collectives alone."""

    __slots__ = ()

    native_by_default: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False
    """Whether its state is a `StepState`."""

    def init(self, size: int, n_workers: int) -> State:
        """The first step, where steps are counted."""
        return StepState(jnp.zeros((), jnp.int32)) if self.counts_steps else ()

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies."""
        if topology is not None:
            raise NotImplementedError(
                f"topology={topology!r}: {type(self).__name__} runs on native collectives only; "
                "leave topology=None"
            )


def summed_rows(
    rows: Float[Array, "N b"],
    chosen: Int[Array, " K"],
    finite: Bool[Array, " N"],
    x: Float[Array, " d"],
    call: Call,
    wire: Wire = "bf16",
) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """The sum of the chosen rows, NaN where not ``finite``, zero in others; and what it lacks."""
    size = x.shape[0]
    sent, total = native_sum(with_room(rows[chosen], call), wire, call.axis)
    total = (clipped(total) / call.divisor).astype(x.dtype)
    result = jnp.zeros(rows.shape, x.dtype).at[chosen].set(total, unique_indices=True)
    result = jnp.where(finite[:, None], result, jnp.nan).reshape(-1)[:size]
    left = rows.at[chosen].add(-sent, unique_indices=True)
    return result, left.reshape(-1)[:size]


def matrix_of(leaf: Leaf) -> tuple[int, int]:
    """Rows and columns: all axes but the last, and the last one; a vector is a single row."""
    columns = leaf.shape[-1] if leaf.shape else 1
    return math.prod(leaf.shape[:-1]), columns


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixMethod(NativeMethod, TellsLosses):
    """The base of methods that take leaves as matrices, each alone, by native collectives.

    A leaf's rows are all of its axes but the last, its columns the last one; on a mesh, those of
    the part that one device holds. Vectors and small matrices are summed exactly.
    The members of `Method` see the matrix as a flat array, row after row, and know its shape from
    the field ``matrix``, which `of_bucket` fills in. Where it is `None` an array is a single row.
    """

    rank: int = 4
    wire: Wire = "bf16"
    matrix: tuple[int, int] | None = None
    """Rows and columns."""

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be a positive integer, as 4")

    @property
    def min_side(self) -> int:
        """Matrices with fewer rows or columns are summed exactly: factors would not save half."""
        return 2 * self.rank

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
        return replace(self, matrix=matrix_of(leaf))

    def shape_of(self, size: int) -> tuple[int, int]:
        """Rows and columns of a flat array of ``size`` coordinates."""
        rows, columns = self.matrix or (1, size)
        assert rows * columns == size
        return rows, columns

    def headroom(self, size: int, n_workers: int) -> float:
        """A power of two: over it, all workers' rows times unit vectors have finite sums."""
        return 2.0 ** math.ceil(math.log2(2 * n_workers * math.sqrt(max(self.shape_of(size)))))
