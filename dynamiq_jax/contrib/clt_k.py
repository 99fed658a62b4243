"""The CLT-k method of ScaleCom (Chen et al., NeurIPS 2020): one worker chooses the coordinates.

Workers take turns as the *leader* of a step. The leader sends the positions of the coordinates with
the largest magnitude in every chunk of its gradient: by a native sum, to which the other workers
add zeros. A second native sum adds up all workers' values at these positions. The paper's low-pass
filter of the memory is not implemented.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer

from dynamiq_jax.contrib import native
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.base import Call, Outcome, TellsLosses, clipped, ring_bits
from dynamiq_jax.topologies import Topology

MAX_CHUNK = 256
"""The number of coordinates whose positions fit 8 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CLTK(native.NativeMethod, TellsLosses):
    """Sums, in bf16, the coordinates that are largest on one worker; workers take turns.

    It is biased: without `ErrorFeedback`, other coordinates are lost. Without a state the first
    worker always leads.

    Attributes:
      density: the fraction of every chunk that is sent, above 0 and at most 1. It takes 24 bits per
        coordinate times this, rounded up to whole coordinates of a chunk.
      chunk_size: the number of coordinates in a chunk, up to 256.
    """

    density: float = 1 / 64
    chunk_size: int = 256

    counts_steps: ClassVar[bool] = True

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        native.check_density(self.density)
        if not 1 <= self.chunk_size <= MAX_CHUNK:
            raise ValueError(f"chunk_size={self.chunk_size} must be an integer, 1 to {MAX_CHUNK}")

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        return ring_bits((8 + 16) * -(-size // self.chunk_size) * self._count, n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        axis, n_workers, state = call.axis, call.n_workers, call.state
        size = x.shape[0]
        with jax.named_scope("clt_k_all_reduce"):
            chunks = jnp.pad(x.astype(jnp.float32), (0, -size % self.chunk_size))
            chunks = chunks.reshape(-1, self.chunk_size)
            # All know where the leader's largest values are; the others add zeros.
            leads = axis.index == (state.step % n_workers if state else 0)
            own = lax.top_k(jnp.abs(chunks), self._count)[1].astype(jnp.uint8)
            places = axis.psum(jnp.where(leads, own, 0)).astype(jnp.int32)
            values = native.with_room(jnp.take_along_axis(chunks, places, axis=1), call)
            # What is not finite shows in the sum, chosen or not.
            values = jnp.where(jnp.all(jnp.isfinite(chunks), axis=1)[:, None], values, jnp.nan)
            sent, total = native.native_sum(values, "bf16", axis)
            finite = jnp.all(jnp.isfinite(total), axis=1)[:, None]
            total = (clipped(total) / call.divisor).astype(x.dtype)
            result = _placed(total, places, self.chunk_size)
            result = jnp.where(finite, result, jnp.nan).reshape(-1)[:size]
            left = (chunks - _placed(sent, places, self.chunk_size)).reshape(-1)[:size]
            return Outcome(result, state and native.StepState(state.step + 1), lost=left)

    @property
    def _count(self) -> int:
        """The number of coordinates of a chunk that are sent."""
        return math.ceil(self.density * self.chunk_size - native.ROUNDING)


def _placed(values: Float[Array, "N k"], places: Integer[Array, "N k"], size: int) -> Array:
    """Chunks of this size with the values at their positions, and zeros elsewhere."""
    empty = jnp.zeros((values.shape[0], size), values.dtype)
    return jnp.put_along_axis(empty, places, values, axis=1, inplace=False)
