"""Butterfly: recursive halving. In round l worker w exchanges with worker w XOR 2^l.

After round l a worker still has the chunks whose owner's index has the same low l+1 bits as its
own. It has sent the other chunks, each with all that had arrived for it. Neighbours exchange first,
when there is most to send. So if workers are numbered host by host, only 1/local of the traffic
crosses the network between hosts.

The way back is one all-gather of the same payloads (recursive doubling would send as much).
"""

from dataclasses import dataclass

import numpy as np

from dynamiq_jax.topologies.base import Rounds, Schedule, Stage, Step, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Butterfly(Topology):
    """Recursive halving: log2 n re-compressions per chunk; n must be a power of two.

    It has the attributes of `dynamiq_jax.topologies.Topology`.
    """

    def check(self, n_workers: int) -> None:
        """Refuses a number of workers that is not a power of two."""
        if n_workers & (n_workers - 1):
            raise ValueError(
                f"topology=Butterfly() needs a power of two of workers, and the axis has "
                f"{n_workers}; pass dq.Ring() or dq.Direct(), which take any number"
            )

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """One stage per round, whose encodings hold 2^round gradients each, and the all-gather.

        Siblings in a chunk's tree have neighbouring slots; so do the last encoding and the sink.
        """
        stages, first, encoders = [], 0, n_workers // 2
        while encoders:
            stages.append(Stage(encoders, range(first, first + encoders), 0.25))
            first, encoders = first + encoders, encoders // 2
        return (*stages, Stage(n_workers - 1, range(first, first + 1), 1.0))

    def schedule(self, n_workers: int) -> Schedule:
        """One round for every bit of the workers' indices."""
        stages = self.stages(n_workers)

        def step(level: int) -> Step:
            bit = 1 << level
            pairs = 2 * np.arange(n_workers // (2 * bit), dtype=np.int32)

            # Owners have the low bits of w, but the partner's bit ``level``, 1 - w // bit % 2. The
            # # higher bits take all values, given by ``pairs``.
            def chunks(w):
                return w % bit + bit * (pairs + 1 - w // bit % 2)

            first = stages[level].slots.start
            return Step(level, chunks, slot=lambda w: first + w // (2 * bit), to=lambda w: w ^ bit)

        return (Rounds(len(stages) - 1, step),)
