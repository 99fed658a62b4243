"""The PowerSGD method (Vogels, Karimireddy, Jaggi, NeurIPS 2019): factors of low rank are summed.

It does one step of subspace iteration for the sum M of all workers' matrices M_i, with a right
factor Q that starts at the result of the previous step:

1. P = the sum of M_i Q, which every worker makes orthonormal in the same way;
2. Q = the sum of transposed M_i times P;
3. M is about P times transposed Q; a worker loses M_i - P (its own part of Q) transposed.

Both sums are native. The published method keeps its errors: put `ErrorFeedback` around it.
Gradients that cancel between workers outside of the columns of P are in no sum, so that memories of
them grow. After the two sums every worker uses only operations that XLA does not tune at run time
(it tunes matrix products): workers with the same kind of device get the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from dynamiq_jax.contrib.native import WIRE_BITS, MatrixMethod, native_sum
from dynamiq_jax.core.axis import Seed, seed_of
from dynamiq_jax.methods.base import Call, Outcome, State, clipped, ring_bits
from dynamiq_jax.topologies import Topology

DEPENDENT = 1e-6
"""A column counts as zero if less than this fraction is orthogonal to the columns before it."""


class PowerSGDState(NamedTuple):
    """The state from step to step."""

    factor: Float[Array, "columns r"]
    """The start of the next iteration: orthonormal columns, f32, the same on all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGD(MatrixMethod):
    """Sums matrices as products of two thin factors; vectors and small matrices are exact.

    It is biased: without `ErrorFeedback`, the part outside the factors is lost. A leaf that is not
    finite does not change the factor. Without a state every step starts from a random factor, which
    depends on the key.

    Attributes:
      rank: the number of columns of both factors; a leaf needs ``rank`` (1 / rows + 1 / columns)
        numbers for each coordinate. Matrices with fewer than twice as many rows or columns are
        summed exactly.
      wire: the dtype in which factors are summed, "bf16" or "f32". Each addition of Q in bf16 loses
        up to 2^-8 of it. Rounding P loses nothing, but it rotates the columns: a little if the
        factor is from the previous step, more if it was drawn at random and P's columns are nearly
        parallel.
      matrix: see `contrib.native.MatrixMethod`; `psum` sets it for every leaf.
    """

    def init(self, size: int, n_workers: int) -> State:
        """A random factor, the same for all leaves of this shape."""
        return PowerSGDState(self._start(size, jnp.uint32(0)))

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        bits = WIRE_BITS[self.wire] * self._columns(size) * sum(self.shape_of(size))
        return ring_bits(bits, n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        state = call.state
        size, shape = x.shape[0], self.shape_of(x.shape[0])
        unit = self.headroom(size, call.n_workers)
        with jax.named_scope("powersgd_all_reduce"):
            start = self._start(size, jnp.uint32(0) if state else call.seed)
            matrix = x.astype(jnp.float32).reshape(shape) / unit
            left = _product(matrix, state.factor if state else start)
            left = native_sum(left, self.wire, call.axis)[1]
            finite = jnp.all(jnp.isfinite(left))  # as all workers' matrices are
            left = orthonormal(jnp.where(finite, left, 0))
            sent, right = native_sum(_product(matrix.T, left), self.wire, call.axis)
            total = clipped(_outer(left, right) * (unit / call.divisor)).astype(x.dtype)
            result = jnp.where(finite, total, jnp.nan).reshape(-1)
            lost = ((matrix - _outer(left, sent)) * unit).reshape(-1)
            if not state:
                return Outcome(result, state, lost=lost)
            right = orthonormal(jnp.where(finite, right, 0), instead=start)
            state = PowerSGDState(jnp.where(finite, right, state.factor))
            return Outcome(result, state, lost=lost)

    def _columns(self, size: int) -> int:
        """The number of columns of the factors."""
        return min(self.rank, *self.shape_of(size))

    def _start(self, size: int, seed: Seed) -> Float[Array, "columns r"]:
        """A random right factor, which depends only on the seed."""
        words = seed_of(seed)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        shape = self.shape_of(size)[1], self._columns(size)
        return orthonormal(jax.random.normal(key, shape, jnp.float32))


def _product(a: Float[Array, "m k"], b: Float[Array, "k r"]) -> Float[Array, "m r"]:
    """The matrix product in f32; by default GPUs would use less precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _outer(a: Float[Array, "m r"], b: Float[Array, "k r"]) -> Float[Array, "m k"]:
    """``a`` times transposed ``b``, without a matrix product: see the module."""
    return sum(
        (a[:, i, None] * b[None, :, i] for i in range(1, a.shape[1])),
        start=a[:, 0, None] * b[None, :, 0],
    )


def orthonormal(
    a: Float[Array, "m r"], instead: Float[Array, "m r"] | None = None
) -> Float[Array, "m r"]:
    """Orthonormal columns with the same span, by two passes of Gram-Schmidt.

    If a column of the finite ``a`` depends on the columns before it, or is zero, the column of
    ``instead`` replaces it; without ``instead`` it becomes zero.
    """
    rank = jnp.arange(a.shape[1])[None]
    largest = jnp.max(jnp.abs(a), axis=0, keepdims=True)
    a = a / jnp.where(largest > 0, largest, 1)  # squares neither overflow nor vanish

    def separate(number: Array, done: Array, column: Array) -> Array:
        """A column without its part along the columns before it, with length 1; or zero."""
        before = jnp.where(rank < number, done, 0)
        length = jnp.sqrt(jnp.sum(column**2))
        for _ in range(2):
            part = jnp.sum(before * column[:, None], axis=0, keepdims=True)
            column = column - jnp.sum(before * part, axis=1)
        left = jnp.sqrt(jnp.sum(column**2))
        independent = left > DEPENDENT * length
        return jnp.where(independent, column / jnp.where(independent, left, 1), 0)

    def step(number: Array, done: Array) -> Array:
        column = separate(number, done, lax.dynamic_index_in_dim(done, number, 1, keepdims=False))
        if instead is not None:
            other = lax.dynamic_index_in_dim(instead, number, 1, keepdims=False)
            column = jnp.where(jnp.any(column != 0), column, separate(number, done, other))
        return jnp.where(rank == number, column[:, None], done)

    return lax.fori_loop(0, a.shape[1], step, a)
