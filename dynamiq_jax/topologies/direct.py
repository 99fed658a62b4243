"""Direct: every worker sends its share of every chunk directly to the chunk's owner.

For any n it has the smallest error of all topologies, and the fewest kernels. Every pair of workers
must be able to communicate at full rate, as in one NVLink domain.
"""

from dataclasses import dataclass

import numpy as np

from dynamiq_jax.topologies.base import Rounds, Schedule, Stage, Step, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct(Topology):
    """All-to-all topology: one encoding of each gradient, one of each sum; any number of workers.

    Attributes:
      streams: independent chunks per worker. Default: one for every 2^26 coordinates, up to 4.
        Permutes send more messages for a chunk, so their default is one for every 2^27, up to 2.
        Push kernels do not overlap with other work, so their default is one.
      balance: this and all other fields are as in `dynamiq_jax.topologies.Topology`.
    """

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The all-to-all and the all-gather.

        The slot of every worker is its index. The owner does not send its own chunk, so the sink
        uses this slot. Every encoding then has a partner, except one if their number is odd.
        """
        n = n_workers
        return Stage(n - 1, range(n), (n - 1) / (2 * n)), Stage(n - 1, range(n), 1.0)

    def chunks_per_worker(self, size: int) -> int:
        """The option `streams`, or the default that the class documents."""
        return self.streams_for(size, *self.sends.streams)

    def schedule(self, n_workers: int) -> Schedule:
        """One step."""
        everyone = np.arange(n_workers, dtype=np.int32)
        return (Rounds(1, lambda _: Step(0, lambda w: everyone, slot=lambda w: w)),)
