"""Which topology `topology=None` means: a rule of facts that all workers share.

1. All devices in one process, or in one NVLink domain: `Direct`.
2. Several axes of more than one worker: `Hierarchical`, whose outer topology follows rule 3.
3. One axis: `Butterfly` if it has a power of two of workers, else `Ring`. A butterfly's first
   rounds stay among neighbours, so that on an axis that numbers its workers host by host it keeps
   the traffic between hosts as low as a hierarchy would.

`explain` may be told of more workers than JAX has devices. JAX's devices say nothing about those:
rules 2 and 3 serve, and `assumed` says so.

What `transport=None` of a topology means: "permutes" where ppermutes are copies by engines
(`dynamiq_jax.core.xla`), else "collectives".
"""

import math
from typing import NamedTuple

import jax

from dynamiq_jax.core.xla import copy_engines
from dynamiq_jax.topologies.base import AnyTopology, Transport
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.hierarchical import Hierarchical, across_hosts


class Choice(NamedTuple):
    """A topology and why it was chosen."""

    topology: AnyTopology
    reason: str


def in_one_domain() -> bool:
    """Whether every pair of JAX's devices talks at full rate, as far as JAX knows."""
    if jax.process_count() == 1:
        return True
    devices = jax.devices()
    domains = {getattr(d, "slice_index", None) for d in devices}
    return devices[0].platform in ("gpu", "cuda") and len(domains) == 1 and domains != {None}


def fast_links() -> bool:
    """Whether NVLink connects all GPUs: one domain, and of a kind that is only built with it."""
    kind = jax.devices()[0].device_kind
    known = ("SXM", "HBM3", "H200", "B200", "B300", "GB200", "GB300", "GH200")
    return in_one_domain() and "PCIe" not in kind and any(name in kind for name in known)


def assumed(sizes: tuple[int, ...]) -> str | None:
    """The assumptions of `explain` about a cluster that is not this one.

    Returns:
      Words for a reason; `None` for workers that JAX's devices could be.
    """
    n, here = math.prod(sizes), jax.device_count()
    if n <= here:
        return None
    several = sum(size > 1 for size in sizes) > 1
    hosts = f"{n // sizes[-1]} hosts of {sizes[-1]} workers" if several else "several hosts"
    return (
        f"assumed, as {n} workers are more than the devices here ({here}): {hosts}, with links "
        "between them that are slower than NVLink"
    )


def automatic(sizes: tuple[int, ...], *, here: bool = True) -> Choice:
    """The choice for axes of these sizes, the outermost first; ``here``: of JAX's devices."""
    if here and in_one_domain():
        return Choice(Direct(), "all devices are in one process or NVLink domain")
    n = math.prod(sizes)
    if sum(size > 1 for size in sizes) > 1:
        outer = across_hosts(n // sizes[-1])
        return Choice(Hierarchical(outer=outer), "several axes, whose last one has fast links")
    power = "a" if n & (n - 1) == 0 else "no"
    return Choice(across_hosts(n), f"{n} workers on several hosts are {power} power of two")


def with_transport(
    topology: AnyTopology, transport: Transport | None = None, *, here: bool = True
) -> tuple[AnyTopology, str | None]:
    """The topology, of both levels, with its transport filled in, and why copy engines serve.

    Without a ``transport``, they serve where they can: never, unless the workers are JAX's devices
    (``here``).
    """
    reason = copy_engines() if here and transport is None else None
    chosen = transport or ("collectives" if reason is None else "permutes")
    return topology.with_transport(chosen), reason
