"""Topologies: how payloads move between workers."""

from dynamiq_jax.topologies.base import Arrived, ChunkOps, Stage, Topology
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.choice import Choice, across_hosts, automatic, fast_links
from dynamiq_jax.topologies.direct import Direct
from dynamiq_jax.topologies.hierarchical import Hierarchical
from dynamiq_jax.topologies.ring import Ring

__all__ = [
    "Arrived",
    "Butterfly",
    "Choice",
    "ChunkOps",
    "Direct",
    "Hierarchical",
    "Ring",
    "Stage",
    "Topology",
    "across_hosts",
    "automatic",
    "fast_links",
]
