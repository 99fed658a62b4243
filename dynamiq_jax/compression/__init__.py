"""The method, the topology and the limits of a collective."""
