"""What a method is: how one flat array is reduced over one axis.

A method is a frozen dataclass of static options with the members of `Method`. Adding one takes a
file here, an export, a row in the common test table and a row in the benchmark table.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax._compat import AxisNames, psum
from dynamiq_jax.metrics import PayloadFacts
from dynamiq_jax.seeds import Seed
from dynamiq_jax.topologies import Topology

State = Any
"""What a method carries from step to step for one bucket, a pytree of arrays of one worker; ``()``
if nothing."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

Wire = Literal["bf16", "f32"]
"""Floats that native sums are in."""

LARGEST = float(jnp.finfo(jnp.bfloat16).max)
"""Where sums of memories end: finite in bf16, too."""
ROUNDING = 1e-9
"""By which a part of a whole number may miss another one, as 0.07 of 100 does."""


class Outcome(NamedTuple):
    """What an all-reduce of one flat array returns."""

    value: Float[Array, " d"]
    """The sum, or the sum over the divisor; the same bits on all workers."""
    state: State
    """The next step's."""
    facts: PayloadFacts = PayloadFacts()
    """Where metrics are asked for; else what costs nothing."""


class Limits(NamedTuple):
    """Which leaves are worth compressing, and how they are put together; see `buckets`."""

    min_leaf_size: int
    """Leaves of fewer coordinates are summed exactly."""
    min_bucket_size: int
    """So are buckets of fewer coordinates"""
    min_bucket_bytes: int
    """or bytes."""
    bucket_bytes: int
    """Leaves up to this size are concatenated to buckets of about this size."""
    min_side: int | None = None
    """Of a method that takes matrices, see `MatrixMethod`: those with fewer rows or columns are
    summed exactly. `None`: leaves are flat."""


def check_choice(name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError if a field has none of the values it may have."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {allowed}")


def check_not_negative(**values: float) -> None:
    """Raises ValueError for the first field that is negative (or NaN)."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative; pass 0")


def half_precision(dtype) -> jnp.dtype:
    """The 16-bit floats for gradients of ``dtype``: f16 for f16, else bf16."""
    return jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)


def clipped(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """f32 values up to `LARGEST`, which infinities become; NaN stays."""
    return jnp.clip(x, -LARGEST, LARGEST)


def with_memory(x: Float[Array, " d"], residual: Float[Array, " d"]) -> Float[Array, " d"]:
    """What error feedback has to send, f32: finite wherever the gradient ``x`` is."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), clipped(x + residual), x)


def native_sum(
    x: Float[Array, "*shape"], wire: Wire, axis_name: AxisNames
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """What this worker sends of f32 ``x``, and what all have sent, both f32."""
    if wire == "f32":
        return x, psum(x, axis_name)
    # Rounded in f32 already: XLA may drop a cast to bf16 and back, and memory must not.
    sent = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return sent, psum(sent.astype(jnp.bfloat16), axis_name).astype(jnp.float32)


class Method(Protocol):
    """The seam between pytrees and methods."""

    @property
    def native_by_default(self) -> bool:
        """Whether ``topology=None`` means XLA's own collectives, whatever the mesh."""
        ...

    @property
    def needs_state(self) -> bool:
        """Whether it would be wrong to run without state."""
        ...

    def limits(self, n_workers: int, *, fast_links: bool) -> Limits:
        """What to compress among so many workers; on links as of NVLink less pays."""
        ...

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Raises ValueError or NotImplementedError where it cannot serve."""
        ...

    def native_dtype(self, dtype) -> jnp.dtype:
        """What travels of gradients of ``dtype`` on links that are too fast to compress for."""
        ...

    def init(self, size: int, n_workers: int) -> State:
        """The first step's state of a bucket of ``size`` coordinates."""
        ...

    def all_reduce(
        self,
        x: Float[Array, " d"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        topology: Topology | None,
        seed: Seed,
        divisor: int = 1,
        state: State = (),
        metrics: bool = False,
    ) -> Outcome:
        """The sum over the axis, over ``divisor``, in x's dtype, and the next step's state.

        The same bits on all workers. ``seed`` is the same on all workers, `None` if the caller
        gave no key. A stateful method gets ``()`` where the caller keeps no state. With ``metrics``
        the outcome has all facts that the method knows.
        """
        ...

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        ...


class MethodDefaults:
    """Members of a method that keeps no state and serves any number of workers."""

    __slots__ = ()

    @property
    def needs_state(self) -> bool:
        """Nothing is carried from step to step that it could not do without."""
        return False

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Serves any number of workers on any topology."""

    def native_dtype(self, dtype) -> jnp.dtype:
        """16 bits."""
        return half_precision(dtype)

    def init(self, size: int, n_workers: int) -> State:
        """No state."""
        return ()


class BucketedMethod(MethodDefaults):
    """What methods with these three fields share."""

    __slots__ = ()

    min_leaf_size: int
    min_bucket_size: int
    bucket_bytes: int

    def check_limits(self) -> None:
        """Raises ValueError for a negative one of the three."""
        names = ("min_leaf_size", "min_bucket_size", "bucket_bytes")
        check_not_negative(**{name: getattr(self, name) for name in names})

    def limits(self, n_workers: int, *, fast_links: bool) -> Limits:
        """The fields."""
        return Limits(self.min_leaf_size, self.min_bucket_size, 0, self.bucket_bytes)


class NativeSumMethod(MethodDefaults):
    """What methods share that sum by `lax.psum` alone."""

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


class MatrixMethod(NativeSumMethod):
    """What methods share that take leaves as matrices, each alone, by native collectives.

    A leaf's rows are all of its axes but the last, its columns the last one; on a mesh, those of
    the part that one device holds. Vectors, and what is too small by `Limits`, are summed exactly.
    The members of `Method` see the matrix as a flat array, row after row, and know its shape from
    the field ``matrix``, which `of_matrix` fills in for every bucket. Where it is `None` an array
    is a single row.
    """

    __slots__ = ()

    matrix: tuple[int, int] | None
    """Rows and columns."""
    min_leaf_size: int

    @property
    def min_side(self) -> int:
        """Matrices with fewer rows or columns are summed exactly."""
        raise NotImplementedError

    def limits(self, n_workers: int, *, fast_links: bool) -> Limits:
        """Every leaf by itself."""
        return Limits(self.min_leaf_size, 0, 0, 0, self.min_side)

    def of_matrix(self, rows: int, columns: int) -> Self:
        """The method for one leaf."""
        return replace(self, matrix=(rows, columns))  # type: ignore[type-var]

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


class ShardedMethod(Method, Protocol):
    """A method that can also do the halves of an all-reduce."""

    def reduce_scatter(
        self,
        x: Float[Array, "n s"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        topology: Topology,
        seed: Seed,
    ) -> Float[Array, " s"]:
        """Row ``me`` of the sum of ``x`` over the axis, on every worker its own."""
        ...

    def all_gather(
        self,
        x: Float[Array, " s"],
        axis_name: AxisNames,
        *,
        n_workers: int,
        seed: Seed,
        invarying: bool = False,
    ) -> Float[Array, "n s"]:
        """All workers' ``x``; the same bits on all workers.

        With ``invarying`` JAX counts the result as replicated.
        """
        ...

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to reduce-scatter n slices of ``size`` coordinates.

        Without a topology: to all-gather them.
        """
        ...
