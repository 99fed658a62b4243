"""Executors run schedules (`dynamiq_jax.topologies`) with codecs (`ChunkCodec`)."""

from dynamiq_jax.executors.codec import Arrived, ChunkCodec, Encoder, Payload
from dynamiq_jax.executors.collectives import all_reduce, reduce_scatter

__all__ = [
    "Arrived",
    "ChunkCodec",
    "Encoder",
    "Payload",
    "all_reduce",
    "reduce_scatter",
]
