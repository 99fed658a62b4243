"""Topologies: schedules that say which worker encodes which chunk, when, and for which worker."""

from dynamiq_jax.topologies.schedules import (
    AnyTopology,
    Butterfly,
    Direct,
    Hierarchical,
    Ring,
    Rounds,
    Stage,
    Step,
    Topology,
    steps_of,
)

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
