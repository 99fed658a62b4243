"""The interface between executors and codecs: opaque payloads, numbered chunks and slots.

A worker's chunks are numbered ``owner * streams + stream``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from dynamiq_jax.core.axis import Axis

Payload = Any
"""A pytree of arrays with static shapes; leading axes as said where it is used."""

Carry = Any
"""A pytree of arrays that encodings and decodings return besides their results: the error left
behind, counts. It starts as `ChunkCodec.carry` and passes through all of them, one after the
other."""


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

    encode: Callable[..., tuple[Payload, Carry]]
    """(arrived, chunks, encoder, carry, total=None, skip=None) -> payloads with a leading axis [c]
    and the next carry: this worker's own share of each chunk, or ``total`` in its place, plus all
    that ``arrived`` (a tuple of `Arrived`) for it. Where nothing arrived, ``skip`` (int32) may be
    the one of the c that nobody needs."""
    add: Callable[..., Array]
    """(arrived, chunks, total=None) -> total: own share, or the total so far, plus what arrived,
    f32 in the codec's own units and order."""
    decode: Callable[[Payload, Array, Encoder, Array | None, Carry], tuple[Array, Carry]]
    """(payloads [c] of the last stage, chunks, their encoders int32[c], result so far, carry) ->
    result with these chunks' finished sums in it, next carry. Workers decode all chunks, in orders
    of their own: what this adds to a carry must not depend on the order."""
    finish: Callable[[tuple[Arrived, ...], Array, Array | None, Carry], tuple[Array, Carry]]
    """(arrived, chunks int32[1], result so far, carry) -> this worker's slice of the result with
    the chunk's finished sum in it, exact: not encoded again; next carry."""
    carry: Carry = ()
    push: Callable[[Axis], Array] | None = None
    """(axis) -> what `decode` makes of all chunks, by one push kernel; chunk i is worker i's."""
