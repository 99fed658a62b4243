"""The SIDCo method (Abdelmoniem et al., MLSys 2021): a threshold from a fitted tail, not a sort.

The threshold is computed from means, in *stages*. A stage subtracts the minimum from the values
that are left; an exponential distribution with the same mean is above ``-mean * log(part)`` with
probability ``part``. The first stage keeps a quarter, and further stages keep equal ratios that
lead to the density. Every step counts how many blocks each number of stages would keep. Every
`PERIOD` steps, if the average for the current number of stages is off by more than `TOLERANCE`, the
number whose average is nearest replaces it.

Published SIDCo compares the coordinates of each worker. Here the values are norms of blocks over
all workers, and a dense psum sums the same blocks of all workers. If there are more blocks than
room, the last ones are left out; if there is spare room, other blocks fill it. The start of this
order moves on from step to step.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from dynamiq_jax.contrib.native import ROUNDING, summed_rows
from dynamiq_jax.contrib.omnireduce import BlockMethod
from dynamiq_jax.methods.base import Call, Outcome, State

FIRST_PART = 0.25
"""The fraction that the first of several stages keeps, delta_1 of the paper."""
MAX_STAGES = 4
FIRST_STAGES = 2
"""The number of stages before anything was counted."""
PERIOD = 5
TOLERANCE = 0.2


class SIDCoState(NamedTuple):
    """The state from step to step, the same on all workers."""

    place: Int[Array, ""]
    """The block at which the order begins, int32."""
    stages: Int[Array, ""]
    """The current number of stages: 1 to `MAX_STAGES`, int32."""
    step: Int[Array, ""]
    """The number of steps in this period so far, int32."""
    counts: Int[Array, " stages"]
    """The number of blocks that each number of stages would have kept in these steps, int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SIDCo(BlockMethod):
    """Sums, in bf16, the blocks whose norm is above a fitted threshold, without a sort.

    It is biased: without `ErrorFeedback`, the other blocks are lost. Without a state the number of
    stages stays `FIRST_STAGES`.

    Attributes:
      density: the target fraction of blocks above the threshold, above 0 and at most 1.
      headroom: the room for blocks, relative to the density, at least 1. A worker sends 16 bits per
        coordinate times density times headroom. At equal bits, a higher density is better than more
        headroom.
      block_size: the number of coordinates in a block; each norm takes 16 bits.
    """

    density: float = 0.1
    headroom: float = 1.0
    block_size: int = 64

    def __post_init__(self):
        """Checks every field."""
        BlockMethod.__post_init__(self)
        if not 1 <= self.headroom < math.inf:
            raise ValueError(f"headroom={self.headroom} must be at least 1, such as 1.25")

    def init(self, size: int, n_workers: int) -> State:
        """The initial state: no counts."""
        zero, counts = jnp.zeros((), jnp.int32), jnp.zeros(MAX_STAGES, jnp.int32)
        stages = jnp.full((), FIRST_STAGES, jnp.int32)
        return SIDCoState(zero, stages, zero, counts)

    def count(self, blocks: int) -> int:
        """The number of blocks that there is room for."""
        return min(blocks, math.ceil(self.headroom * self.density * blocks - ROUNDING))

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `TellsLosses`."""
        state = call.state
        own = state or self.init(x.shape[0], call.n_workers)
        with jax.named_scope("sidco_all_reduce"):
            blocks, energy = self.measured(x, call)
            finite = jnp.isfinite(energy)
            norms = jnp.where(finite, jnp.sqrt(energy.astype(jnp.float32)), -1)
            limits = thresholds(norms, self.density)
            place, stages = (call.axis.assume_invarying(s) for s in (own.place, own.stages))
            above = finite & (norms >= limits[stages - 1])
            chosen = first_of(above, place, self.count(above.size))
            result, left = summed_rows(blocks, chosen, finite, x, call)
            if not state:
                return Outcome(result, state, lost=left)
            would_be = finite[None] & (norms[None] >= limits[:, None])
            counts = own.counts + jnp.sum(would_be, axis=1, dtype=jnp.int32)
            # Of the next period: the number in use, or the one whose average is nearest.
            over = own.step + 1 == PERIOD
            target = PERIOD * max(1.0, self.density * above.size)
            ratios = jnp.maximum(counts, 1).astype(jnp.float32) / target
            good = jnp.abs(ratios[own.stages - 1] - 1) <= TOLERANCE
            nearest = jnp.argmin(jnp.abs(jnp.log(ratios))).astype(jnp.int32) + 1
            # The next step begins behind the last block that was sent, around the end.
            after = SIDCoState(
                place=(own.place + (chosen[-1] + 1 - place)) % above.size,
                stages=jnp.where(over & ~good, nearest, own.stages),
                step=jnp.where(over, 0, own.step + 1),
                counts=jnp.where(over, 0, counts),
            )
            return Outcome(result, after, lost=left)


def thresholds(norms: Float[Array, " N"], density: float) -> Float[Array, " stages"]:
    """The thresholds, by number of stages, that a fraction ``density`` of norms exceeds."""
    top = jnp.maximum(jnp.max(norms), 0)

    def fitted(alive: Bool[Array, " N"], part: float) -> Array:
        count = jnp.maximum(jnp.sum(alive), 1).astype(jnp.float32)
        low = jnp.min(jnp.where(alive, norms, jnp.inf))
        excess = jnp.sum(jnp.where(alive, norms - low, 0)) / count
        return jnp.minimum(low - excess * math.log(part), top)

    found = []
    for stages in range(1, MAX_STAGES + 1):
        limit = jnp.zeros(())
        for part in parts(density, stages):
            limit = fitted(norms >= limit, part)
        found.append(limit)
    return jnp.stack(found)


def parts(density: float, stages: int) -> list[float]:
    """The fraction that each stage keeps of the norms before it; their product is the density."""
    if stages == 1 or density >= FIRST_PART:
        return [density ** (1 / stages)] * stages
    return [FIRST_PART] + [(density / FIRST_PART) ** (1 / (stages - 1))] * (stages - 1)


def first_of(above: Bool[Array, " N"], place: Int[Array, ""], room: int) -> Int[Array, " room"]:
    """The indices of ``room`` blocks: ``above``, then others; both orders start at ``place``."""
    first = jnp.roll(above, -place)
    before = jnp.cumsum(first, dtype=jnp.int32)
    index = jnp.arange(above.size, dtype=jnp.int32)
    rank = jnp.where(first, before - 1, before[-1] + index - before)
    chosen = jnp.zeros(room, jnp.int32).at[rank].set(index, mode="drop", unique_indices=True)
    return (chosen + place) % above.size
