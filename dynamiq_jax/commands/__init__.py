"""The `dynamiq-jax` command, and what it writes and reads."""
