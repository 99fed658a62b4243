"""Min-max quantisation: the codes of Flash Communication and QSDP, over any topology.

Flash Communication (Li et al., arXiv 2412.04964) quantises between the extremes of groups of 128,
to nearest, once for the all-to-all and once for the all-gather of `Direct`. QSDP (Markov et al.,
ICML 2023) does so in buckets of 1024 in fully sharded training: gradients are rounded at random on
their way through the reduce-scatter, weights on their way through the all-gather on a grid that is
shifted at random, with which its convergence is proved.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.comparators import minmax_codec as minmax
from dynamiq_jax.comparators.lanes import chunk_noise
from dynamiq_jax.comparators.minmax_codec import Rounding
from dynamiq_jax.core.seeds import Seed, seed_of
from dynamiq_jax.executors import reduce_scatter
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, ShardedMethod
from dynamiq_jax.methods.hops import Bound
from dynamiq_jax.methods.plain import ChunkLayout, PlainCodec, PlainMethod, sent_bits
from dynamiq_jax.topologies import Topology


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
        return 32 * minmax.payload_words(chunk_size, self.bits, self.bucket_size)

    def operations(
        self, x: Float[Array, " d"], shared: Array, bound: Bound
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """See `PlainMethod`."""
        return x, self._plain(bound.layout, shared, bound.n_slots)

    def _plain(self, layout: ChunkLayout, seed: Array, slots: int) -> PlainCodec:
        options = {"bits": self.bits, "bucket_size": self.bucket_size, "rounding": self.rounding}
        stochastic = self.rounding == "stochastic"
        # A shift is that of all encodings: their decoder knows it.
        words = chunk_noise(seed, slots if stochastic else 1, layout)

        def drawn(chunk, slot) -> Array | None:
            return None if self.rounding == "nearest" else words(chunk, slot if stochastic else 0)

        def encode(values, chunk, slot):
            return minmax.encode(values, drawn(chunk, slot), **options)

        def decode(payload, chunk):
            noise = None if stochastic else drawn(chunk, 0)
            return minmax.decode(payload, noise, layout.chunk_size, **options)

        return PlainCodec(encode, decode)

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
