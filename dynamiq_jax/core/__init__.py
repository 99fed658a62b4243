"""Internal: the workers of a collective, seeds, hashes, and what JAX versions differ in."""
