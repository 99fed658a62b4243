"""Methods: how one flat array is reduced over one axis.

A method is a frozen dataclass of static options with the members of `Method`. A quantiser derives
from `methods.plain.PlainMethod`, which derives all members from `encode` and `decode`
(docs/extending.md).

A `HopMethod` runs over topologies: workers agree on shared values, then encode hop by hop. It
defines what workers must agree on (`measure`, for a small all-reduce), what is computed from this
(`share`), and how a worker's gradient is then encoded (`codec`). It calls no collectives.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis, Seed, fold_seed
from dynamiq_jax.core.checks import Options
from dynamiq_jax.core.fingerprint import assert_same_on_workers
from dynamiq_jax.core.warned import warn
from dynamiq_jax.executors.codec import ChunkCodec, Encoder, Payload
from dynamiq_jax.executors.collectives import all_reduce
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.topologies import Direct, Topology
from dynamiq_jax.topologies.schedules import check_schedule, n_slots
from dynamiq_jax.tree.leaves import Bucket, Leaf, ScaleAxis
from pallas_kernels import Choice

State = Any
"""The state of a method for one bucket, kept from step to step: a pytree of arrays of one worker;
``()`` if there is none."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

LARGEST = float(jnp.finfo(jnp.bfloat16).max)
"""The largest finite bf16 number; error-feedback sums are clipped to it."""


class Call(NamedTuple):
    """One collective of one flat array: the arguments of a method besides the array."""

    axis: Axis
    """The workers."""
    topology: Topology | None
    """The route of payloads; `None`: XLA's own collectives."""
    seed: Seed
    """The seed of the rounding, the same on all workers."""
    divisor: int = 1
    """The number that the sum is divided by: the number of workers for a mean."""
    state: State = ()
    """The method's state of this bucket; ``()`` if the caller keeps none."""
    metrics: bool = False
    """Whether the outcome must have all facts that the method knows."""
    keep_error: bool = False
    """Whether a memory keeps the losses. Then workers also clip their values, so that sums of
    finite values are finite."""

    @property
    def n_workers(self) -> int:
        """The number of workers that reduce together."""
        return self.axis.size

    @property
    def n_slots(self) -> int:
        """The number of encodings of one chunk; for hop methods."""
        assert self.topology is not None
        return n_slots(self.topology.stages(self.n_workers))


class Outcome(NamedTuple):
    """The result of an all-reduce of one flat array."""

    value: Float[Array, " d"]
    """The sum divided by the divisor; the same bits on all workers."""
    state: State
    """The state for the next step."""
    facts: PayloadFacts = PayloadFacts()
    """All facts with `Call.metrics`; otherwise only those that need no computation."""
    lost: Float[Array, " d"] | None = None
    """The part of this worker's array that is missing in the sum, f32: see `TellsLosses`."""


class Limits(NamedTuple):
    """Limits that say which leaves are compressed, and how they form buckets; see `tree.leaves`."""

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
    """Raises ValueError if a field does not have one of its allowed values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; expected one of {allowed}")


def ring_bits(bits: int, n_workers: int) -> int:
    """The fewest bits that one worker must send in a native all-reduce of this many bits."""
    return 2 * (n_workers - 1) * bits // n_workers


def clipped(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """f32 values, clipped to `LARGEST`, infinities included; NaN stays."""
    return jnp.clip(x, -LARGEST, LARGEST)


def with_memory(x: Float[Array, " d"], residual: Float[Array, " d"]) -> Float[Array, " d"]:
    """The gradient plus error feedback's memory, f32: finite wherever the gradient ``x`` is."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), clipped(x + residual), x)


class Method(Options, ABC):
    """How one flat array is reduced over one axis; the interface between pytrees and methods.

    A hop method (`HopMethod`) is a codec that runs over topologies. A native method
    calls XLA's collectives directly. Subclasses are frozen dataclasses of static options.
    """

    __slots__ = ()

    native_by_default: ClassVar[bool] = False
    """Whether ``topology=None`` means XLA's own collectives on every mesh."""
    needs_state: ClassVar[bool] = False
    """Whether the method needs a state for correct results."""
    shards: ClassVar[bool] = False
    """Whether the method has `reduce_scatter`, `all_gather` and `sharded_wire_bits`."""

    @property
    def kernels(self) -> Choice | None:
        """The backend whose kernels encode and decode; `None`: the method has no such kernels."""
        return None

    @property
    def most_bits(self) -> float:
        """The wire bits per coordinate, with padding, from which a bucket is summed exactly."""
        return math.inf

    @property
    def scale_axis(self) -> ScaleAxis:
        """The axis of leaves along which coordinates are consecutive; `None`: the last axis."""
        return None

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """The method's default limits, overridden by the limits that were passed."""
        size = 0 if given.get("min_bucket_bytes") == 0 else MIN_BUCKET_SIZE
        return Limits(MIN_LEAF_SIZE, size, 0, BUCKET_BYTES)._replace(**given)

    def pushed(self, n_workers: int) -> tuple[int, int] | None:
        """The bytes of a sum from which, and up to which, one push kernel is fastest over NVLink.

        `None`: none does a sum, or none was measured among so many GPUs.
        """
        return None

    def without_plan(self) -> Self:
        """The method without a plan, unless the user has passed one.

        For links as fast as NVLink, where a plan costs more time than it saves, and in sharded
        updates for what no backward pass hides: docs/results.md has times and losses.
        """
        return self

    def declines(self, leaf: Leaf) -> str | None:
        """The reason to sum a leaf of this shape exactly; `None` if it is compressed."""
        return None

    def check(self, n_workers: int, topology: Topology | None) -> None:  # noqa: B027
        """Raises ValueError or NotImplementedError if the method does not support these workers."""

    def native_dtype(self, dtype) -> jnp.dtype:
        """The wire dtype for gradients of ``dtype`` if compression does not pay: 16 bits."""
        return jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)

    def of_bucket(self, bucket: Bucket) -> Self:
        """The method for one bucket; a method for matrices gets the shape of its leaf."""
        return self

    def init(self, size: int, n_workers: int) -> State:
        """The initial state of a bucket of ``size`` coordinates."""
        return ()

    @abstractmethod
    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """The sum over the axis, divided by the divisor, in x's dtype, and the next state.

        All workers get the same bits.
        """

    @abstractmethod
    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """The sum of ``x`` over the axis; every worker gets the row of its index."""
        raise NotImplementedError

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """All workers' ``x``, the same bits on all; ``invarying``: JAX types it as replicated."""
        raise NotImplementedError

    def pack(self, x: Float[Array, " s"], call: Call) -> Any:
        """The encoding of this worker's ``x`` that `unpack` gathers: a pytree of arrays."""
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

    def scatter_bits(self, size: int, n_workers: int, topology: Topology | None) -> tuple[int, int]:
        """Bits a worker sends to scatter n slices of ``size``, and those that cross outer axes."""
        bits = self.sharded_wire_bits(size, n_workers, topology)
        return bits, bits

    def gather_bits(self, size: int, n_workers: int) -> tuple[int, int]:
        """Bits a worker sends to gather slices of ``size``, and those that cross outer axes."""
        return self.scatter_bits(size, n_workers, None)

    def exchanges(self, n_workers: int) -> bool:
        """Whether `all_to_all` takes it: it encodes blocks without an agreement of workers."""
        return False

    def seed_bits(
        self,
        size: int,
        n_workers: int,
        topology: Topology | None,
        collective: Collective = "all_reduce",
    ) -> int:
        """The part of a worker's bits that a call with a key does not send.

        ``size`` is that of `wire_bits`, or for halves of `sharded_wire_bits`.
        """
        return 0

    def outer_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """The part of `wire_bits` that crosses outer axes; all bits without a hierarchy."""
        return self.wire_bits(size, n_workers, topology)

    def relative_error(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> float | None:
        """The approximate |error|² / |sum|² of a super-group; `None` if it is not known."""
        return None

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """A remedy if the relative error is too large, else `None`."""
        return None


class TellsLosses(Method):
    """A method that returns the errors of its encodings; `ErrorFeedback` needs such a method.

    If `Call.keep_error` is set, the outcome has ``lost``: the losses of all workers add up to the
    part that is missing in the sum, wherever the sum is finite.
    """

    __slots__ = ()

    def lost(self, n_workers: int, topology: Topology | None) -> float | None:
        """The approximate energy of all losses over that of the values sent (unitless).

        It is the value for the blocks with the largest losses; `None` if it is not known.
        """
        return None


class WrappedMethod(Method):
    """The base class of methods that wrap another one, with the same buckets and wire bits."""

    __slots__ = ()

    method: Any

    needs_state: ClassVar[bool] = True
    native_by_default: ClassVar[Any] = property(attrgetter("method.native_by_default"))
    kernels: Any = property(attrgetter("method.kernels"))
    most_bits: Any = property(attrgetter("method.most_bits"))
    scale_axis: Any = property(attrgetter("method.scale_axis"))
    declines: Any = property(attrgetter("method.declines"))
    limits: Any = property(attrgetter("method.limits"))
    check: Any = property(attrgetter("method.check"))
    native_dtype: Any = property(attrgetter("method.native_dtype"))
    wire_bits: Any = property(attrgetter("method.wire_bits"))
    relative_error: Any = property(attrgetter("method.relative_error"))

    def of_bucket(self, bucket: Bucket) -> Self:
        """This wrapper around the method for this bucket."""
        return replace(self, method=self.method.of_bucket(bucket))  # type: ignore[type-var]

    def pushed(self, n_workers: int) -> tuple[int, int] | None:
        """The bytes of a sum from which, and up to which, one push kernel is fastest over NVLink.

        `None`: none does a sum, or none was measured among so many GPUs.
        """
        return None

    def without_plan(self) -> Self:
        """See `Method`."""
        return replace(self, method=self.method.without_plan())  # type: ignore[type-var]


def compounded(errors: Iterable[float]) -> float:
    """The relative error of successive encodings, from that of each encoding (unitless).

    An encoding with the relative error e makes the energy 1 + e times as large. The error of the
    next encoding is proportional to this energy, which includes earlier errors.
    """
    return math.prod(1 + e for e in errors) - 1


def check_shards(method: Method, what: str) -> None:
    """Refuses a method that cannot scatter and gather, which ``what`` needs."""
    if not method.shards:
        raise NotImplementedError(
            f"method={method!r} does not do {what}; pass a quantiser without memory, such as "
            "dq.DynamiQ() or dq.contrib.MXFP8(), or reduce with dq.psum over a topology "
            "without them"
        )


# --- Methods over topologies ----------------------------------------------------------------------


Message = Any
"""A pytree of arrays: the contribution of one worker to the agreement, or that of all."""
Shared = Any
"""A pytree of arrays: the values that all workers know before the first hop."""
Layout = Any
"""The static sizes of a collective: `dynamiq.layout.Layout`, or `methods.plain.ChunkLayout`."""

ALONE = Direct(streams=1)
"""The topology under which a block is the only chunk of one worker."""


class HopMethod(TellsLosses):
    """Members of methods that run over topologies."""

    __slots__ = ()

    debug_checks: bool = False
    """Whether values that should be the same on all workers are compared at run time."""
    agreement: ClassVar[Literal["sum", "max"]] = "sum"
    """How the workers' messages are combined."""

    def layout(self, size: int, n_workers: int, topology: Topology) -> Layout:
        """Static sizes for ``size`` coordinates."""
        raise NotImplementedError

    def measure(self, x: Float[Array, " d"], layout: Layout) -> Message:
        """One worker's message; `None` if workers need not agree on anything."""
        return None

    def share(self, message: Message, layout: Layout, call: Call) -> Shared:
        """The shared values that are computed from all workers' message and the seed."""
        return ()

    def codec(
        self, x: Float[Array, " d"], shared: Shared, layout: Layout, call: Call
    ) -> ChunkCodec:
        """The operations on one worker's ``x``; the result, after the division, has its dtype.

        With `Call.keep_error` the codec returns the errors of its encodings.
        """
        raise NotImplementedError

    def facts(self, shared: Shared, result: Array, layout: Layout, call: Call) -> PayloadFacts:
        """The facts of the payloads, for `Metrics`."""
        return PayloadFacts()

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `Method` and `TellsLosses`."""
        self.warn(call)
        assert call.topology is not None
        layout = self.layout(x.shape[0], call.n_workers, call.topology)
        with jax.named_scope(f"{type(self).__name__.lower()}_all_reduce"):
            shared = self.agreed(x, layout, call)
            codec = self.codec(x, shared, layout, call)
            result, lost = all_reduce(call.topology, codec, call.axis, layout.chunks_per_worker)
            if lost is not None:
                lost = lost.reshape(-1)[: x.shape[0]]
            if self.debug_checks:
                assert_same_on_workers(result, call.axis, "the result")
            value = result.reshape(-1)[: x.shape[0]]
            facts = self.facts(shared, value, layout, call) if call.metrics else PayloadFacts()
            return Outcome(value, call.state, facts, lost)

    def warn(self, call: Call, collective: Collective = "all_reduce") -> None:
        """Warns of a relative error that is too large, and of slower kernels than the fastest."""
        advice = self.advice(call.n_workers, call.topology, collective)
        if advice is not None:
            warn(advice)
        kernels = self.kernels
        if kernels is not None and kernels.backend == "jnp" and kernels.reason:
            warn(
                f"{type(self).__name__} runs kernels that XLA makes, which take longer: "
                f"{kernels.reason}; pass backend='jnp' to choose them without this warning"
            )

    def agreed(self, x: Float[Array, " d"], layout: Layout, call: Call) -> Shared:
        """The shared values, after the small all-reduce of the messages."""
        message = self.measure(x, layout)
        if message is not None:
            topology, reduce = call.topology, getattr(call.axis, f"p{self.agreement}")
            if topology is not None and self.agreement == "sum":
                check_schedule(topology, call.n_workers)
                reduce = functools.partial(topology.sends.psum, call.axis)
            message = reduce(message)
        shared = self.share(message, layout, call)
        if self.debug_checks:
            assert_same_on_workers(shared, call.axis, "the plan")
        return shared

    # --- Blocks: encoded once, by one worker, for all_gather and all_to_all -----------------------

    def encode_block(self, x: Float[Array, " s"], seed: Seed) -> tuple[Message, Payload]:
        """A block as the only chunk of one worker: its message and its payload, which are sent."""
        layout, call = self.layout(x.shape[0], 1, ALONE), Call(Axis(()), ALONE, seed)
        message = self.measure(x, layout)
        codec = self.codec(x, self.share(message, layout, call), layout, call)
        chunk = jnp.zeros(1, jnp.int32)  # the block is chunk 0, in slot 0
        return message, codec.encode((), chunk, Encoder(0, 0, 0), None)[0]

    def decode_block(
        self, encoded: tuple[Message, Payload], size: int, dtype: Any, seed: Seed
    ) -> Float[Array, " s"]:
        """The block that `encode_block` encoded under the same seed, [size] of ``dtype``."""
        message, payload = encoded
        layout, call = self.layout(size, 1, ALONE), Call(Axis(()), ALONE, seed)
        shared = self.share(message, layout, call)
        codec = self.codec(jnp.zeros(size, dtype), shared, layout, call)
        chunk = jnp.zeros(1, jnp.int32)
        return codec.decode(payload, chunk, Encoder(0, chunk, chunk), None).reshape(-1)[:size]

    def block_bits(self, size: int) -> int:
        """Wire bits of a block of ``size`` coordinates, its message included."""
        x, seed = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint32)
        encoded = jax.tree.leaves(jax.eval_shape(self.encode_block, x, seed))
        return sum(8 * part.size * part.dtype.itemsize for part in encoded)

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """See `Method`; each worker's ``x`` is a block, with the seed of the worker's index."""
        with jax.named_scope(f"{type(self).__name__.lower()}_all_gather"):
            own = self.pack(x, call)
            return self.unpack(own, x.shape[0], x.dtype, call, invarying=invarying)

    def pack(self, x: Float[Array, " s"], call: Call) -> tuple[Message, Payload]:
        """See `Method`: the message and the payload of this worker's block."""
        self.warn(call._replace(topology=ALONE), "all_gather")
        return self.encode_block(x, fold_seed(call.seed, call.axis.index))

    def unpack(
        self,
        packed: tuple[Message, Payload],
        size: int,
        dtype: Any,
        call: Call,
        *,
        invarying: bool = False,
    ) -> Float[Array, "n s"]:
        """See `Method`."""
        axis, to = call.axis, "invarying" if invarying else "varying"
        gathered = jax.tree.map(lambda part: axis.all_gather(part, to=to), packed)

        def decode(encoded: tuple[Message, Payload], sender: Array) -> Array:
            return self.decode_block(encoded, size, dtype, fold_seed(call.seed, sender))

        return jax.vmap(decode)(gathered, jnp.arange(call.n_workers, dtype=jnp.int32))

    def exchanges(self, n_workers: int) -> bool:
        """Whether the method encodes blocks without an agreement between workers."""
        return self.shards and not self.needs_state

    def exchange_bits(self, size: int, n_workers: int) -> int:
        """Bits that one worker sends to exchange blocks of ``size`` coordinates."""
        return (n_workers - 1) * self.block_bits(size)

    def exchange(self, x: Float[Array, "n s"], call: Call) -> Float[Array, "n s"]:
        """Sends row j of ``x`` to worker j; row i of the result is from worker i.

        Every row is a block, with a seed of its sender and receiver.
        """
        n, size = x.shape
        axis, everyone = call.axis, jnp.arange(n, dtype=jnp.int32)
        # The exchanges are numbered by sender, then by receiver.
        seed = lambda sender, receiver: fold_seed(call.seed, sender * n + receiver)
        encode = lambda row, receiver: self.encode_block(row, seed(axis.index, receiver))
        arrived = axis.all_to_all(jax.vmap(encode)(x, everyone))

        def decode(encoded: tuple[Message, Payload], sender: Array) -> Array:
            return self.decode_block(encoded, size, x.dtype, seed(sender, axis.index))

        return jax.vmap(decode)(arrived, everyone)
