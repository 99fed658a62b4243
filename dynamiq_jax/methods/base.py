"""Methods: how one flat array is reduced over one axis.

A method is a frozen dataclass of static options with the members of `Method`. A quantiser derives
from `methods.plain.PlainMethod`, which makes all of them out of `encode` and `decode`
(docs/extending.md).
"""

import math
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import Seed
from dynamiq_jax.core.warned import warn
from dynamiq_jax.fields import Options
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.base import n_slots
from dynamiq_jax.tree.leaves import Bucket, Leaf, ScaleAxis

State = Any
"""The state of a method for one bucket from step to step, a pytree of arrays of one worker; ``()``
if nothing."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

LARGEST = float(jnp.finfo(jnp.bfloat16).max)
"""Error-feedback sums are clipped to this value, the largest finite bf16."""


class Call(NamedTuple):
    """One collective of one flat array: all that a method is told besides the array."""

    axis: Axis
    """The workers."""
    topology: Topology | None
    """How payloads travel; `None`: by XLA's own collectives."""
    seed: Seed
    """The seed of the rounding, the same on all workers."""
    divisor: int = 1
    """The sum is divided by this: the number of workers for a mean."""
    state: State = ()
    """The method's state of this bucket; ``()`` where the caller keeps none."""
    metrics: bool = False
    """Whether the outcome has all facts that the method knows."""
    keep_error: bool = False
    """Whether a memory takes the losses. Then workers also clip their numbers, so that sums of
    finite ones are finite."""

    @property
    def n_workers(self) -> int:
        """Workers that reduce together."""
        return self.axis.size

    @property
    def n_slots(self) -> int:
        """Encodings that one chunk passes through; for hop methods."""
        assert self.topology is not None
        return n_slots(self.topology.stages(self.n_workers))


class Outcome(NamedTuple):
    """The result of an all-reduce of one flat array."""

    value: Float[Array, " d"]
    """The sum, or the sum over the divisor; the same bits on all workers."""
    state: State
    """The state for the next step."""
    facts: PayloadFacts = PayloadFacts()
    """All facts with `Call.metrics`; else those that cost nothing."""
    lost: Float[Array, " d"] | None = None
    """The part of this worker's array that the sum lacks, f32: see `TellsLosses`."""


class Limits(NamedTuple):
    """Which leaves are worth compressing, and how they become buckets; see `tree.leaves`."""

    min_leaf_size: int
    """Leaves of fewer coordinates are summed exactly."""
    min_bucket_size: int
    """Buckets of fewer coordinates are summed exactly."""
    min_bucket_bytes: int
    """Buckets of fewer bytes are summed exactly."""
    bucket_bytes: int
    """Leaves up to this size are concatenated to buckets of about this size."""


MIN_LEAF_SIZE = 4096
MIN_BUCKET_SIZE = 65536
BUCKET_BYTES = 32 * 2**20


def check_choice(name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError if a field has none of the values it may have."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {allowed}")


def ring_bits(bits: int, n_workers: int) -> int:
    """Bits that one worker sends in a native all-reduce of so many bits, the least there are."""
    return 2 * (n_workers - 1) * bits // n_workers


def clipped(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """f32 values up to `LARGEST`, which infinities become; NaN stays."""
    return jnp.clip(x, -LARGEST, LARGEST)


def with_memory(x: Float[Array, " d"], residual: Float[Array, " d"]) -> Float[Array, " d"]:
    """The gradient and the memory of error feedback, f32: finite wherever the gradient ``x`` is."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), clipped(x + residual), x)


class Method(Options, ABC):
    """How one flat array is reduced over one axis; the seam between pytrees and methods.

    A hop method (`methods.hops.HopMethod`) is a codec that runs over topologies. A native method
    calls XLA's collectives by itself. Subclasses are frozen dataclasses of static options.
    """

    __slots__ = ()

    native_by_default: ClassVar[bool] = False
    """Whether ``topology=None`` means XLA's own collectives, whatever the mesh."""
    needs_state: ClassVar[bool] = False
    """Whether the method would be wrong without a state."""
    shards: ClassVar[bool] = False
    """Whether the method has `reduce_scatter`, `all_gather` and `sharded_wire_bits`."""

    @property
    def most_bits(self) -> float:
        """Wire bits per coordinate, with padding, from which on a bucket is summed exactly."""
        return math.inf

    @property
    def scale_axis(self) -> ScaleAxis:
        """The axis of leaves along which coordinates follow each other; `None`: the last one."""
        return None

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """The method's default limits, with those that were given in their places."""
        size = 0 if given.get("min_bucket_bytes") == 0 else MIN_BUCKET_SIZE
        return Limits(MIN_LEAF_SIZE, size, 0, BUCKET_BYTES)._replace(**given)

    def over_fast_links(self) -> Self:
        """The method for links as fast as NVLink, where preparations cost more than bytes."""
        return self

    def declines(self, leaf: Leaf) -> str | None:
        """Why a leaf of this shape is summed exactly; `None`: it is not."""
        return None

    def check(self, n_workers: int, topology: Topology | None) -> None:  # noqa: B027
        """Raises ValueError or NotImplementedError where the method cannot serve."""

    def native_dtype(self, dtype) -> jnp.dtype:
        """The wire dtype for gradients of ``dtype`` where compression costs: 16 bits."""
        return jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)

    def of_bucket(self, bucket: Bucket) -> Self:
        """The method for one bucket; a method of matrices learns the shape of its leaf."""
        return self

    def init(self, size: int, n_workers: int) -> State:
        """The first step's state of a bucket of ``size`` coordinates."""
        return ()

    @abstractmethod
    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """The sum over the axis, over the divisor, in x's dtype, and the next step's state.

        All workers get the same bits.
        """

    @abstractmethod
    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """The sum of ``x`` over the axis: every worker gets the row of its own number."""
        raise NotImplementedError

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """All workers' ``x``, the same bits on all; ``invarying``: JAX counts it as replicated."""
        raise NotImplementedError

    def pack(self, x: Float[Array, " s"], call: Call) -> Any:
        """What `unpack` gathers of this worker's ``x``: a pytree of arrays, encoded."""
        raise NotImplementedError(
            f"method={self!r} keeps no payloads for later gathers; pass a quantiser, such as "
            "dq.DynamiQ(bits=8)"
        )

    def unpack(
        self, packed: Any, size: int, dtype: Any, call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """The result of `all_gather`, from what `pack` made of ``x`` ([size] of ``dtype``)."""
        raise NotImplementedError

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits a worker sends to scatter n slices of ``size``; without topology, to gather them."""
        raise NotImplementedError

    def outer_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """The part of `wire_bits` that crosses outer axes: all of it without a hierarchy."""
        return self.wire_bits(size, n_workers, topology)

    def relative_error(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> float | None:
        """About the |error|² / |sum|² of a super-group; `None` if the method does not know."""
        return None

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """A remedy where the relative error is too large; `None` where it is not."""
        return None


class TellsLosses(Method):
    """A method that tells what its encodings lose; `ErrorFeedback` takes these methods.

    Where `Call.keep_error` is set, the outcome has ``lost``: the losses of all workers add up to
    what the sum lacks, where the sum is finite.
    """

    __slots__ = ()

    def lost(self, n_workers: int, topology: Topology | None) -> float | None:
        """About the energy of all losses over that of what workers send (unitless).

        It is that of the blocks that lose most; `None` if the method does not know.
        """
        return None


class _AnyThatShards(ABCMeta):
    """Makes every method that shards an instance of the deprecated `ShardedMethod`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is not _ShardedMethod:
            return super().__subclasscheck__(subclass)
        # Not issubclass, which asks the subclasses of `Method`, and so this one, again.
        return Method in subclass.__mro__ and subclass.shards


class _ShardedMethod(Method, metaclass=_AnyThatShards):
    """The deprecated base of methods that shard; `Method.shards` replaces it."""

    __slots__ = ()

    shards: ClassVar[bool] = True


def deprecated(name: str, module: str) -> Any:
    """`ShardedMethod`, with a warning where a module was asked for it; refuses other names."""
    if name != "ShardedMethod":
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(
        "ShardedMethod is deprecated and goes with the next minor version: derive a quantiser from "
        "dynamiq_jax.methods.PlainMethod, and ask a method for method.shards",
        DeprecationWarning,
    )
    return _ShardedMethod


if TYPE_CHECKING:
    ShardedMethod = _ShardedMethod
else:

    def __getattr__(name: str) -> Any:
        """See `deprecated`."""
        return deprecated(name, __name__)


class WrappedMethod(Method):
    """The base of methods around another one, which has the same buckets and wire as alone."""

    __slots__ = ()

    method: Any

    needs_state: ClassVar[bool] = True
    native_by_default: ClassVar[Any] = property(attrgetter("method.native_by_default"))
    most_bits: Any = property(attrgetter("method.most_bits"))
    scale_axis: Any = property(attrgetter("method.scale_axis"))
    declines: Any = property(attrgetter("method.declines"))
    limits: Any = property(attrgetter("method.limits"))
    check: Any = property(attrgetter("method.check"))
    native_dtype: Any = property(attrgetter("method.native_dtype"))
    wire_bits: Any = property(attrgetter("method.wire_bits"))
    relative_error: Any = property(attrgetter("method.relative_error"))

    def of_bucket(self, bucket: Bucket) -> Self:
        """Itself around the method for this bucket."""
        return replace(self, method=self.method.of_bucket(bucket))  # type: ignore[type-var]

    def over_fast_links(self) -> Self:
        """See `Method`."""
        return replace(self, method=self.method.over_fast_links())  # type: ignore[type-var]
