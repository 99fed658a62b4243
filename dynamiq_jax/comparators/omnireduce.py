"""The OmniReduce method: only the blocks that matter are summed, in bf16.

OmniReduce (Fei et al., SIGCOMM 2021) skips blocks that are zero; its evaluations keep the top
blocks of dense gradients. Here K = ceil(density N) of the N blocks are summed by a dense psum:
those of the largest sum over workers of squared norms, which all workers know from a small psum.
Blocks of 64 to 128 coordinates within `ErrorFeedback` are chunked top-k (Han et al., HotNets 2024).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dynamiq_jax.comparators.native import BlockMethod, summed_rows
from dynamiq_jax.methods.base import Call, Outcome, ring_bits
from dynamiq_jax.topologies import Topology


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

    def __post_init__(self):
        """Checks every field."""
        self.check_blocks()

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        blocks = self.n_blocks(size)
        return ring_bits(16 * (blocks + self._count(blocks) * self.block_size), n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        with jax.named_scope("omnireduce_all_reduce"):
            blocks, _, energy = self.measured(x, call)
            finite = jnp.isfinite(energy)
            priority = jnp.where(finite, energy, -1)  # is NaN, whether it is sent or not
            chosen = lax.top_k(priority, self._count(energy.size))[1]
            result, left = summed_rows(blocks, chosen, finite, x, call)
            return Outcome(result, call.state, lost=left)

    def _count(self, blocks: int) -> int:
        """Blocks that are sent."""
        return math.ceil(self.density * blocks)
