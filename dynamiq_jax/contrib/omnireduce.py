"""The OmniReduce method: only the blocks that matter are summed, in bf16.

OmniReduce (Fei et al., SIGCOMM 2021) skips blocks that are zero; its evaluations keep the top
blocks of dense gradients. Here a dense psum adds up K = ceil(density N) of the N blocks: the blocks
with the largest sum of squared norms over workers, which all workers know from a small psum. With
blocks of 64 to 128 coordinates, inside `ErrorFeedback`, this is chunked top-k (Han et al., HotNets
2024).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dynamiq_jax.contrib.native import NativeMethod, check_density, summed_rows
from dynamiq_jax.contrib.thc import scale_of
from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.base import Call, Outcome, TellsLosses, ring_bits
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMethod(NativeMethod, TellsLosses):
    """The base class of methods that sum, in bf16, blocks that are chosen by their energy."""

    density: float
    block_size: int

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        check_density(self.density)
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be a positive integer, as 256")

    @abstractmethod
    def count(self, blocks: int) -> int:
        """The number of blocks that are sent, of all blocks."""

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        blocks = -(-size // self.block_size)
        return ring_bits(16 * (blocks + self.count(blocks) * self.block_size), n_workers)

    def measured(
        self, x: Float[Array, " d"], call: Call
    ) -> tuple[Float[Array, "N b"], Float[Array, " N"]]:
        """This worker's blocks; all workers' sums of mean squares in bf16, finite if blocks are."""
        blocks = jnp.pad(x.astype(jnp.float32), (0, -x.shape[0] % self.block_size))
        blocks = blocks.reshape(-1, self.block_size)
        scale, largest = scale_of(blocks), 2.0**126 / call.n_workers
        energy = jnp.where(jnp.isfinite(scale), jnp.minimum(scale**2, largest), jnp.inf)
        return blocks, call.axis.psum(energy.astype(jnp.bfloat16))


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniReduce(BlockMethod):
    """Sums, in bf16, a fixed fraction of the blocks: those with the most energy.

    It is biased: without `ErrorFeedback`, the other blocks are lost.

    Attributes:
      density: the fraction of blocks that is sent, above 0 and at most 1; it takes 16 bits per
        coordinate times this.
      block_size: the number of coordinates in a block.
    """

    density: float = 0.5
    block_size: int = 256

    def count(self, blocks: int) -> int:
        """A fixed fraction of the blocks."""
        return math.ceil(self.density * blocks)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        with jax.named_scope("omnireduce_all_reduce"):
            blocks, energy = self.measured(x, call)
            finite = jnp.isfinite(energy)
            priority = jnp.where(finite, energy, -1)  # is NaN, whether it is sent or not
            chosen = lax.top_k(priority, self.count(energy.size))[1]
            result, left = summed_rows(blocks, chosen, finite, x, call)
            return Outcome(result, call.state, lost=left)
