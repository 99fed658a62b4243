"""Benchmarks behind the `dynamiq-jax bench` commands: all-reduce on a mesh, kernels on a device."""
