"""Benchmarks behind the `dynamiq-jax bench` command: all-reduce on a mesh."""
