"""What a topology is: the order in which opaque payloads visit workers.

A topology moves payloads and knows nothing of their content; a codec makes payloads and knows
nothing of who holds them. They meet in `ChunkOps`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

Payload = Any
"""A pytree of arrays with static shapes."""


class ChunkOps(NamedTuple):
    """What a codec can do with one worker's gradient. ``chunk`` may be traced.

    ``slot`` numbers the encodings that one chunk passes through, from 0; a topology uses each of
    its ``slots(n)`` slots once per chunk, so that the codec can correlate their rounding.
    """

    encode: Callable[[Array, Any], Payload]
    """(chunk, slot) -> payload of this worker's own share of the chunk."""
    decode_add_encode: Callable[[Payload, Array, Any], Payload]
    """(payload, chunk, slot) -> payload of its content plus this worker's own share."""
    decode: Callable[[Payload, Array, Array | None], Array]
    """(payloads stacked along a leading axis, their chunks, result so far) -> result with these
    chunks' finished sums in it."""


class Topology(Protocol):
    """How chunks travel. Implementations are frozen dataclasses of static options."""

    def slots(self, n_workers: int) -> int:
        """How many encodings one chunk passes through."""
        ...

    def chunks_per_worker(self, size: int) -> int:
        """Into how many chunks each worker's share of ``size`` coordinates is cut."""
        ...

    def all_reduce(self, ops: ChunkOps, axis_name: str, n_workers: int, streams: int) -> Array:
        """Reduces every chunk and returns the result in which ``ops.decode`` put them all.

        Chunk c * chunks_per_worker + i ends at worker c.
        """
        ...
