"""The OmniReduce method: only the blocks that matter are summed, in bf16.

OmniReduce (Fei et al., SIGCOMM 2021) skips blocks that are zero. Dense gradients have none, and
their evaluations keep the top blocks instead. Shapes are static here: K = ceil(density N) of the N
blocks are summed by a dense psum, the rest comes out zero, or waits in memory with error feedback.
The K blocks are chosen by what all workers know from small psums:

* ``select="energy"``: those of the largest sum over workers of squared norms. No state. With blocks
  of 64 to 128 coordinates and error feedback this is chunked top-k (Han et al., HotNets 2024).
* ``select="union"``: first those in the *union* U of what single workers mark, their top k N blocks
  each; then as above. The fraction k is state, adapted so that U has about K blocks.

Where U has fewer than K blocks, what else is of most energy uses the room (published evaluations
leave it empty).
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from dynamiq_jax.comparators.blocks import BlockMethod
from dynamiq_jax.fields import check_fields
from dynamiq_jax.methods.base import Call, Outcome, State
from dynamiq_jax.topologies import Topology

Select = Literal["energy", "union"]

CLIP = 0.6
"""The controller takes |U| / K to be within this and its inverse,"""
GAIN = 0.25
"""and goes this part of the way."""
MAX_UINT8_WORKERS = 255


class OmniReduceState(NamedTuple):
    """The state from step to step; a part that the method does not need is `None`."""

    residual: Float[Array, " d"] | None
    """With error feedback: what this worker's gradients had and its messages had not, f32."""
    fraction: Float[Array, ""] | None
    """With "union": the part k of blocks that every worker marks, f32, the same on all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OmniReduce(BlockMethod):
    """Sums the blocks of most energy in bf16, as many as a fixed density; the others are left out.

    Biased: what is left out is lost without error feedback. A NaN or infinity on any worker makes
    its whole block NaN on all; sums of what is finite end at the largest bf16 number. Serves
    ``topology=None`` only.

    Attributes:
      density: the part of blocks that is sent, above 0 up to 1; 16 bits per coordinate times this.
      block_size: coordinates of a block.
      select: which blocks are sent, see the module.
      error_feedback: whether each worker adds to its gradient what was left out of earlier ones.
        Blocks that come out NaN leave this memory as it was, so that it is always finite. It has
        the gradients' unit: where a loss scale changes, reduce gradients that are divided by it.
    """

    density: float = 0.5
    block_size: int = 256
    select: Select = "energy"
    error_feedback: bool = False

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        check_fields(self)
        self.check_blocks()

    @classmethod
    def top_k_chunked(
        cls, density: float = 1 / 16, chunk_size: int = 64, **options
    ) -> "OmniReduce":
        """Chunked top-k as "Beyond Throughput and Compression Ratios" (HotNets 2024) has it.

        All workers take the chunks of most energy; chunks have 64 to 128 coordinates.
        """
        return cls(density=density, block_size=chunk_size, error_feedback=True, **options)

    @property
    def needs_state(self) -> bool:
        """Error feedback needs its memory and the union its fraction."""
        return self.error_feedback or self.select == "union"

    def init(self, size: int, n_workers: int) -> State:
        """Nothing left out yet; every worker marks density / n of its blocks."""
        if not self.needs_state:
            return ()
        fraction = jnp.float32(self.density / n_workers) if self.select == "union" else None
        return OmniReduceState(self.first_residual(size), fraction)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates."""
        blocks, sent = self._shape(size)
        count_bits = 8 * _count_dtype(n_workers).itemsize if self.select == "union" else 0
        bits = (16 + count_bits) * blocks + 16 * sent * self.block_size
        return 2 * (n_workers - 1) * bits // n_workers

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`."""
        axis, n_workers, state = call.axis, call.n_workers, call.state
        count, residual, fraction = self._shape(x.shape[0])[1], None, None
        with jax.named_scope("omnireduce_all_reduce"):
            if self.error_feedback:
                residual = state.residual
            blocks, scale, energy = self.measured(x, residual, axis, n_workers)
            finite = jnp.isfinite(energy)
            priority = jnp.where(finite, energy, -1)  # is NaN, whether it is sent or not
            if self.select == "union":
                counts = axis.psum(_marks(scale, state.fraction, n_workers))
                union = finite & (counts > 0)
                chosen = jnp.lexsort((-priority, ~union))[:count]
                fraction = self._adapt(state.fraction, union)
            else:
                chosen = lax.top_k(priority, count)[1]
            options = {"axis": axis, "n_workers": n_workers, "divisor": call.divisor}
            result, residual = self.sum_of(blocks, chosen, finite, x, residual, **options)
            if not self.needs_state:
                return Outcome(result, state)
            return Outcome(result, OmniReduceState(residual, fraction))

    def _shape(self, size: int) -> tuple[int, int]:
        """Blocks, and how many of them are sent."""
        blocks = self.n_blocks(size)
        return blocks, math.ceil(self.density * blocks)

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
