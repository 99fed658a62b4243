"""The OmniReduce method: only the blocks that matter are summed, in bf16.

OmniReduce (Fei et al., SIGCOMM 2021) skips blocks that are zero; its evaluations keep the top
blocks of dense gradients. Here K = ceil(density N) of the N blocks are summed by a dense psum. They
are chosen by what all workers know from small psums:

* ``select="energy"``: those of the largest sum over workers of squared norms. No state. Blocks of
  64 to 128 coordinates within `ErrorFeedback` are chunked top-k (Han et al., HotNets 2024).
* ``select="union"``: first those in the *union* U of what single workers mark, their top k N blocks
  each; then as above. The fraction k is state, adapted so that U has about K blocks.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from dynamiq_jax.comparators.native import BlockMethod, summed_rows
from dynamiq_jax.methods.base import Call, Outcome, State, ring_bits
from dynamiq_jax.topologies import Topology

CLIP = 0.6
"""The controller takes |U| / K to be within this and its inverse,"""
GAIN = 0.25
"""and goes this part of the way."""
MAX_UINT8_WORKERS = 255


class OmniReduceState(NamedTuple):
    """The state of "union" from step to step."""

    fraction: Float[Array, ""]
    """The part k of blocks that every worker marks, f32, the same on all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniReduce(BlockMethod):
    """Sums the blocks of most energy in bf16, as many as a fixed density; the others are left out.

    Biased: what is left out is lost without `ErrorFeedback`.

    Attributes:
      density: the part of blocks that is sent, above 0 up to 1; 16 bits per coordinate times this.
      block_size: coordinates of a block.
      select: which blocks are sent, see the module.
    """

    density: float = 0.5
    block_size: int = 256
    select: Literal["energy", "union"] = "energy"

    def __post_init__(self):
        """Checks every field."""
        self.check_blocks()

    @property
    def needs_state(self) -> bool:
        """The union needs its fraction."""
        return self.select == "union"

    def init(self, size: int, n_workers: int) -> State:
        """Every worker marks density / n of its blocks, where there is a union."""
        if self.select != "union":
            return ()
        return OmniReduceState(jnp.float32(self.density / n_workers))

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        blocks = self.n_blocks(size)
        count_bits = 8 * _count_dtype(n_workers).itemsize if self.select == "union" else 0
        bits = (16 + count_bits) * blocks + 16 * self._count(blocks) * self.block_size
        return ring_bits(bits, n_workers)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        state = call.state
        with jax.named_scope("omnireduce_all_reduce"):
            blocks, scale, energy = self.measured(x, call)
            count, finite = self._count(energy.size), jnp.isfinite(energy)
            priority = jnp.where(finite, energy, -1)  # is NaN, whether it is sent or not
            if self.select == "union":
                counts = call.axis.psum(_marks(scale, state.fraction, call.n_workers))
                union = finite & (counts > 0)
                chosen = jnp.lexsort((-priority, ~union))[:count]
                state = OmniReduceState(self._adapt(state.fraction, union))
            else:
                chosen = lax.top_k(priority, count)[1]
            result, left = summed_rows(blocks, chosen, finite, x, call)
            return Outcome(result, state, lost=left)

    def _count(self, blocks: int) -> int:
        """Blocks that are sent."""
        return math.ceil(self.density * blocks)

    def _adapt(self, fraction: Float[Array, ""], union: Bool[Array, " N"]) -> Float[Array, ""]:
        """The next step's k: k / r for a union r times as large as it should be, in small steps.

        Identical workers need k = density; more is of no use, whatever is zero.
        """
        ratio = jnp.sum(union, dtype=jnp.float32) / (self.density * union.size)
        ratio = jnp.clip(ratio, CLIP, 1 / CLIP)
        return jnp.minimum((1 - GAIN) * fraction + GAIN * fraction / ratio, self.density)


def _count_dtype(n_workers: int) -> jnp.dtype:
    return jnp.dtype(jnp.uint8 if n_workers <= MAX_UINT8_WORKERS else jnp.int32)


def _marks(
    scale: Float[Array, " N"], fraction: Float[Array, ""], n_workers: int
) -> Integer[Array, " N"]:
    """1 for the ``fraction`` of a worker's blocks that are largest, at least one; not for zeros."""
    rank = jnp.arange(scale.size, dtype=jnp.int32)
    count = jnp.maximum(jnp.round(fraction * scale.size).astype(jnp.int32), 1)
    marked = jnp.zeros(scale.size, bool).at[jnp.argsort(-scale)].set(rank < count)
    return (marked & (scale > 0)).astype(_count_dtype(n_workers))
