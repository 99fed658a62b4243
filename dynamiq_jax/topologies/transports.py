"""Transports: how payloads travel between workers, and what each transport can do.

Users name one by a string, see `dynamiq_jax.topologies.base.Topology.transport`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.seeds import rounded_to

TransportName = Literal["collectives", "permutes", "push"]
"""How payloads are sent. "collectives": an all-to-all or an all-gather, if all workers send to all.
"permutes": one ppermute for every payload, which is sent as soon as it is encoded; for links that
ppermutes use best (`topologies.xla`). "push": kernels write into the memory of the other
GPUs. If the codec supports it, one kernel does an all-reduce of one stream
(`pallas_kernels.all_reduce`); else each exchange is one kernel (`pallas_kernels.exchange`). Push
kernels share a CUDA stream with all other kernels, which wait for them. Push needs one process, up
to 8 GPUs (Hopper or newer), a mesh of the first GPUs in their order, and steps in which all workers
send to all."""

Sinks = Iterator[tuple[Any, Int[Array, " c"]]]
"""Payloads [c] of finished sums as they arrive, and their owners."""


class Transport:
    """XLA's collectives; subclasses replace them."""

    to_one: ClassVar[bool] = True
    """Whether a worker can send to one other worker, and not only to all."""
    one_by_one: ClassVar[bool] = False
    """Whether every payload is sent alone: what all send to all becomes n - 1 permutations."""
    reduces: ClassVar[bool] = False
    """Whether one kernel can do a whole all-reduce of one stream, if the codec has one."""
    streams: ClassVar[tuple[int, int]] = 4, 2**26
    """By default `Direct` has one stream for so many coordinates (second), up to the first."""

    def psum(self, axis: Axis, tree: Any) -> Any:
        """The sum of small arrays over the workers, in their dtypes."""
        return axis.psum(tree)

    def exchange(self, axis: Axis, payloads: Any) -> Any:
        """Sends ``x[j]`` of every leaf to worker j; ``result[i]`` is from worker i."""
        return axis.all_to_all(payloads)

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """The sinks of all workers, of which ``payloads`` [1] has this worker's."""
        # A gather brings a leading axis of workers; it replaces the axis of one chunk.
        own = jax.tree.map(lambda x: x[0], payloads)
        gathered = jax.tree.map(lambda x: axis.all_gather(x, to="invarying"), own)
        yield gathered, jnp.arange(axis.size, dtype=jnp.int32)


class Permutes(Transport):
    """One ppermute for every payload."""

    one_by_one = True
    streams = 2, 2**27

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """See `Transport`; the worker's own payload comes first, while the others are sent."""
        me, n_workers = axis.index, axis.size
        yield payloads, me[None]
        for by in range(1, n_workers):
            # Every worker sends ``by`` places on, and gets from the worker ``by`` places before.
            pairs = [(i, (i + by) % n_workers) for i in range(n_workers)]
            yield axis.ppermute(payloads, pairs), ((me - by) % n_workers)[None]


class Push(Transport):
    """Kernels that write into the memory of the other GPUs."""

    to_one = False
    reduces = True
    streams = 1, 1

    def psum(self, axis: Axis, tree: Any) -> Any:
        """See `Transport`; every worker adds up all terms, in f32 and in their order."""

        def total(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return axis.assume_invarying(jnp.sum(x, axis=0, dtype=x.dtype))
            wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
            added = rounded_to(x.dtype, jnp.sum(x.astype(wide), axis=0))
            return axis.assume_invarying(added.astype(x.dtype))

        return jax.tree.map(total, _pushed(axis, tree, to_all=True))

    def exchange(self, axis: Axis, payloads: Any) -> Any:
        """See `Transport`."""
        return _pushed(axis, payloads, to_all=False)

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """See `Transport`."""
        gathered = _pushed(axis, jax.tree.map(lambda x: x[0], payloads), to_all=True)
        yield jax.tree.map(axis.assume_invarying, gathered), jnp.arange(axis.size, dtype=jnp.int32)


def _pushed(axis: Axis, tree: Any, *, to_all: bool) -> Any:
    """An all-to-all, or an all-gather if ``to_all``, of all leaves by one push kernel."""
    sizes = axis.sizes
    return pk.exchange(axis.to_varying(tree), sizes, to_all=to_all)


TRANSPORTS: dict[str, Transport] = dict(
    zip(get_args(TransportName), (Transport(), Permutes(), Push()), strict=True)
)
"""Transports by the names that users pass."""
