"""Internal: training on meshes of Explicit axes, outside of maps; imported at its first use."""
