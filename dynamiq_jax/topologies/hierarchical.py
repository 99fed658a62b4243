"""Hierarchical: native collectives over fast inner links, compressed ones over slow outer links."""

import dataclasses
import math
from dataclasses import dataclass

from dynamiq_jax.core.checks import Options
from dynamiq_jax.topologies.base import Levels, Topology
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.ring import Ring
from dynamiq_jax.topologies.transports import TransportName

MANY = 8
"""The number of workers beyond which payloads are too small to be sent one after the other.

A message costs about 15 µs between GPUs of one process; for networks this is
an assumption. The largest default bucket of f32 gradients takes 42 MB at 5 bits, 57 MB on fast
links. Among 8 workers one payload then takes 17 µs at NVLink's 430 GB/s. Among 8 hosts of 8 GPUs it
takes 13 µs at 400 Gb/s for each GPU. With more workers the messages take longer than the bytes.
"""


def across_hosts(n_hosts: int) -> Topology:
    """The default topology between hosts, for one worker a host or the outer level.

    All topologies send the same number of bytes there. A ring's hops wait for each other, and its
    error grows with their number.
    """
    if n_hosts & (n_hosts - 1) == 0:
        return Butterfly()
    return Ring() if n_hosts <= MANY else Direct()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchical(Options):
    """Two levels, for a tuple of axes: the last axis is inner, all others are outer.

    First the gradient is reduce-scattered over the inner axis, so that each of its workers has one
    slice. Then the slices are all-reduced over the outer axes, compressed. Last, the results are
    gathered over the inner axis. Only 1/n_inner of the gradient crosses the outer links. A
    `psum_scatter` ends after the scatter over the outer axes; an `all_gather` sends its payloads
    over the outer axes first.

    Attributes:
      inner: the topology over the inner axis. `None` means native collectives, for links on which
        compression does not pay, in bf16 (f16 gradients in f16; with the methods `BF16` and `F32`,
        all gradients in that dtype). A topology also compresses there, at the cost of two more
        encodings.
      outer: the topology over the outer axes. `None` chooses `Butterfly` for powers of two, else
        `Ring`, or `Direct` for more than 8 workers.
    """

    inner: Topology | None = None
    outer: Topology | None = None

    def __post_init__(self):
        """Refuses nested hierarchies and objects that are not topologies."""
        for name, value in (("inner", self.inner), ("outer", self.outer)):
            if value is not None and not isinstance(value, Topology):
                raise ValueError(
                    f"{name}={value!r} is not a topology of one level; pass for example dq.Ring()"
                )

    def levels(self, sizes: tuple[int, ...]) -> Levels:
        """The last axis is the inner level; the other axes are the outer level."""
        outer = self.outer or across_hosts(math.prod(sizes[:-1]))
        return Levels(self.inner, outer, sizes[-1])

    def on(self, sizes: tuple[int, ...]) -> "AnyTopology":
        """The hierarchy with its outer topology chosen; only that topology if n_inner is 1."""
        if len(sizes) < 2:
            raise ValueError(
                f"topology=Hierarchical() needs two axes and got {len(sizes)}; pass "
                "axis_name=('node', 'gpu'), the axis of the fast links last"
            )
        outer = self.levels(sizes).outer
        return outer.on(sizes) if sizes[-1] == 1 else dataclasses.replace(self, outer=outer)

    def over(self, names: tuple[str, ...], axes: tuple[str, ...]) -> "AnyTopology | None":
        """The topology of one level, or the hierarchy over the inner axis and some outer axes."""
        if names == axes[-1:]:
            return self.inner
        return self if names[-1:] == axes[-1:] else self.outer

    def with_transport(self, transport: TransportName) -> "Hierarchical":
        """The hierarchy with this transport on both levels, unless a level names another one."""
        inner, outer = (
            level and level.with_transport(transport) for level in (self.inner, self.outer)
        )
        return Hierarchical(inner=inner, outer=outer)


AnyTopology = Topology | Hierarchical
"""A topology with one level or two, as a caller passes it."""
