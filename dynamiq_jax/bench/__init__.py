"""Benchmarks behind the `dynamiq bench` commands: all-reduce on a mesh, kernels on one device."""
