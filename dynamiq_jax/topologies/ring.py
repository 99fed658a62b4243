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
    Transport,
    check_options,
    streams_for,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Ring topology: n-1 re-compressions per chunk; any number of workers, neighbours only.

    Attributes:
      streams: at most so many independent chunks per worker: kernels of one run under the transfers
        of another.
      stream_size: coordinates of the gradient that are worth a stream.
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
      balance: bits per coordinate that hops get beyond the all-gather; `None`: as the method
        shares them out.
      stage_per_hop: whether every hop of an unrolled ring has bits and widths of its own: later
        ones, whose sums are larger, get more. A loop shares one assignment. It takes a few percent
        off the squared error of independent rounding; the default one errs more with it, since
        pairs of hops of other widths cancel less (BUILD.md).
      transport: see `dynamiq_jax.topologies.base.Transport`; `None`: chosen by
        `dynamiq_jax.topologies.choice`.
    """

    streams: int = 2
    stream_size: int = 2**24
    unroll_up_to: int = 16
    balance: float | None = None
    stage_per_hop: bool = False
    transport: Transport | None = None

    def __post_init__(self):
        """Checks the fields."""
        check_options(self)

    def check(self, n_workers: int) -> None:
        """Any number will do."""

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The hops, whose partial sums hold 1, ..., n-1 gradients, and the all-gather."""
        n, sink = n_workers, Stage(n_workers - 1, range(n_workers - 1, n_workers), 1.0)
        if self._stage_per_hop(n):
            return *(Stage(1, range(t, t + 1), (t + 1) / (2 * n)) for t in range(n - 1)), sink
        return Stage(n - 1, range(n - 1), (n - 1) / 4), sink

    def chunks_per_worker(self, size: int) -> int:
        """One for every ``stream_size`` coordinates, at most ``streams``."""
        return streams_for(size, self.streams, self.stream_size)

    def schedule(self, n_workers: int) -> Schedule:
        """n-1 hops."""
        n, one = n_workers, np.zeros(1, np.int32)
        own = self._stage_per_hop(n)

        def hop(t):
            chunks, right = lambda w: (w - 1 - t) % n + one, lambda w: (w + 1) % n
            return Step(t if own else 0, chunks, slot=lambda w: t, to=right)

        return (Rounds(n - 1, hop, looped=n > self.unroll_up_to),)

    def _stage_per_hop(self, n_workers: int) -> bool:
        return self.stage_per_hop and 2 < n_workers <= self.unroll_up_to
