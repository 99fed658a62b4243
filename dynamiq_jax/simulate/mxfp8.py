"""The comparator: MXFP8 that is decoded, added up and encoded again at every hop."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import UInt

from dynamiq_jax.codecs import mx
from dynamiq_jax.simulate.codecs import Arrived
from dynamiq_jax.simulate.gradients import Values, to_bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class MXComparator:
    """MXFP8: E4M3 elements, rounded to nearest, in blocks of 32 that share a scale.

    Attributes:
      scales: "shared": one bf16 scale per block, n/335 of the largest magnitude that any
        worker has, so that no sum can overflow (8.5 bits, the paper's); "own": every payload has
        the power-of-two scales of its own values (8.25 bits), as `methods.MXFP8` does by default.
    """

    scales: Literal["shared", "own"] = "shared"

    @property
    def bits(self) -> float:
        """Bits on the wire per coordinate."""
        return 8 + (16 if self.scales == "shared" else 8) / mx.BLOCK


_E4M3 = mx.ELEMENTS["e4m3"]
_TARGET = 335.0  # of 448, as in the authors' code: leaves room for rounding
_SMALLEST = 5e-7  # added to the largest magnitudes, as there, so that no scale is zero


@dataclass(frozen=True, slots=True)
class MXCodec:
    """`MXComparator` on a chunk of ``size`` coordinates, a multiple of 32."""

    method: MXComparator
    n_workers: int
    size: int

    def measure(self, x: Values) -> Array:
        """The largest magnitude of every block."""
        return jnp.max(jnp.abs(_blocks(x)), axis=1, keepdims=True)

    def merge(self, a: Array, b: Array) -> Array:
        """The larger ones."""
        return jnp.maximum(a, b)

    def share(self, message: Array, seed: UInt[Array, " 2"]) -> Array | None:
        """The blocks' scales, if they are shared; nothing is random."""
        if self.method.scales == "own":
            return None
        return (to_bf16(message) + _SMALLEST) * (self.n_workers / _TARGET)

    def center(self, shared: Array | None, x: Values) -> Values:
        """All of ``x``."""
        return x

    def encode(self, shared: Array | None, x: Values, stage: int, slot, arrived=None) -> Array:
        """See `Codec`; all stages and slots are alike."""
        x = x if arrived is None else self.add(shared, x, arrived)
        if shared is None:
            return mx.encode(x, _E4M3)
        return mx.quantize(_blocks(x) / shared, _E4M3).astype(jnp.uint8)

    def add(self, shared: Array | None, x: Values, arrived: Arrived) -> Values:
        """See `Codec`."""
        return x + self.finish(shared, arrived.payload)

    def finish(self, shared: Array | None, payload: Array) -> Values:
        """See `Codec`."""
        if shared is None:
            return mx.decode(payload, self.size, _E4M3)
        return (mx.dequantize(payload, _E4M3) * shared).reshape(-1)


def _blocks(x: Values) -> Array:
    return x.reshape(-1, mx.BLOCK)
