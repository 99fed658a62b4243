"""MXFP8, MXFP6 and MXFP4: sums of OCP Microscaling floats, whose blocks of 32 share a scale.

Two ways to add up. *Recompress*: every encoding of a partial sum has scales of its own, sent with
it. *Shared scale*: workers first agree on the largest scale 2^E of every block; elements of
u = mu v / 2^E are then added and cast again, hop by hop, without new scales. The *multiplier* mu
makes room for the sum: at max / (2^(emax + 1) n), the *safe* one, no sum of n workers can
saturate, since |v| / 2^E < 2^(emax + 1). It is larger where gradients cancel or blocks peak on few
workers, which FP8-LM's automatic scaling finds out.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, UInt, UInt8

from dynamiq_jax.comparators import mx_codec as mx
from dynamiq_jax.comparators.lanes import bit_words, chunk_noise, pack_bits, unpack_bits
from dynamiq_jax.core.seeds import Seed, seed_of
from dynamiq_jax.executors import Carry
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.hops import Bound
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.methods.plain import PlainCodec, PlainMethod


class ScaleState(NamedTuple):
    """The state of ``sum="shared-scale"``, equal on all workers."""

    mu: Float[Array, ""]
    """The multiplier, f32."""


class MXShared(NamedTuple):
    """The facts that all workers know ahead of the first encoding."""

    seed: UInt[Array, " 2"]
    """The seed of the rounding."""
    scales: UInt8[Array, " blocks"] | None
    """With shared scales: the largest of every block, those of padding included."""
    mu: Float[Array, ""] | None
    """With shared scales: the multiplier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _MX(PlainMethod):
    element: str
    sum: Literal["recompress", "shared-scale"] = "recompress"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    max_saturated: float = 1e-5
    growth: float = 2 ** (1 / 1000)

    agreement: ClassVar[Literal["sum", "max"]] = "max"

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        if not 0 <= self.max_saturated < 1:
            raise ValueError(f"max_saturated={self.max_saturated} is not a fraction; pass 1e-5")
        if not 1 <= self.growth <= 2:
            raise ValueError(f"growth={self.growth} must lie between 1 and 2; pass 2 ** (1 / 1000)")

    def init(self, size: int, n_workers: int) -> ScaleState | tuple[()]:
        """The safe multiplier for shared scales; nothing else has a state."""
        return () if self.sum == "recompress" else ScaleState(self._safe_multiplier(n_workers))

    @property
    def unit(self) -> int:
        """Whole words of scale codes."""
        return 4 * mx.BLOCK

    def payload_bits(self, chunk_size: int) -> int:
        """See `PlainMethod`."""
        if self.sum == "recompress":
            return 32 * mx.payload_words(chunk_size, self._element)
        return 32 * bit_words(chunk_size, self._element.bits)

    def agreed_bits(self, size: int) -> int:
        """A shared scale code per block. A state's multiplier, another 32 bits, is not counted."""
        return 0 if self.sum == "recompress" else 8 * -(-size // mx.BLOCK)

    def measure(
        self, x: Float[Array, " d"], bound: Bound, state: ScaleState | tuple[()] = ()
    ) -> tuple[UInt8[Array, " blocks"], ScaleState | tuple[()]] | None:
        """Where scales are shared: those of all blocks, and the state.

        The latter is the same on all workers, but for all that JAX knows it varies.
        """
        if self.sum == "recompress":
            return None
        return mx.scale_codes(x, self._element), state

    def share(
        self,
        message: tuple[UInt8[Array, " blocks"], ScaleState | tuple[()]] | None,
        seed: Seed,
        bound: Bound,
    ) -> MXShared:
        """The largest scales."""
        if message is None:
            return MXShared(seed_of(seed), None, None)
        codes, state = message
        mu = state.mu if state else self._safe_multiplier(bound.n_workers)
        seed = seed_of(seed, codes[None].astype(jnp.float32))
        blocks = bound.layout.padded_size // mx.BLOCK
        return MXShared(seed, jnp.pad(codes, (0, blocks - codes.shape[0])), mu)

    def operations(
        self, x: Float[Array, " d"], shared: MXShared, bound: Bound
    ) -> tuple[Float[Array, " p"], PlainCodec]:
        """Payloads of `mx.encode`; with shared scales, codes of what is in units of elements."""
        element, size, noise = self._element, bound.layout.chunk_size, None
        if self.rounding == "stochastic":
            noise = chunk_noise(shared.seed, bound.n_slots, bound.layout)

        def drawn(chunk, slot) -> Array | None:
            return None if noise is None else noise(chunk, slot)

        if shared.scales is None:
            return x, PlainCodec(
                encode=lambda values, chunk, slot: mx.encode(values, element, drawn(chunk, slot)),
                decode=lambda payload, chunk: mx.decode(payload, size, element),
            )
        mu, scales = shared.mu, shared.scales.reshape(bound.layout.chunks, -1)
        assert mu is not None

        def encode(values, chunk, slot):
            return pack_bits(mx.quantize(values, element, drawn(chunk, slot)), element.bits)

        def decode(payload, chunk):
            return mx.dequantize(unpack_bits(payload, size, element.bits), element)

        def restore(values, chunk):
            values = values.reshape(-1, mx.BLOCK) / mu
            return mx.from_elements(values, scales[chunk]).reshape(-1)

        def at_largest(payload, chunk):
            """Everyone decodes all sums, so that all workers count alike by themselves."""
            codes = unpack_bits(payload, size, element.bits).reshape(-1, mx.BLOCK)
            # The highest bit of a code is the sign; the rest is the magnitude.
            largest = codes & ((1 << element.bits - 1) - 1) == element.max_code
            finite = scales[chunk] != mx.NAN_SCALE
            return jnp.sum(largest & finite[:, None], dtype=jnp.int32)

        own = mx.to_elements(x, shared.scales[: -(-x.shape[0] // mx.BLOCK)]) * mu
        return own.reshape(-1), PlainCodec(encode, decode, restore, at_largest)

    def after(
        self, shared: MXShared, carry: Carry, bound: Bound, state: ScaleState | tuple[()]
    ) -> ScaleState | tuple[()]:
        """The next multiplier by FP8-LM's rule, from the number of sums at the largest magnitude.

        At the largest mu every block's largest value saturates by itself.
        """
        if not state:
            return state
        assert shared.mu is not None
        largest = self._element.max_value / 2**self._element.emax
        grown = jnp.minimum(shared.mu * self.growth, largest)
        many = carry.astype(jnp.float32) > self.max_saturated * bound.layout.size
        return ScaleState(jnp.where(many, shared.mu / 2, grown))

    def facts(
        self, shared: MXShared, carry: Carry, result: Array, bound: Bound, divisor: int
    ) -> PayloadFacts:
        """Saturated sums, where they are counted."""
        if shared.scales is None:
            return PayloadFacts()
        return PayloadFacts(saturated=carry.astype(jnp.float32))

    @property
    def _element(self) -> mx.Element:
        return mx.ELEMENTS[self.element]

    def _safe_multiplier(self, n_workers: int) -> Float[Array, ""]:
        element = self._element
        return jnp.float32(element.max_value / (2 ** (element.emax + 1) * n_workers))


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8(_MX):
    """All-reduce of 8-bit floats in blocks of 32 with a power-of-two scale: 8.25 bits per value.

    A block that is not finite does not touch the state. With shared scales, sums whose nearest
    value exceeds f32 become infinities.

    Attributes:
      element: "e4m3" or "e5m2", by bits of exponent and mantissa.
      sum: "recompress" encodes every partial sum with scales of its own; "shared-scale" shares the
        largest scale of every block first, in an all-reduce of 8 bits per block, and adds elements
        without new ones. The latter takes `init_state`'s state to find how large elements can be;
        without it, they have room for n equal gradients, which wastes log2 n bits of range (much
        for `MXFP4`).
      rounding: "nearest" (ties to even; biased) or "stochastic" (unbiased but for what saturates,
        at about twice the squared error). Pass a new key in every step: without one, the noise is
        a hash of the shared scales, or always the same where these are not shared.
      max_saturated: with shared scales, the fraction of sums at the largest magnitude above which
        the multiplier is halved for the next step.
      growth: with shared scales, the factor by which it grows otherwise.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP6(_MX):
    """All-reduce of 6-bit floats in blocks of 32 with a power-of-two scale: 6.25 bits per value.

    Attributes:
      element: "e3m2" or "e2m3".
      sum: this and all others as in `MXFP8`.
    """

    element: Literal["e3m2", "e2m3"] = "e3m2"


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4(_MX):
    """All-reduce of 4-bit floats in blocks of 32 with a power-of-two scale: 4.25 bits per value.

    With so few magnitudes it is worth while to let 2% of the sums saturate: on Gaussian blocks of
    eight workers that has a quarter of the error of 0.001%.

    Attributes:
      element: "e2m1".
      sum: this and all others as in `MXFP8`.
      max_saturated: larger than there, as in DynamiQ's experiments.
      growth: likewise.
    """

    element: Literal["e2m1"] = "e2m1"
    max_saturated: float = 0.02
    growth: float = 2**0.02
