"""Plain codecs: chunks of consecutive coordinates, each encoded by itself, for any topology.

Shared scales and noise are looked up by a chunk's number and slot; there is no plan. The gradient's
d coordinates are cut into C chunks of m, the last ones filled up with zeros; a worker adds what
arrived to its own share in f32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.core.seeds import seed_of
from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.methods.base import Call, ring_bits
from dynamiq_jax.methods.hops import HopMethod, Message, Shared
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLayout:
    """The sizes of one all-reduce.

    Attributes:
      size: coordinates in the flat gradient (d).
      n_workers: workers (n).
      chunks_per_worker: chunks whose reduction ends at one worker.
      chunk_size: coordinates per chunk (m).
    """

    size: int
    n_workers: int
    chunks_per_worker: int
    chunk_size: int

    @property
    def chunks(self) -> int:
        """Chunks in all (C)."""
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
    """(payload, chunk) -> f32[m]: what is added up."""
    restore: Callable[[Float[Array, " m"], Array], Float[Array, " m"]] | None = None
    """(sum f32[m], chunk) -> f32[m]: out of the units in which values are added up, if others."""


def _with(codec: PlainCodec, total, arrived: Arrived, chunks) -> Float[Array, "c m"]:
    """The total with what arrived, one after the other: the order decides about last bits."""

    def add(total, numbered):
        number, payloads = numbered
        decoded = jax.vmap(codec.decode)(payloads, chunks)
        if arrived.skip is not None:  # not times zero: what is left out may be NaN
            decoded = jnp.where(number == arrived.skip, 0.0, decoded)
        return total + decoded, None

    k = jax.tree.leaves(arrived.payloads)[0].shape[0]
    numbered = jnp.arange(k, dtype=jnp.int32), arrived.payloads
    return lax.scan(add, total, numbered, unroll=min(k, 16))[0]


class PlainMethod(HopMethod):
    """The base of methods that encode chunks by themselves."""

    __slots__ = ()

    unit: Any
    """Coordinates of which chunks are multiples, an int."""

    def operations(
        self, x: Float[Array, " d"], shared: Shared, layout: ChunkLayout, call: Call
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """The gradient in units in which values are added up, perhaps padded, and their codec."""
        raise NotImplementedError

    def payload_bits(self, chunk_size: int) -> int:
        """Bits of the payload of a chunk."""
        raise NotImplementedError

    def agreed_bits(self, size: int) -> int:
        """Bits of a worker's message to the agreement."""
        return 0

    def layout(self, size: int, n_workers: int, topology: Topology) -> ChunkLayout:
        """Equal chunks, each of whole units."""
        streams = topology.chunks_per_worker(size)
        units = max(1, -(-size // (n_workers * streams * self.unit)))
        sizes = {"size": size, "n_workers": n_workers, "chunks_per_worker": streams}
        return ChunkLayout(**sizes, chunk_size=units * self.unit)

    def share(self, message: Message, layout: ChunkLayout, call: Call) -> Shared:
        """The seed of the rounding."""
        return seed_of(call.seed)

    def codec(
        self, x: Float[Array, " d"], shared: Shared, layout: ChunkLayout, call: Call
    ) -> ChunkCodec:
        """See `HopMethod`; results are [C, m]."""
        own, codec = self.operations(x, shared, layout, call)
        own = jnp.pad(own, (0, layout.padded_size - own.shape[0])).reshape(layout.chunks, -1)
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

        losses = jnp.zeros(own.shape, jnp.float32) if call.keep_error else None
        return ChunkCodec(encode, decode, lost=losses)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        assert topology is not None
        if n_workers == 1:
            return 0
        layout = self.layout(size, n_workers, topology)
        sent = layout.chunks_per_worker * sum(stage.sent for stage in topology.stages(n_workers))
        agreed = ring_bits(self.agreed_bits(size), n_workers)
        return sent * self.payload_bits(layout.chunk_size) + agreed
