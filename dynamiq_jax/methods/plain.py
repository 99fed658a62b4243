"""Quantisers: one class with `encode` and `decode`, from which every collective is derived.

Data flow. A *chunk* is m consecutive coordinates, a multiple of the method's ``unit``; a *payload*
is an encoded chunk, a pytree of arrays whose shapes depend only on m. A quantiser defines how a
chunk becomes a payload (`PlainMethod.encode`), how a payload becomes a chunk
(`PlainMethod.decode`), and how a decoded chunk is added to a sum (`PlainMethod.add`, f32 addition).
The library does the rest:

* **All-reduce** (`HopMethod.all_reduce`). The d coordinates are padded with zeros to C = n k
  chunks, k for each of the n workers (``chunks_per_worker``). The topology defines the route of
  chunk ``owner * k + stream``. Every worker on the route decodes the payloads that arrived, adds
  them to its own share of the chunk, and encodes the sum. The owner encodes the finished sum once,
  and all workers, the owner included, decode that payload, so all have the same bits.
* **Reduce-scatter** (`PlainMethod.reduce_scatter`) is the same without the last step: x is [n, s],
  row i is padded to the k chunks of worker i, and the owner keeps its sum without encoding it.
* **All-gather** (`HopMethod.all_gather`). Worker i encodes its shard once, as a *block*: the only
  chunk of one worker. Payloads are gathered, and all workers decode all blocks.
* **All-to-all** (`HopMethod.exchange`). Worker i encodes row j of x as a block for worker j.

`psum` and data parallel training use the first; `psum_scatter`, sharded updates (ZeRO-1) and FSDP
use the next two, also in a pipeline; `ErrorFeedback` uses ``values - decode(encode(values))`` of
every encoding. Wire bits are computed from the shapes of payloads (`PlainMethod.payload_bits`).

If workers must agree on a value first, such as a common scale, the method overrides `measure`,
`share` and `operations`. There is no plan: the agreement and the noise are looked up by a chunk's
index and its slot (the index of an encoding of the chunk).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt, UInt32

from dynamiq_jax.core.axis import seed_of
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.executors.collectives import reduce_scatter
from dynamiq_jax.methods.base import Call, HopMethod, Message, Shared, ring_bits
from dynamiq_jax.topologies import Topology
from pallas_kernels.hashing import Noise, noise_words, slot_noise


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLayout:
    """The sizes of one all-reduce.

    Attributes:
      size: coordinates in the flat gradient (d).
      n_workers: workers (n).
      chunks_per_worker: chunks whose owner is one worker (k).
      chunk_size: coordinates per chunk (m).
    """

    size: int
    n_workers: int
    chunks_per_worker: int
    chunk_size: int

    @property
    def chunks(self) -> int:
        """The number of all chunks (C)."""
        return self.n_workers * self.chunks_per_worker

    @property
    def padded_size(self) -> int:
        """Coordinates with padding, C * m."""
        return self.chunks * self.chunk_size


class PlainCodec(NamedTuple):
    """A codec of single chunks; ``chunk`` and ``slot`` are int32 scalars."""

    encode: Callable[[Float[Array, " m"], Array, Array | int], Payload]
    """(values f32[m], chunk, slot) -> payload, of the same shapes for all chunks."""
    decode: Callable[[Payload, Array], Float[Array, " m"]]
    """(payload, chunk) -> f32[m]: the values that are added up."""
    restore: Callable[[Float[Array, " m"], Array], Float[Array, " m"]] | None = None
    """(sum f32[m], chunk) -> f32[m]: converts from the units in which values are added up."""
    add: Callable[[Array, Array], Array] = operator.add
    """(sum f32, decoded f32) -> f32: adds a decoded payload to a sum."""


def chunk_noise(
    seed: UInt[Array, " 2"], n_slots: int, layout: ChunkLayout
) -> Callable[[Array, Array | int], UInt32[Array, " m"]]:
    """The function (chunk, slot) -> a uniform word per coordinate, independent between slots.

    Chunks are multiples of 4 coordinates.
    """
    rows = slot_noise(seed, n_slots, "independent")

    def words(chunk, slot):
        first = jnp.asarray(chunk, jnp.uint32) * (layout.chunk_size // 4)
        return coordinate_noise(rows[slot], layout.chunk_size, first)

    return words


def coordinate_noise(
    row: UInt32[Array, " 8"], size: int, first_quad: Array | int = 0
) -> UInt32[Array, " size"]:
    """A uniform word per coordinate, from a row of `pallas_kernels.slot_noise`."""
    within = jnp.arange(size, dtype=jnp.uint32)
    return noise_words(first_quad + within // 4, within % 4 * 8, Noise(*row), "independent")


def _with(codec: PlainCodec, total, arrived: Arrived, chunks) -> Float[Array, "c m"]:
    """The total plus arrivals, one after the other: their order determines the last bits."""

    def add(total, numbered):
        number, payloads = numbered
        decoded = jax.vmap(codec.decode)(payloads, chunks)
        if arrived.skip is not None:  # not times zero: what is left out may be NaN
            decoded = jnp.where(number == arrived.skip, 0.0, decoded)
        return codec.add(total, decoded), None

    k = jax.tree.leaves(arrived.payloads)[0].shape[0]
    numbered = jnp.arange(k, dtype=jnp.int32), arrived.payloads
    return lax.scan(add, total, numbered, unroll=min(k, 16))[0]


def _unit_of(method: "PlainMethod") -> int:
    """``method.unit`` as an int; refuses a missing, non-integer or nonpositive one."""
    name, such = type(method).__name__, "such as unit=64"
    try:
        unit = method.unit
    except AttributeError as error:
        if hasattr(type(method), "unit"):  # a property, with an error of its own
            raise
        raise ValueError(
            f"{name} has no unit; give the class the number of coordinates of which its chunks "
            f"are multiples, a multiple of 4, {such}"
        ) from error
    try:
        number = operator.index(unit)
    except TypeError:
        kind = type(unit).__name__
        raise ValueError(
            f"{name}.unit={unit!r} is of type {kind}, and counts coordinates; pass an int that "
            f"is a multiple of 4, {such}"
        ) from None
    if number < 1:
        raise ValueError(f"{name}.unit={number} is not positive; pass a multiple of 4, {such}")
    return number


def _with_arrays(payload: Payload, method: "PlainMethod", chunk_size: int) -> Payload:
    """The payload of a chunk of this size; refuses a payload without arrays."""
    if not jax.tree.leaves(payload):
        raise ValueError(
            f"{type(method).__name__}.encode returned {payload!r} for a chunk of {chunk_size} "
            "coordinates, which has no arrays; return the payload, a pytree of arrays"
        )
    return payload


def _checked(codec: PlainCodec, method: "PlainMethod", chunk_size: int) -> PlainCodec:
    """The codec; refuses payloads without arrays, and decoded chunks of another shape."""

    def encode(values: Array, chunk: Array, slot: Array | int) -> Payload:
        return _with_arrays(codec.encode(values, chunk, slot), method, chunk_size)

    def decode(payload: Payload, chunk: Array) -> Array:
        values = codec.decode(payload, chunk)
        found = jax.tree.map(jnp.shape, values)
        if found != (chunk_size,):
            told = "None" if values is None else f"shape {found}"
            raise ValueError(
                f"{type(method).__name__}.decode returned {told} for a chunk of {chunk_size} "
                f"coordinates; return its values, of shape {(chunk_size,)}"
            )
        return values

    return codec._replace(encode=encode, decode=decode)


class PlainMethod(HopMethod):
    """The base class of quantisers: methods that encode each chunk separately.

    A subclass defines ``unit``, `encode` and `decode`. If its workers must agree on a value first,
    it overrides `agreement`, `measure`, `share`, `operations`, `payload_bits` and `agreed_bits`.
    """

    __slots__ = ()

    shards: ClassVar[bool] = True

    unit: Any
    """The size of every chunk is a multiple of this integer (also NumPy's), a multiple of 4."""

    def encode(self, values: Float[Array, " m"], noise: UInt32[Array, " m"]) -> Payload:
        """The payload of a chunk: a pytree of arrays, with equal shapes for all chunks of size m.

        Args:
          values: f32[m], the coordinates to send; m is a multiple of ``unit``.
          noise: uint32[m], uniform words for stochastic rounding, new for each encoding. They
            depend only on the caller's key; without a key they are the same in every step.

        Returns:
          The payload, with at least one array; otherwise the library raises ValueError.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has neither encode and decode nor operations; write "
            "encode(self, values, noise) and decode(self, payload, size)"
        )

    def decode(self, payload: Payload, size: int) -> Float[Array, " m"]:
        """The f32[size] values of the payload of a chunk of ``size`` coordinates.

        The library raises ValueError if they have another shape.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has encode and no decode; write decode(self, payload, size)"
        )

    def add(self, total: Float[Array, "*c"], arrived: Float[Array, "*c"]) -> Float[Array, "*c"]:
        """The sum plus one decoded chunk, f32; ``add(total, 0)`` must be ``total``."""
        return total + arrived

    def operations(
        self, x: Float[Array, " d"], shared: Shared, layout: ChunkLayout, call: Call
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """The gradient, in the units in which values are added up, maybe padded; and its codec."""
        unit = _unit_of(self)
        if unit % 4:
            raise ValueError(
                f"{type(self).__name__}.unit={unit} is not a multiple of 4, and one word of "
                f"noise serves 4 coordinates; pass unit={-(-unit // 4) * 4}"
            )
        words, size = chunk_noise(shared, call.n_slots, layout), layout.chunk_size

        def encode(values: Array, chunk: Array, slot: Array | int) -> Payload:
            return self.encode(values, words(chunk, slot))

        def decode(payload: Payload, chunk: Array) -> Array:
            return self.decode(payload, size)

        return x, PlainCodec(encode, decode, add=self.add)

    def payload_bits(self, chunk_size: int) -> int:
        """Bits of the payload of a chunk, from the shapes that `encode` returns."""
        values = jax.ShapeDtypeStruct((chunk_size,), jnp.float32)
        noise = jax.ShapeDtypeStruct((chunk_size,), jnp.uint32)
        payload = jax.eval_shape(self.encode, values, noise)
        parts = jax.tree.leaves(_with_arrays(payload, self, chunk_size))
        return sum(8 * part.size * part.dtype.itemsize for part in parts)

    def agreed_bits(self, size: int) -> int:
        """Bits of a worker's message for the agreement."""
        return 0

    def layout(self, size: int, n_workers: int, topology: Topology) -> ChunkLayout:
        """Chunks of equal size, each with whole units."""
        streams, unit = topology.chunks_per_worker(size), _unit_of(self)
        units = max(1, -(-size // (n_workers * streams * unit)))
        sizes = {"size": size, "n_workers": n_workers, "chunks_per_worker": streams}
        return ChunkLayout(**sizes, chunk_size=units * unit)

    def share(self, message: Message, layout: ChunkLayout, call: Call) -> Shared:
        """The seed of the rounding."""
        return seed_of(call.seed)

    def codec(
        self, x: Float[Array, " d"], shared: Shared, layout: ChunkLayout, call: Call
    ) -> ChunkCodec:
        """See `HopMethod`; results are [C, m]."""
        own, codec = self.operations(x, shared, layout, call)
        own = jnp.pad(own, (0, layout.padded_size - own.shape[0])).reshape(layout.chunks, -1)
        codec = _checked(codec, self, own.shape[1])
        decoded = jax.vmap(codec.decode)
        restored = jax.vmap(codec.restore) if codec.restore else lambda values, chunks: values

        def add(arrived: tuple[Arrived, ...], chunks) -> Array:
            total = own.at[chunks].get(mode="promise_in_bounds").astype(jnp.float32)
            for inputs in arrived:
                total = _with(codec, total, inputs, chunks)
            return total

        def encode(arrived, chunks, encoder: Encoder, lost, skip=None):
            del skip  # encoding what nobody needs does no harm
            values = add(arrived, chunks)
            payloads = jax.vmap(codec.encode, (0, 0, None))(values, chunks, encoder.slot)
            if call.keep_error:
                less = restored(values - decoded(payloads, chunks), chunks)
                # What nobody needs of a worker's own chunk is overwritten by what its sum loses.
                at = lost.at[chunks]
                lost = at.set(less, unique_indices=True, mode="promise_in_bounds")
            return payloads, lost

        def decode(payloads, chunks, encoders, into):
            values = restored(decoded(payloads, chunks), chunks)
            values = (values / call.divisor if call.divisor != 1 else values).astype(x.dtype)
            if into is None:
                into = jnp.zeros((layout.chunks, layout.chunk_size), x.dtype)
            return into.at[chunks].set(values, unique_indices=True, mode="promise_in_bounds")

        def finish(arrived, chunks, into):
            values = restored(add(arrived, chunks), chunks)
            values = (values / call.divisor if call.divisor != 1 else values).astype(x.dtype)
            # Streams finish in order, so that rows [k, m] are the worker's chunks in order.
            return values if into is None else jnp.concatenate([into, values])

        losses = jnp.zeros(own.shape, jnp.float32) if call.keep_error else None
        return ChunkCodec(encode, decode, finish, lost=losses)

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """See `Method`; the owner's sums are not encoded again."""
        assert call.topology is not None
        self.warn(call, "reduce_scatter")
        n, size = x.shape
        with jax.named_scope(f"{type(self).__name__.lower()}_reduce_scatter"):
            layout = self.layout(n * size, n, call.topology)
            # Row i fills the chunks of worker i: [n, s] becomes [n, k m], padded with zeros.
            layout = replace(layout, size=layout.padded_size)
            row = layout.chunks_per_worker * layout.chunk_size
            flat = jnp.pad(x, ((0, 0), (0, row - size))).reshape(-1)
            codec = self.codec(flat, self.agreed(flat, layout, call), layout, call)
            streams = layout.chunks_per_worker
            total = reduce_scatter(call.topology, codec, call.axis, streams)
            return total.reshape(-1)[:size]

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits to reduce-scatter slices of ``size``; without a topology, to all-gather them."""
        if n_workers == 1:
            return 0
        if topology is None:
            return (n_workers - 1) * self.block_bits(size)
        layout = self.layout(n_workers * size, n_workers, topology)
        sent = sum(stage.sent for stage in topology.stages(n_workers)[:-1])  # no sinks
        agreed = ring_bits(self.agreed_bits(layout.padded_size), n_workers)
        payload = self.payload_bits(layout.chunk_size)
        return layout.chunks_per_worker * sent * payload + agreed

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        assert topology is not None
        if n_workers == 1:
            return 0
        layout = self.layout(size, n_workers, topology)
        sent = layout.chunks_per_worker * sum(stage.sent for stage in topology.stages(n_workers))
        agreed = ring_bits(self.agreed_bits(size), n_workers)
        return sent * self.payload_bits(layout.chunk_size) + agreed
