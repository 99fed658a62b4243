"""Plans: one place decides how leaves travel, the engine runs that, and `explain` tells it."""
