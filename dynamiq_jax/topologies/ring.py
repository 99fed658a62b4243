"""Ring all-reduce: n-1 hops to the next worker, then an all-gather.

Chunks of worker c start at worker c+1 and end at worker c. At every hop all workers send to their
right neighbour, so that one permutation serves all hops. With several *streams* each worker's
share is cut into as many chunks that travel independently: the kernel of one stream can run
while the payload of another is on the wire.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dynamiq_jax._compat import all_gather_invarying
from dynamiq_jax.topologies.base import ChunkOps


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Ring topology: n-1 re-compressions per chunk; bandwidth-optimal on any network.

    Attributes:
      streams: independent chunks per worker.
      stream_size: gradients of fewer coordinates than this travel in one stream.
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
    """

    streams: int = 2
    stream_size: int = 2**25
    unroll_up_to: int = 16

    def __post_init__(self):
        """Checks the fields."""
        if self.streams < 1:
            raise ValueError(f"streams={self.streams} must be at least 1")

    def slots(self, n_workers: int) -> int:
        """One encoding at the leaf, at each internal node, and at the sink: n."""
        return n_workers

    def chunks_per_worker(self, size: int) -> int:
        """``streams`` for large gradients, 1 for small ones."""
        return self.streams if size >= self.stream_size else 1

    def all_reduce(self, ops: ChunkOps, axis_name: str, n_workers: int, streams: int) -> jax.Array:
        """Reduces every chunk around the ring; see `Topology`."""
        n = n_workers
        me = lax.axis_index(axis_name)
        right = [(i, (i + 1) % n) for i in range(n)]

        def hop(t, payloads):
            arrived = [lax.ppermute(payload, axis_name, right) for payload in payloads]
            worker = (me - 1 - t) % n
            return [
                ops.decode_add_encode(payload, worker * streams + i, t)
                for i, payload in enumerate(arrived)
            ]

        first = (me - 1) % n
        payloads = [ops.encode(first * streams + i, 0) for i in range(streams)]
        if n <= self.unroll_up_to:
            for t in range(1, n):
                payloads = hop(t, payloads)
        else:
            payloads = lax.fori_loop(1, n, hop, payloads)
        owners = jnp.arange(n, dtype=jnp.int32) * streams
        gathered = [all_gather_invarying(payload, axis_name) for payload in payloads]
        result = ops.decode(gathered[0], owners, None)
        for i in range(1, streams):
            result = ops.decode(gathered[i], owners + i, result)
        return result
