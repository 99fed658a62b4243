"""Butterfly: recursive halving. In round l worker w exchanges with worker w XOR 2^l.

After round l a worker is left with the chunks whose owner agrees with it in the low l+1 bits of
its number: it has sent the others, each with all that had arrived for it. Neighbours exchange
first, when there is most to send, so that workers that are numbered host by host keep all but
1/local of the traffic off the network between hosts.

The way back is one all-gather of the same payloads (recursive doubling would move as much).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dynamiq_jax._compat import AxisNames, ppermute
from dynamiq_jax.topologies.base import Arrived, ChunkOps, Stage, check_balance, streams_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Butterfly:
    """Recursive halving: log2 n re-compressions per chunk; n must be a power of two.

    Attributes:
      streams: at most so many independent chunks per worker: kernels of one run under the transfers
        of another.
      stream_size: coordinates of the gradient that are worth a stream.
      balance: bits per coordinate that all rounds get beyond the all-gather; `None`: every round
        as the method shares them out; later ones, which send less, get more.
    """

    streams: int = 2
    stream_size: int = 2**24
    balance: float | None = None

    def __post_init__(self):
        """Checks the fields."""
        if self.streams < 1:
            raise ValueError(f"streams={self.streams} must be at least 1")
        check_balance(self.balance)

    def check(self, n_workers: int) -> None:
        """Refuses what is not a power of two."""
        if n_workers & (n_workers - 1):
            raise ValueError(
                f"topology=Butterfly() needs a power of two of workers, and the axis has "
                f"{n_workers}; pass dq.Ring() or dq.Direct(), which take any number"
            )

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """One per round, whose encodings hold 2^round gradients each, and the all-gather.

        Siblings in a chunk's tree have neighbouring slots; so have the last of the tree and the
        sink.
        """
        stages, first, encoders = [], 0, n_workers // 2
        while encoders:
            stages.append(Stage(encoders, range(first, first + encoders), 0.25))
            first, encoders = first + encoders, encoders // 2
        return (*stages, Stage(n_workers - 1, range(first, first + 1), 1.0))

    def chunks_per_worker(self, size: int) -> int:
        """One for every ``stream_size`` coordinates, at most ``streams``."""
        return streams_for(size, self.streams, self.stream_size)

    def reduce(
        self, ops: ChunkOps, axis_name: AxisNames, n_workers: int, streams: int
    ) -> list[tuple[Arrived, ...]]:
        """See `Topology`."""
        stages = self.stages(n_workers)[:-1]
        me = lax.axis_index(axis_name)
        arrived: list[tuple[Arrived, ...]] = [() for _ in range(streams)]
        for level, stage in enumerate(stages):
            bit = 1 << level
            partners = [(w, w ^ bit) for w in range(n_workers)]
            # Owners w with the low bits of ours: w = me mod 2^level + 2^level * (2 i + side).
            side = me // bit % 2
            theirs = me % bit + bit * (2 * jnp.arange(stage.sent, dtype=jnp.int32) + 1 - side)
            slot = stage.slots.start + me // (2 * bit)
            for i in range(streams):
                sent = tuple(_half(a, 1 - side) for a in arrived[i])
                payloads = ops.encode(sent, theirs * streams + i, level, slot)
                moved = jax.tree.map(
                    lambda x, p=partners: ppermute(x, axis_name, p)[None], payloads
                )
                kept = tuple(_half(a, side) for a in arrived[i])
                arrived[i] = (*kept, Arrived(moved, level))
        return arrived


def _half(arrived: Arrived, side) -> Arrived:
    """Every other chunk: those whose next bit is ``side``."""

    def pick(x):
        halves = x.reshape(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:])
        return lax.dynamic_index_in_dim(halves, side, axis=2, keepdims=False)

    return arrived._replace(payloads=jax.tree.map(pick, arrived.payloads))
