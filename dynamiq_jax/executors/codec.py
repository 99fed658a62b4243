"""The interface between executors and codecs: opaque payloads, numbered chunks and slots.

A worker's chunks are numbered ``owner * streams + stream``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from dynamiq_jax.core.axis import Axis

Payload = Any
"""A pytree of arrays with static shapes; leading axes as said where it is used."""


class Encoder(NamedTuple):
    """Who encodes, and as which of a chunk's encodings: what a codec's randomness depends on."""

    stage: int
    slot: Array | int
    """int32 scalar; of several encoders int32[k]."""
    worker: Array | int
    """int32 scalar; of several encoders int32[k]."""


class Arrived(NamedTuple):
    """Payloads that reached a worker and are not yet decoded."""

    payloads: Payload
    """Leading axes [k, c]: k to be added up for each of c chunks."""
    encoder: Encoder
    """The encoders of the k payloads."""
    skip: Array | None = None
    """One of the k to leave out, if any: int32 scalar."""


class ChunkCodec(NamedTuple):
    """The operations of a codec on one worker's gradient. ``chunks`` are int32[c]."""

    encode: Callable[..., tuple[Payload, Array | None]]
    """(arrived, chunks, encoder, lost, skip=None) -> payloads with a leading axis [c], of this
    worker's own share of each chunk plus all that ``arrived`` (a tuple of `Arrived`) for it; and
    ``lost`` with what these encodings lost. Where nothing arrived, ``skip`` (int32) may be the one
    of the c that nobody needs."""
    decode: Callable[[Payload, Array, Encoder, Array | None], Array]
    """(payloads [c] of the last stage, chunks, their encoders int32[c], result so far) -> result
    with these chunks' finished sums in it."""
    finish: Callable[[tuple[Arrived, ...], Array, Array | None], Array] | None = None
    """(arrived, chunks int32[1], result so far) -> this worker's slice of the result with the
    chunk's finished sum in it, exact: not encoded again. For `reduce_scatter` alone."""
    lost: Array | None = None
    """The zeros to which encodings write what they lose; `None`: they do not tell it."""
    push: Callable[[Axis], Array] | None = None
    """(axis) -> what `decode` makes of all chunks, by one push kernel; chunk i is worker i's."""
