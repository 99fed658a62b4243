"""The topology that `topology=None` chooses, by a rule from facts that all workers share.

1. All devices are in one process, or in one NVLink domain: `Direct`, for any number of workers.
2. Several axes have more than one worker: `Hierarchical`. Its outer topology is `Butterfly` if the
   number of hosts is a power of two, else `Ring`, or `Direct` for more than `MANY` hosts
   (`across_hosts`).
3. There is one axis: `Butterfly` if its number of workers is a power of two, else `Ring`. If the
   axis numbers its workers host by host, both keep the traffic between hosts as low as a hierarchy
   would. `Direct` would send all gradients of a host to other hosts.

`explain` may be asked about more workers than JAX has devices. JAX's devices give no information
about these workers, so rules 2 and 3 apply, and `assumed` says so.

The transport that `transport=None` chooses: "permutes" for up to `COPYING` workers if copy engines
execute ppermutes (`topologies.xla`), else "collectives". A sum over NVLink that is not beside
other work is "push" if its size is between the limits of `dynamiq_jax.methods.dynamiq.crossover`,
and the mesh has its devices in their order (`dynamiq_jax.core.meshes`).
"""

import math

import jax

from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.hierarchical import MANY, AnyTopology, Hierarchical, across_hosts
from dynamiq_jax.topologies.links import in_one_domain
from dynamiq_jax.topologies.ring import Ring
from dynamiq_jax.topologies.transports import TransportName
from dynamiq_jax.topologies.xla import between_hosts, copy_engines

COPYING = 4
"""The largest number of workers for which copy engines send payloads. A sum of 32 MiB takes 377 µs
with the 6 copies of four H200, and 1608 with the 14 of eight (`benchmarks/crossover.py`, JAX
0.11.2)."""


def assumed(sizes: tuple[int, ...]) -> str | None:
    """Assumptions of `explain` about more workers than JAX has devices, in words, else `None`."""
    n, here = math.prod(sizes), jax.device_count()
    if n <= here:
        return None
    several = sum(size > 1 for size in sizes) > 1
    hosts = f"{n // sizes[-1]} hosts of {sizes[-1]} workers" if several else "several hosts"
    return (
        f"assumed, as {n} workers are more than the devices here ({here}): {hosts}, with links "
        "between them that are slower than NVLink"
    )


def automatic(sizes: tuple[int, ...], *, here: bool = True) -> tuple[AnyTopology, str]:
    """The topology for axes of these sizes, and the reason; ``here``: they are of JAX's devices."""
    if here and in_one_domain():
        domain = "all devices are in one process or NVLink domain"
        return Direct(), f"{domain}, where Direct errs least"
    n = math.prod(sizes)
    if sum(size > 1 for size in sizes) > 1:
        hosts = n // sizes[-1]
        outer = across_hosts(hosts)
        reason = "several axes, whose last one has fast links"
        if outer == Direct():
            reason += f"; {hosts} hosts are too many for a ring"
        return Hierarchical(outer=outer), reason
    some = f"{n} workers on several hosts"
    if n & (n - 1) == 0:
        return Butterfly(), f"{some} are a power of two"
    remedy = "; two axes, hosts first, would take fewer hops and err less" if n > MANY else ""
    return Ring(), f"{some} are not a power of two{remedy}"


def with_transport(
    topology: AnyTopology,
    transport: TransportName | None = None,
    *,
    n_workers: int,
    here: bool = True,
) -> tuple[AnyTopology, str | None]:
    """Chooses the transport of a topology, on both levels.

    Copy engines are considered only if the workers are JAX's devices (``here``). Returns the
    topology, and a note on its transfers: why copy engines are used, or that transfers start early.
    """
    engines = copy_engines() if here and transport is None else None
    if engines is None:
        return topology.with_transport(
            transport or "collectives"
        ), between_hosts() if here else None
    if n_workers > COPYING:
        why = f"{n_workers} workers are more than {COPYING}, and each of n - 1 copies takes longer"
        return topology.with_transport("collectives"), f"by collectives, since {why}"
    return topology.with_transport("permutes"), f"by copy engines, since {engines}"
