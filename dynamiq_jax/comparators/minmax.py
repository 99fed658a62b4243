"""Min-max quantisation: the codes of Flash Communication and QSDP, over any topology.

Flash Communication (Li et al., arXiv 2412.04964) quantises between the extremes of groups of 128,
to nearest, once for the all-to-all and once for the all-gather of `Direct`. QSDP (Markov et al.,
ICML 2023) does so in buckets of 1024 in fully sharded training: gradients are rounded at random on
their way through the reduce-scatter, weights on their way through the all-gather on a grid that is
shifted at random, with which its convergence is proved.

A bucket of G values has an *offset*, its minimum, and a *step*, its range over 2^b - 1, both bf16:
the offset is rounded down and the step up, so that the levels enclose all values. A payload is one
array of words: those of offsets and steps, one for each bucket, then codes of b bits in bit planes.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, UInt32

from dynamiq_jax.comparators.lanes import (
    bit_words,
    chunk_noise,
    floats_of,
    pack_bits,
    uniform,
    unpack_bits,
    words_of,
)
from dynamiq_jax.core.seeds import Seed, seed_of
from dynamiq_jax.executors import reduce_scatter
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, ShardedMethod
from dynamiq_jax.methods.hops import Bound
from dynamiq_jax.methods.plain import ChunkLayout, PlainCodec, PlainMethod, sent_bits
from dynamiq_jax.topologies import Topology

Rounding = Literal["nearest", "stochastic", "shift"]
"""To the nearest level (biased); up or down at random; or to the nearest level of a grid that is
shifted at random, by the same share of a step for the whole bucket, which the decoder knows."""

MOST = 2.0**126
"""Where values are cut, so that the range of a bucket is finite."""
LEAST_RANGE = 2.0**-117
"""Where the range of a bucket counts as zero, so that no step is subnormal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinMax(PlainMethod, ShardedMethod):
    """All-reduce of ``bits``-bit codes between the extremes of buckets, which are sent with them.

    Every encoding of a partial sum has extremes of its own; values beyond 2^126 are cut. Zero is
    not a level in general: a bucket that holds more than zeros moves its zeros. Flash Communication
    is ``rounding="nearest"`` over `Direct`; QSDP is ``bits=8, bucket_size=1024``, for weights with
    ``rounding="shift"``.

    Attributes:
      bits: of a code, 1 to 8; on the wire 32 / ``bucket_size`` more.
      bucket_size: coordinates that share offset and step, a multiple of 4.
      rounding: "nearest" (biased), "stochastic" (unbiased, twice the squared error and more) or
        "shift" (unbiased, at the squared error of "nearest"; the error of a bucket is the same
        function of one random number in all coordinates). Pass a new key in every step for the
        last two: without one, the noise is always the same.
    """

    bits: int = 4
    bucket_size: int = 128
    rounding: Rounding = "stochastic"

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} must be an integer from 1 to 8, such as 4")
        if self.bucket_size < 4 or self.bucket_size % 4:
            raise ValueError(
                f"bucket_size={self.bucket_size} must be a positive multiple of 4, such as 128"
            )

    @property
    def unit(self) -> int:
        """Whole buckets."""
        return self.bucket_size

    def share(self, message: None, seed: Seed, bound: Bound) -> Array:
        """The seed of the rounding."""
        return seed_of(seed)

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        return 32 * (chunk_size // self.bucket_size + bit_words(chunk_size, self.bits))

    def operations(
        self, x: Float[Array, " d"], shared: Array, bound: Bound
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """See `PlainMethod`."""
        return x, self._plain(bound.layout, shared, bound.n_slots)

    def _plain(self, layout: ChunkLayout, seed: Array, slots: int) -> PlainCodec:
        stochastic = self.rounding == "stochastic"
        # A shift is that of all encodings: their decoder knows it.
        words = chunk_noise(seed, slots if stochastic else 1, layout)

        def encode(values, chunk, slot):
            if self.rounding == "nearest":
                return self.encoded(values, None)
            return self.encoded(values, words(chunk, slot if stochastic else 0))

        def decode(payload, chunk):
            noise = words(chunk, 0) if self.rounding == "shift" else None
            return self.decoded(payload, noise, layout.chunk_size)

        return PlainCodec(encode, decode)

    def encoded(
        self, x: Float[Array, " m"], noise: UInt32[Array, " m"] | None
    ) -> UInt32[Array, " words"]:
        """The payload of values in f32, m a multiple of the bucket size.

        ``noise`` is a uniform word for every value, unless values are rounded to nearest; a shift
        takes the first of its bucket.
        """
        top = (1 << self.bits) - 1
        x = x.astype(jnp.float32).reshape(-1, self.bucket_size)
        finite = jnp.all(jnp.isfinite(x), axis=1)  # the least of numbers may be taken without NaN
        values = jnp.where(finite[:, None], jnp.clip(x, -MOST, MOST), 0.0)
        offset = _as_bf16(jnp.min(values, axis=1), up=False)
        span = jnp.max(values, axis=1) - offset
        step = _as_bf16(jnp.where(span > LEAST_RANGE, span / top, 0.0), up=True)
        scaled = jnp.where(step > 0, 1.0 / jnp.where(step > 0, step, 1.0), 0.0)[:, None]
        # Rounded on its own, or a compiler may fuse it with the addition of the noise.
        scaled = lax.reduce_precision((values - offset[:, None]) * scaled, 8, 22)
        if noise is None:
            codes = jnp.round(scaled)
        else:
            drawn = noise.reshape(values.shape)
            share = uniform(drawn) if self.rounding == "stochastic" else self._shift(drawn)
            codes = jnp.floor(scaled + share)
        codes = jnp.clip(codes, 0, top).astype(jnp.uint32)
        offset, step = (jnp.where(finite, part, jnp.nan) for part in (offset, step))
        words = words_of(offset) >> 16 | words_of(step) & jnp.uint32(0xFFFF0000)
        return jnp.concatenate([words, pack_bits(codes.reshape(-1), self.bits)])

    def decoded(
        self, payload: UInt32[Array, " words"], noise: UInt32[Array, " m"] | None, size: int
    ) -> Float[Array, " m"]:
        """The ``size`` values of a payload, f32; ``noise`` is read for a shift alone."""
        buckets = size // self.bucket_size
        words = payload[:buckets, None]
        offset, step = floats_of(words << 16), floats_of(words & jnp.uint32(0xFFFF0000))
        levels = unpack_bits(payload[buckets:], size, self.bits).reshape(buckets, -1)
        levels = levels.astype(jnp.float32)
        if self.rounding == "shift":
            assert noise is not None
            levels = levels + (0.5 - self._shift(noise.reshape(levels.shape)))
        return (offset + levels * step).reshape(-1)

    def _shift(self, words: UInt32[Array, "B G"]) -> Float[Array, "B 1"]:
        """The noise of every bucket, by its first word: a multiple of 2^(bits - 16) in (0, 1).

        It has so few bits that a level times a step is exact. Fused with an addition or not, it is
        the same.
        """
        odd = (words[:, :1] >> (self.bits + 17)) * 2 + 1
        return odd.astype(jnp.float32) * jnp.float32(2.0 ** (self.bits - 16))

    def sharded_wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits to reduce-scatter slices of ``size``; without a topology, to all-gather them."""
        if n_workers == 1:
            return 0
        layout = self._slices(size, n_workers, topology)
        payload = self.payload_bits(layout.chunk_size)
        if topology is None:
            return payload * (n_workers - 1)
        return sent_bits(payload, layout, topology.stages(n_workers)[:-1])

    def reduce_scatter(self, x: Float[Array, "n s"], call: Call) -> Float[Array, " s"]:
        """Row ``me`` of the sum of ``x`` over the axis, on every worker its own."""
        assert call.topology is not None
        size, n = x.shape[1], call.n_workers
        layout = self._slices(size, n, call.topology)
        with jax.named_scope("minmax_reduce_scatter"):
            spare = layout.chunks_per_worker * layout.chunk_size - size
            rows = jnp.pad(x, ((0, 0), (0, spare))) if spare else x
            bound = Bound(layout, call.topology, n)
            codec = self.codec(rows.reshape(-1), seed_of(call.seed), bound, dtype=x.dtype)
            streams = layout.chunks_per_worker
            result, _ = reduce_scatter(call.topology, codec, call.axis, streams)
            return result.reshape(-1)[:size]

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """All workers' ``x``, each encoded once by itself; see `ShardedMethod`."""
        size, n, axis = x.shape[0], call.n_workers, call.axis
        layout = self._slices(size, n, None)
        with jax.named_scope("minmax_all_gather"):
            codec = self._plain(layout, seed_of(call.seed), 1)
            own = jnp.pad(x.astype(jnp.float32), (0, layout.chunk_size - size))
            payload = codec.encode(own, axis.index, 0)
            payloads = axis.all_gather(payload, to="invarying" if invarying else "varying")
            values = jax.vmap(codec.decode)(payloads, jnp.arange(n, dtype=jnp.int32))
            return values[:, :size].astype(x.dtype)

    def _slices(self, size: int, n_workers: int, topology: Topology | None) -> ChunkLayout:
        """The chunks of slices of ``size`` coordinates, each of whole chunks."""
        streams = topology.chunks_per_worker(size * n_workers) if topology else 1
        chunk = max(1, -(-size // (streams * self.bucket_size))) * self.bucket_size
        return ChunkLayout(
            size=n_workers * streams * chunk,
            n_workers=n_workers,
            chunks_per_worker=streams,
            chunk_size=chunk,
        )


def _as_bf16(x: Float[Array, " n"], *, up: bool) -> Float[Array, " n"]:
    """The next number that bf16 has, upwards or downwards."""
    bits = words_of(x)
    cut = bits & jnp.uint32(0xFFFF0000)
    away = (bits != cut) & ((bits >> 31 == 0) == up)
    return floats_of(cut + away.astype(jnp.uint32) * 0x10000)
