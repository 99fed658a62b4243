"""Executors run schedules (`dynamiq_jax.topologies`) with codecs (`ChunkCodec`)."""
