"""Ring: n-1 hops to the next worker.

Chunks of worker c start at worker c+1 and end at worker c. At every hop all workers send to their
right neighbour, so that one permutation serves all hops.
"""

from dataclasses import dataclass

import numpy as np

from dynamiq_jax.topologies.base import (
    Rounds,
    Schedule,
    Stage,
    Step,
    Topology,
    Transport,
    check_options,
    streams_for,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring(Topology):
    """Ring topology: n-1 re-compressions per chunk; any number of workers, neighbours only.

    Attributes:
      streams: independent chunks per worker: kernels of one run under the transfers of another.
        Default: 2 from 2^25 coordinates on, 1 below.
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
      balance: bits per coordinate that hops get beyond the all-gather; `None`: as the method
        shares them out.
      transport: see `dynamiq_jax.topologies.base.Transport`; `None`: chosen by
        `dynamiq_jax.topologies.choice`.
    """

    streams: int | None = None
    unroll_up_to: int = 16
    balance: float | None = None
    transport: Transport | None = None

    def __post_init__(self):
        """Checks the fields."""
        check_options(self)

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The hops, whose partial sums hold 1, ..., n-1 gradients, and the all-gather."""
        n = n_workers
        return Stage(n - 1, range(n - 1), (n - 1) / 4), Stage(n - 1, range(n - 1, n), 1.0)

    def chunks_per_worker(self, size: int) -> int:
        """As many as were passed; else two from 2^25 coordinates on."""
        return streams_for(size, self.streams, 2, 2**24)

    def schedule(self, n_workers: int) -> Schedule:
        """n-1 hops."""
        n, one = n_workers, np.zeros(1, np.int32)

        def hop(t):  # worker w passes on the chunk that began at w - t, whose owner is w - t - 1
            chunks, right = lambda w: (w - 1 - t) % n + one, lambda w: (w + 1) % n
            return Step(0, chunks, slot=lambda w: t, to=right)

        return (Rounds(n - 1, hop, looped=n > self.unroll_up_to),)
