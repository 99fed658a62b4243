"""Internal: code for unstable parts of JAX; a call that needs such code imports it."""
