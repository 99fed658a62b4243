"""Internal: what traced programs do with values, read from their jaxprs."""
