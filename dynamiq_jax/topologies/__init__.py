"""Topologies: how payloads move between workers."""

from dynamiq_jax.topologies.base import ChunkOps, Topology
from dynamiq_jax.topologies.ring import Ring

__all__ = ["ChunkOps", "Ring", "Topology"]
