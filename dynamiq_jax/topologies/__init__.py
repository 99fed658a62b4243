"""Topologies: schedules that say which worker encodes which chunk, when, and for which worker."""

from dynamiq_jax.topologies.base import Rounds, Stage, Step, Topology, steps_of
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.hierarchical import AnyTopology, Hierarchical
from dynamiq_jax.topologies.ring import Ring

__all__ = [
    "AnyTopology",
    "Butterfly",
    "Direct",
    "Hierarchical",
    "Ring",
    "Rounds",
    "Stage",
    "Step",
    "Topology",
    "steps_of",
]
