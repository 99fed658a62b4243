"""The Global-QSGD method: all workers share one scale, so that sums of codes are codes.

Global-QSGD (Xin et al., 2023) divides by the largest magnitude M on any worker, so that codes of
different workers have the same meaning and a sum of codes is a code. Levels are the integers up to
s = floor((2^(b-1) - 1) / n): sums of n workers fit b bits with a sign, and only the share that a
worker adds is rounded.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.contrib.lanes import bit_words, pack_bits, uniform, unpack_bits
from dynamiq_jax.core.axis import seed_of
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.base import Call, clipped
from dynamiq_jax.methods.plain import ChunkLayout, PlainCodec, PlainMethod, chunk_noise
from dynamiq_jax.topologies import Topology

LEAST_SCALE = 2.0**-100
"""The limit below which a scale counts as zero, so that its inverse is finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalQSGD(PlainMethod):
    """Unbiased all-reduce of b-bit codes with a scale that all workers share.

    Attributes:
      bits: the bits of a code, its sign included, 3 to 8. A step is M / floor((2^(bits-1) - 1) /
        n), so steps get coarser with more workers.
      piece_size: the number of coordinates that share the scale, a multiple of 32. The paper has
        one scale for all coordinates; pieces separate leaves of different magnitude, and cost 32 /
        ``piece_size`` bits.
    """

    bits: int = 8
    piece_size: int = 4096

    unit = 32  # whole words of every bit plane
    agreement: ClassVar[Literal["sum", "max"]] = "max"

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 3 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits} must be an integer from 3 to 8, such as 8")
        if self.piece_size < 32 or self.piece_size % 32:
            raise ValueError(
                f"piece_size={self.piece_size} must be a positive multiple of 32, as 4096"
            )

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses more workers than the bits of a code allow."""
        if self._most // n_workers < 1:
            bits = n_workers.bit_length() + 1
            raise ValueError(
                f"bits={self.bits} have no step for {n_workers} workers: sums end at {self._most}; "
                + (f"pass bits={bits}" if bits <= 8 else "pass topology=dq.Hierarchical()")
            )

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        return 32 * bit_words(chunk_size, self.bits)

    def agreed_bits(self, size: int) -> int:
        """An f32 scale for every piece."""
        return 32 * -(-size // self.piece_size)

    def measure(self, x: Float[Array, " d"], layout: ChunkLayout) -> Array:
        """The largest magnitude of every piece, f32; infinite if a value is not finite."""
        spare = -x.shape[0] % self.piece_size
        pieces = jnp.pad(jnp.abs(x.astype(jnp.float32)), (0, spare)).reshape(-1, self.piece_size)
        finite = jnp.all(jnp.isfinite(pieces), axis=1)
        return jnp.where(finite, jnp.max(jnp.where(finite[:, None], pieces, 0.0), axis=1), jnp.inf)

    def share(self, message: Array, layout: ChunkLayout, call: Call) -> tuple[Array, Array]:
        """The seed of the rounding, and the largest magnitudes on any worker."""
        return seed_of(call.seed, message), message

    def operations(
        self, x: Float[Array, " d"], shared: tuple[Array, Array], layout: ChunkLayout, call: Call
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """An encode and a decode in units of the shared step."""
        seed, scale = shared
        unit = scale / (self._most // call.n_workers)
        unit = jnp.where(unit > LEAST_SCALE, unit, 0.0)
        known = jnp.isfinite(unit)
        inverse = jnp.where(known & (unit > 0), 1 / jnp.where(unit > 0, unit, 1.0), 0.0)

        def spread(of_pieces: Array) -> Array:
            return jnp.repeat(of_pieces, self.piece_size)[: x.shape[0]]

        own = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) * spread(inverse)
        # Rounded on its own, or a compiler may fuse it with the addition of what arrived.
        own = lax.reduce_precision(own, 8, 22)
        units = spread(jnp.where(known, unit, jnp.nan))
        units = jnp.pad(units, (0, layout.padded_size - x.shape[0])).reshape(layout.chunks, -1)
        words, most = chunk_noise(seed, call.n_slots, layout), self._most

        def encode(values, chunk, slot):
            share = uniform(words(chunk, slot))
            codes = jnp.clip(jnp.floor(values + share), -most, most).astype(jnp.int32)
            return pack_bits((codes + most).astype(jnp.uint32), self.bits)

        def decode(payload, chunk):
            codes = unpack_bits(payload, layout.chunk_size, self.bits).astype(jnp.int32)
            return (codes - most).astype(jnp.float32)

        def restore(values, chunk):
            return clipped(values * units[chunk])

        return own, PlainCodec(encode, decode, restore)

    @property
    def _most(self) -> int:
        """The largest magnitude of a code."""
        return 2 ** (self.bits - 1) - 1
