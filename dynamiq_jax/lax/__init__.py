"""JAX's collectives and types as this library needs them."""
