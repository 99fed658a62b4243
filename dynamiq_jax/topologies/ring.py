"""Ring all-reduce: n-1 hops to the next worker, then an all-gather.

Chunk c starts at worker c+1 and ends at worker c. At every hop all workers send to their right
neighbour, so that one permutation serves all hops.
"""

from dataclasses import dataclass

import jax
from jax import lax

from dynamiq_jax._compat import all_gather_invarying
from dynamiq_jax.topologies.base import ChunkOps


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Ring topology: n-1 re-compressions per chunk; bandwidth-optimal on any network.

    Attributes:
      unroll_up_to: rings of at most this many workers are unrolled into the program; larger ones
        loop over their hops, so that program size and compile time do not grow with n.
    """

    unroll_up_to: int = 16

    def slots(self, n_workers: int) -> int:
        """One encoding at the leaf, at each internal node, and at the sink: n."""
        return n_workers

    def all_reduce(self, ops: ChunkOps, axis_name: str, n_workers: int) -> jax.Array:
        """Reduces every chunk around the ring; see `Topology`."""
        n = n_workers
        me = lax.axis_index(axis_name)
        right = [(i, (i + 1) % n) for i in range(n)]

        def hop(t, payload):
            payload = lax.ppermute(payload, axis_name, right)
            return ops.decode_add_encode(payload, (me - 1 - t) % n, t)

        payload = ops.encode((me - 1) % n, 0)
        if n <= self.unroll_up_to:
            for t in range(1, n):
                payload = hop(t, payload)
        else:
            payload = lax.fori_loop(1, n, hop, payload)
        gathered = jax.tree.map(lambda x: all_gather_invarying(x, axis_name), payload)
        return ops.decode(gathered)
