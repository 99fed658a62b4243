"""Uncompressed sums with bf16 or f32 on the wire: by `lax.psum`, or over topologies.

They are the baselines for compressed methods. With a topology the values take the same route as
compressed payloads, which shows the cost and the gain of compression itself.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.core.axis import rounded_to
from dynamiq_jax.methods.base import Call, HopMethod, Method, Outcome, Shared, ring_bits
from dynamiq_jax.methods.plain import ChunkLayout, PlainCodec, PlainMethod
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class _Uncompressed(PlainMethod):
    wire_dtype: ClassVar[Any] = jnp.float32
    native_by_default: ClassVar[bool] = True
    unit = 16  # whole sectors of a GPU's memory

    def native_dtype(self, dtype) -> jnp.dtype:
        """The method's dtype, for gradients of any dtype."""
        return jnp.dtype(self.wire_dtype)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`. The errors of a native sum's additions are not known."""
        if call.topology is not None:
            return HopMethod.all_reduce(self, x, call)
        total = call.axis.psum(x.astype(self.wire_dtype))
        if call.divisor != 1:
            total = total.astype(jnp.float32) / call.divisor
        own = x.astype(jnp.float32)
        lost = own - rounded_to(self.wire_dtype, own)
        return Outcome(total.astype(x.dtype), call.state, lost=lost)

    def layout(self, size: int, n_workers: int, topology: Topology) -> ChunkLayout:
        """See `PlainMethod`; a block of one worker is not padded."""
        if n_workers == 1:
            return ChunkLayout(size=size, n_workers=1, chunks_per_worker=1, chunk_size=size)
        return PlainMethod.layout(self, size, n_workers, topology)

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """See `Method`; without a topology, by `lax.psum_scatter`."""
        if call.topology is not None:
            return PlainMethod.reduce_scatter(self, x, call)
        return call.axis.psum_scatter(x.astype(self.wire_dtype)).astype(x.dtype)

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """See `Method`; without a topology, of a reduce-scatter or an all-gather."""
        if topology is None:
            return (n_workers - 1) * self.payload_bits(size)
        return PlainMethod.sharded_wire_bits(self, size, n_workers, topology)

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        return 8 * jnp.dtype(self.wire_dtype).itemsize * chunk_size

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends; without a topology, the least that `lax.psum` can send."""
        if topology is None:
            return ring_bits(self.payload_bits(size), n_workers)
        return PlainMethod.wire_bits(self, size, n_workers, topology)

    def operations(
        self, x: Float[Array, " d"], shared: Shared, layout: ChunkLayout, call: Call
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """Casts to unsigned integers, which no compiler can widen like floats."""
        words = jnp.uint16 if self.wire_dtype == jnp.bfloat16 else jnp.uint32

        def encode(values, chunk, slot):
            if self.wire_dtype == jnp.bfloat16:
                values = rounded_to(jnp.bfloat16, values)
            return lax.bitcast_convert_type(values.astype(self.wire_dtype), words)

        def decode(payload, chunk):
            return lax.bitcast_convert_type(payload, self.wire_dtype).astype(jnp.float32)

        return x, PlainCodec(encode, decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class BF16(_Uncompressed):
    """All-reduce with bf16 on the wire, half the bytes of f32; results have the leaf's dtype.

    ``topology=None`` means `lax.psum` of bf16, which adds like XLA's collectives. With a topology
    every hop adds in f32 and rounds partial sums to the nearest bf16, or to infinity beyond
    3.39e38.
    """

    wire_dtype: ClassVar[Any] = jnp.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class F32(_Uncompressed):
    """All-reduce with f32 on the wire, for leaves of any dtype; results have the leaf's dtype.

    ``topology=None`` means `lax.psum` of f32. Topologies differ only in the order of additions.
    """


def unless_plain(method: Method | None, default: Method) -> Method:
    """How everything but sums travels if the user passes only ``method``, for sums.

    `BF16` and `F32` then mean all that travels: gathers, differences and cotangents, too. No other
    place decides this.
    """
    return method if isinstance(method, BF16 | F32) else default
