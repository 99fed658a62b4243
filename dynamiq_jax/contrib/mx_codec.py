"""The codec of MX floats by fused kernels; the method that takes it is in `contrib.mx`."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt, UInt32

from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.plain import ChunkLayout
from pallas_kernels import mx_kernels, slot_noise
from pallas_kernels.mx import Form


def kernel_codec(
    x: Float[Array, " d"],
    seed: UInt[Array, " 2"],
    layout: ChunkLayout,
    call: Call,
    form: Form,
) -> ChunkCodec:
    """Binds the kernels to one gradient; with `Call.keep_error` encodings return their errors."""
    noise, lost = slot_noise(seed, call.n_slots, "independent"), None
    if call.keep_error:
        lost = jnp.zeros((layout.chunks, layout.chunk_size), jnp.float32)
    codec = _Kernels(x, noise, call, form)
    return ChunkCodec(codec.encode, codec.decode, codec.finish, lost=lost)


@dataclass(frozen=True, eq=False)
class _Kernels:
    """The operations of `ChunkCodec` by fused kernels, on one gradient."""

    x: Float[Array, " d"]
    noise: UInt32[Array, "slots 8"]
    call: Call
    form: Form

    def encode(
        self,
        arrived: tuple[Arrived, ...],
        chunks: Array,
        encoder: Encoder,
        lost: Array | None,
        skip: Array | None = None,
    ) -> tuple[Array, Array | None]:
        """See `ChunkCodec.encode`."""
        inputs, noise = self._inputs(arrived), self.noise[encoder.slot]
        if lost is None:
            return mx_kernels.encode(self.x, chunks, inputs, noise, self.form, skip), None
        payloads = mx_kernels.encode(self.x, chunks, inputs, noise, self.form)
        total = mx_kernels.add(self.x, chunks, inputs, self.form)
        everyone = jnp.arange(chunks.shape[0], dtype=jnp.int32)
        sent = mx_kernels.decode(payloads, everyone, total.reshape(-1), self.form)
        less = total - sent.reshape(total.shape)
        # What nobody needs of a worker's own chunk is overwritten by what its sum loses.
        lost = lost.at[chunks].set(less, unique_indices=True, mode="promise_in_bounds")
        return payloads, lost

    def decode(
        self, payloads: Array, chunks: Array, encoders: Encoder, into: Array | None
    ) -> Array:
        """See `ChunkCodec.decode`; the result is [blocks of ``x``, 32]."""
        return mx_kernels.decode(payloads, chunks, self.x, self.form, self.call.divisor, into)

    def finish(self, arrived: tuple[Arrived, ...], chunks: Array, into: Array | None) -> Array:
        """See `ChunkCodec.finish`; streams finish in order, so that rows are chunks in order."""
        inputs, divisor = self._inputs(arrived), self.call.divisor
        values = mx_kernels.add(self.x, chunks, inputs, self.form, divisor, self.x.dtype)
        return values if into is None else jnp.concatenate([into, values])

    def _inputs(self, arrived: tuple[Arrived, ...]) -> tuple[mx_kernels.Input, ...]:
        return tuple(mx_kernels.Input(a.payloads, a.skip) for a in arrived)
