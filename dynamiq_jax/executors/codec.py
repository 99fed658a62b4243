"""The interface between executors and codecs: opaque payloads, and indices of chunks and slots.

The chunks of a worker have the indices ``owner * streams + stream``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from dynamiq_jax.core.axis import Axis

Payload = Any
"""A pytree of arrays with static shapes; the leading axes are documented where it is used."""


class Encoder(NamedTuple):
    """The encoding worker and the index of its encoding, which a codec's noise depends on."""

    stage: int
    slot: Array | int
    """int32 scalar; int32[k] for several encoders."""
    worker: Array | int
    """int32 scalar; int32[k] for several encoders."""


class Arrived(NamedTuple):
    """Payloads that reached a worker and are not yet decoded."""

    payloads: Payload
    """Arrays with leading axes [k, c]: k payloads to be added up for each of c chunks."""
    encoder: Encoder
    """The encoders of the k payloads."""
    skip: Array | None = None
    """The index of one of the k payloads to leave out, if any: int32 scalar."""


class ChunkCodec(NamedTuple):
    """The operations of a codec on one worker's gradient. ``chunks`` are int32[c]."""

    encode: Callable[..., tuple[Payload, Array | None]]
    """(arrived, chunks, encoder, lost, skip=None) -> (payloads, lost). Payloads [c] hold this
    worker's own share of each chunk plus all payloads in ``arrived`` (a tuple of `Arrived`).
    ``lost`` gets the errors of these encodings. If no payload arrived, ``skip`` (int32) may be the
    index of one of the c chunks that is not needed."""
    decode: Callable[[Payload, Array, Encoder, Array | None], Array]
    """(payloads [c] of the last stage, chunks, their encoders int32[c], result so far) -> result
    with these chunks' finished sums in it."""
    finish: Callable[[tuple[Arrived, ...], Array, Array | None], Array] | None = None
    """(arrived, chunks int32[1], result so far) -> this worker's slice of the result with the
    chunk's finished sum in it, exact: not encoded again. Only for `reduce_scatter`."""
    lost: Array | None = None
    """The zeros to which encodings write their errors; `None`: errors are not computed."""
    push: Callable[[Axis], Array] | None = None
    """(axis) -> the result of `decode` for all chunks, by one push kernel; worker i owns chunk
    i."""
