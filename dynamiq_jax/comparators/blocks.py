"""The base of methods that sum some blocks of a bucket, the same ones on all workers.

They choose blocks by what all workers know from a psum of the blocks' energies, so that no indices
travel. How many are summed is static; what is left out comes out zero, and waits in the memory of
`ErrorFeedback` where there is one.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from dynamiq_jax.comparators.native import NativeSumMethod
from dynamiq_jax.comparators.thc_codec import scale_of
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import LARGEST, Call, TellsLosses, clipped


class BlockMethod(NativeSumMethod, TellsLosses):
    """Members of methods with these fields."""

    __slots__ = ()

    density: float
    block_size: int

    def check_blocks(self) -> None:
        """Raises ValueError for a bad field."""
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be above 0 and at most 1, such as 0.5")
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be a positive integer, as 256")

    def n_blocks(self, size: int) -> int:
        """Blocks of ``size`` coordinates."""
        return -(-size // self.block_size)

    def cut(self, x: Float[Array, " d"]) -> Float[Array, "N b"]:
        """f32, filled up with zeros."""
        spare = self.n_blocks(x.shape[0]) * self.block_size - x.shape[0]
        return jnp.pad(x.astype(jnp.float32), (0, spare)).reshape(-1, self.block_size)

    def measured(
        self, x: Float[Array, " d"], axis: Axis, n_workers: int
    ) -> tuple[Float[Array, "N b"], Float[Array, " N"], Float[Array, " N"]]:
        """This worker's blocks, their scales, and the energies of all workers.

        An energy is a sum of mean squares in bf16, the same on all workers: not finite where a
        worker's block is not, and finite elsewhere.
        """
        blocks = self.cut(x)
        scale = scale_of(blocks)
        largest = 2.0**126 / n_workers
        energy = jnp.where(jnp.isfinite(scale), jnp.minimum(scale**2, largest), jnp.inf)
        return blocks, scale, axis.psum(energy.astype(jnp.bfloat16))

    def sum_of(
        self,
        blocks: Float[Array, "N b"],
        chosen: Int[Array, " K"],
        finite: Bool[Array, " N"],
        x: Float[Array, " d"],
        call: Call,
    ) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """The sum of the chosen blocks in bf16, as the result for ``x``, and what it lacks.

        Blocks that are not ``finite`` come out NaN.
        """
        size = x.shape[0]
        # What a sum has no room for waits in memory, if there is one.
        room = LARGEST / call.n_workers if call.keep_error else LARGEST
        sent = jnp.clip(blocks[chosen], -room, room)
        # Rounded in f32 already: XLA may drop a cast to bf16 and back, and memory must not.
        sent = lax.reduce_precision(sent, exponent_bits=8, mantissa_bits=7)
        total = call.axis.psum(sent.astype(jnp.bfloat16)).astype(jnp.float32)
        total = (clipped(total) / call.divisor).astype(x.dtype)
        result = jnp.zeros(blocks.shape, x.dtype).at[chosen].set(total, unique_indices=True)
        result = jnp.where(finite[:, None], result, jnp.nan).reshape(-1)[:size]
        left = blocks.at[chosen].add(-sent, unique_indices=True)
        return result, left.reshape(-1)[:size]
