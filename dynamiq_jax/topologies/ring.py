"""Ring: n-1 hops to the next worker.

Chunks of worker c start at worker c+1 and end at worker c. At every hop all workers send to their
right neighbour, so that one permutation serves all hops. With several *streams* each worker's
share is cut into as many chunks that travel independently: the kernel of one stream can run
while the payload of another is on the wire.
"""

from dataclasses import dataclass

import jax
from jax import lax

from dynamiq_jax._compat import AxisNames, ppermute
from dynamiq_jax.topologies.base import Arrived, ChunkOps, Stage, check_balance, streams_for


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
    """

    streams: int = 2
    stream_size: int = 2**24
    unroll_up_to: int = 16
    balance: float | None = None

    def __post_init__(self):
        """Checks the fields."""
        if self.streams < 1:
            raise ValueError(f"streams={self.streams} must be at least 1")
        check_balance(self.balance)

    def check(self, n_workers: int) -> None:
        """Any number will do."""

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        """The hops, whose partial sums hold 1, ..., n-1 gradients, and the all-gather."""
        n = n_workers
        return Stage(n - 1, range(n - 1), (n - 1) / 4), Stage(n - 1, range(n - 1, n), 1.0)

    def chunks_per_worker(self, size: int) -> int:
        """One for every ``stream_size`` coordinates, at most ``streams``."""
        return streams_for(size, self.streams, self.stream_size)

    def reduce(
        self, ops: ChunkOps, axis_name: AxisNames, n_workers: int, streams: int
    ) -> list[tuple[Arrived, ...]]:
        """See `Topology`."""
        n = n_workers
        me = lax.axis_index(axis_name)
        right = [(i, (i + 1) % n) for i in range(n)]

        def send(payload):
            moved = jax.tree.map(lambda x: ppermute(x, axis_name, right), payload)
            return (Arrived(jax.tree.map(lambda x: x[None], moved), 0),)

        def hop(t, payloads):
            arrived = [send(payload) for payload in payloads]
            first = (me - 1 - t) % n * streams
            return [ops.encode(a, (first + i)[None], 0, t) for i, a in enumerate(arrived)]

        first = (me - 1) % n * streams
        payloads = [ops.encode((), (first + i)[None], 0, 0) for i in range(streams)]
        if n <= self.unroll_up_to:
            for t in range(1, n - 1):
                payloads = hop(t, payloads)
        else:
            payloads = lax.fori_loop(1, n - 1, hop, payloads)
        return [send(payload) for payload in payloads]
