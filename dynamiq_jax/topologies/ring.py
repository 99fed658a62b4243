"""Ring: n-1 hops to the next worker.

Chunks of worker c start at worker c+1 and end at worker c. At every hop all workers send to their
right neighbour, so all hops use the same permutation.
"""

from dataclasses import dataclass

import numpy as np

from dynamiq_jax.topologies.base import Rounds, Schedule, Stage, Step, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Ring topology: n-1 re-compressions per chunk; any number of workers, neighbours only.

    Attributes:
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
      streams: this and all other fields are as in `dynamiq_jax.topologies.Topology`.
    """

    unroll_up_to: int = 16

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The hops, whose partial sums hold 1, ..., n-1 gradients, and the all-gather."""
        n = n_workers
        return Stage(n - 1, range(n - 1), (n - 1) / 4), Stage(n - 1, range(n - 1, n), 1.0)

    def schedule(self, n_workers: int) -> Schedule:
        """n-1 hops."""
        n, one = n_workers, np.zeros(1, np.int32)

        def hop(t):  # worker w passes on the chunk that began at w - t, whose owner is w - t - 1
            chunks, right = lambda w: (w - 1 - t) % n + one, lambda w: (w + 1) % n
            return Step(0, chunks, slot=lambda w: t, to=right)

        return (Rounds(n - 1, hop, looped=n > self.unroll_up_to),)
