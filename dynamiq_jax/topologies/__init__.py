"""Topologies: schedules of who encodes which chunk when, for whom."""

from dynamiq_jax.topologies.base import (
    Rounds,
    Schedule,
    Stage,
    Step,
    Topology,
    Transport,
    steps_of,
)
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.choice import (
    Choice,
    assumed,
    automatic,
    fast_links,
    with_transport,
)
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.hierarchical import AnyTopology, Hierarchical, across_hosts
from dynamiq_jax.topologies.ring import Ring

__all__ = [
    "AnyTopology",
    "Butterfly",
    "Choice",
    "Direct",
    "Hierarchical",
    "Ring",
    "Rounds",
    "Schedule",
    "Stage",
    "Step",
    "Topology",
    "Transport",
    "across_hosts",
    "assumed",
    "automatic",
    "fast_links",
    "steps_of",
    "with_transport",
]
