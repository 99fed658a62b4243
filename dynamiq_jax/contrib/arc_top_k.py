"""The ARC-Top-K method: a small sketch says which rows have the most energy; these are summed.

A small native sum gives all workers the sketch P: the sum of M_i V over their matrices M_i, with a
random V of ``rank`` columns. On average, a row of P has the same length as the same row of the sum
of all M_i; its squared length has the relative standard deviation sqrt(2 / rank). Another native
sum adds up the longest rows; no indices are sent. In the paper the rows are those of momentum. Rows
that cancel between workers are not sent, so their memories grow.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.contrib import native
from dynamiq_jax.core.axis import seed_of
from dynamiq_jax.methods.base import Call, Outcome, ring_bits
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class ARCTopK(native.MatrixMethod):
    """Sums the rows of matrices that have the most energy; vectors and small matrices are exact.

    It is biased: without `ErrorFeedback`, rows that are not sent are lost. The sketch's random
    matrix depends on the step's number in the state; without a state it changes only with the
    caller's key.

    Attributes:
      density: the fraction of rows that is sent, above 0 and at most 1.
      rank: the number of columns of the sketch, which needs ``rank / columns`` numbers for each
        coordinate. Matrices with fewer than twice as many rows or columns are summed exactly.
      wire: the dtype in which rows are summed, "bf16" or "f32"; the sketch is in bf16.
      matrix: see `contrib.native.MatrixMethod`; `psum` sets it for every leaf.
    """

    density: float = 0.2

    counts_steps: ClassVar[bool] = True

    def __post_init__(self):
        """Checks every field."""
        native.MatrixMethod.__post_init__(self)
        native.check_density(self.density)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        rows, columns = self.shape_of(size)
        sent = native.WIRE_BITS[self.wire] * self._count(size) * columns
        return ring_bits(16 * self.rank * rows + sent, n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        n_workers, state = call.n_workers, call.state
        shape = self.shape_of(x.shape[0])
        with jax.named_scope("arc_top_k_all_reduce"):
            matrix = x.astype(jnp.float32).reshape(shape)
            # V: normal numbers in columns of length 1, new in every step where steps are counted.
            key = jax.random.wrap_key_data(seed_of(call.seed), impl="threefry2x32")
            key = jax.random.fold_in(key, state.step) if state else key
            drawn = jax.random.normal(key, (shape[1], self.rank), jnp.float32)
            drawn = drawn / jnp.sqrt(jnp.sum(drawn**2, axis=0, keepdims=True))
            scaled = matrix / self.headroom(x.shape[0], n_workers)
            sketch = jnp.matmul(scaled, drawn, precision=lax.Precision.HIGHEST)
            sketch = call.axis.psum(sketch.astype(jnp.bfloat16)).astype(jnp.float32)
            finite = jnp.all(jnp.isfinite(sketch), axis=1)
            known = jnp.where(finite[:, None], sketch, 0)
            largest = jnp.max(jnp.abs(known))
            # Squares neither overflow nor vanish.
            known = known / jnp.where(largest > 0, largest, 1)
            # Rows that come out NaN, sent or not, come last.
            energy = jnp.where(finite, jnp.sum(known**2, axis=1), -1)
            chosen = lax.top_k(energy, self._count(x.shape[0]))[1]
            result, left = native.summed_rows(matrix, chosen, finite, x, call, self.wire)
            return Outcome(result, state and native.StepState(state.step + 1), lost=left)

    def _count(self, size: int) -> int:
        """The number of rows that are sent."""
        return math.ceil(self.density * self.shape_of(size)[0] - native.ROUNDING)
