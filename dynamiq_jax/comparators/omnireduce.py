"""The OmniReduce method: only the blocks that matter are summed, in bf16.

OmniReduce (Fei et al., SIGCOMM 2021) skips blocks that are zero; its evaluations keep the top
blocks of dense gradients. Here K = ceil(density N) of the N blocks are summed by a dense psum:
those of the largest sum over workers of squared norms, which all workers know from a small psum.
Blocks of 64 to 128 coordinates within `ErrorFeedback` are chunked top-k (Han et al., HotNets 2024).
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dynamiq_jax.comparators.native import NativeMethod, check_density, summed_rows
from dynamiq_jax.comparators.thc import scale_of
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, Outcome, TellsLosses, ring_bits
from dynamiq_jax.topologies import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMethod(NativeMethod, TellsLosses):
    """The base of methods that sum, in bf16, the blocks that all workers choose by their energy."""

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
        """How many blocks of so many are sent."""

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        blocks = -(-size // self.block_size)
        return ring_bits(16 * (blocks + self.count(blocks) * self.block_size), n_workers)

    def measured(
        self, x: Float[Array, " d"], call: Call
    ) -> tuple[Float[Array, "N b"], Float[Array, " N"]]:
        """This worker's blocks; sums of all workers' mean squares in bf16, finite as blocks are."""
        blocks = jnp.pad(x.astype(jnp.float32), (0, -x.shape[0] % self.block_size))
        blocks = blocks.reshape(-1, self.block_size)
        scale, largest = scale_of(blocks), 2.0**126 / call.n_workers
        energy = jnp.where(jnp.isfinite(scale), jnp.minimum(scale**2, largest), jnp.inf)
        return blocks, call.axis.psum(energy.astype(jnp.bfloat16))


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniReduce(BlockMethod):
    """Sums the blocks of most energy in bf16, as many as a fixed density; the others are left out.

    Biased: what is left out is lost without `ErrorFeedback`.

    Attributes:
      density: the part of blocks that is sent, above 0 up to 1; 16 bits per coordinate times this.
      block_size: coordinates of a block.
    """

    density: float = 0.5
    block_size: int = 256

    def count(self, blocks: int) -> int:
        """A fixed part of them."""
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
