"""Base classes of methods that sum by `lax.psum`: for flat arrays, and for leaves as matrices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from dynamiq_jax.core.axis import Axis, rounded_to
from dynamiq_jax.core.checks import check_fields
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
"""The dtypes of native sums."""
WIRE_BITS = {"bf16": 16, "f32": 32}

ROUNDING = 1e-9
"""Tolerance for float error in products that should be whole numbers, such as 0.07 * 100."""


class StepState(NamedTuple):
    """The state of methods whose workers take turns, or that draw random numbers."""

    step: Int[Array, ""]
    """The index of the step, int32, the same on all workers."""


def native_sum(
    x: Float[Array, "*shape"], wire: Wire, axis: Axis
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The rounded ``x`` of this worker, and the sum over all workers, both f32."""
    if wire == "f32":
        return x, axis.psum(x)
    sent = rounded_to(jnp.bfloat16, x)
    return sent, axis.psum(sent.astype(jnp.bfloat16)).astype(jnp.float32)


def with_room(x: Float[Array, "*shape"], call: Call) -> Float[Array, "*shape"]:
    """Values clipped so that their sum does not overflow; the rest stays in memory, if any."""
    room = LARGEST / call.n_workers if call.keep_error else LARGEST
    return jnp.clip(x, -room, room)


def check_density(density: float) -> None:
    """Raises ValueError for a fraction that is not above 0 and at most 1."""
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be above 0 and at most 1, such as 0.25")


class NativeMethod(Method):
    """The base class of methods that use only XLA's own collectives."""

    __slots__ = ()

    native_by_default: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = False
    """Whether the method's state is a `StepState`."""

    def init(self, size: int, n_workers: int) -> State:
        """The state of the first step, if the method counts steps."""
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
    """The sum: chosen rows, NaN where not ``finite``, zero in other rows; and the lost part."""
    size = x.shape[0]
    sent, total = native_sum(with_room(rows[chosen], call), wire, call.axis)
    total = (clipped(total) / call.divisor).astype(x.dtype)
    result = jnp.zeros(rows.shape, x.dtype).at[chosen].set(total, unique_indices=True)
    result = jnp.where(finite[:, None], result, jnp.nan).reshape(-1)[:size]
    left = rows.at[chosen].add(-sent, unique_indices=True)
    return result, left.reshape(-1)[:size]


def matrix_of(leaf: Leaf) -> tuple[int, int]:
    """The numbers of rows (all axes but the last) and columns (the last); a vector is a row."""
    columns = leaf.shape[-1] if leaf.shape else 1
    return math.prod(leaf.shape[:-1]), columns


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixMethod(NativeMethod, TellsLosses):
    """The base class of methods that reduce each leaf separately, as a matrix, natively.

    All axes of a leaf but the last are rows, and the last axis is columns; on a mesh, of the part
    that one device holds. Vectors and small matrices are summed exactly. The members of `Method`
    see the matrix as a flat array, row after row, and know its shape from the field ``matrix``,
    which `of_bucket` fills in. If it is `None`, an array is a single row.
    """

    rank: int = 4
    wire: Wire = "bf16"
    matrix: tuple[int, int] | None = None
    """The numbers of rows and columns."""

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be a positive integer, as 4")

    @property
    def min_side(self) -> int:
        """The least rows and columns: for smaller matrices factors would not save half."""
        return 2 * self.rank

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """The smallest size of a leaf; every leaf is a separate bucket."""
        return Limits(given.get("min_leaf_size", MIN_LEAF_SIZE), 0, 0, 0)

    def declines(self, leaf: Leaf) -> str | None:
        """The reason to sum a vector or a small matrix exactly."""
        if len(leaf.shape) < 2:
            return "not a matrix"
        rows, columns = matrix_of(leaf)
        if min(rows, columns) < self.min_side:
            return f"matrix of {rows} x {columns} < min_side {self.min_side}"
        return None

    def of_bucket(self, bucket: Bucket) -> Self:
        """The method for one leaf, with the numbers of its rows and columns."""
        (leaf,) = bucket.leaves
        return replace(self, matrix=matrix_of(leaf))

    def shape_of(self, size: int) -> tuple[int, int]:
        """The numbers of rows and columns of a flat array of ``size`` coordinates."""
        rows, columns = self.matrix or (1, size)
        assert rows * columns == size
        return rows, columns

    def headroom(self, size: int, n_workers: int) -> float:
        """A power of two: all workers' rows divided by it, times unit vectors, have finite sums."""
        return 2.0 ** math.ceil(math.log2(2 * n_workers * math.sqrt(max(self.shape_of(size)))))
