"""Training steps: gradients that arrive reduced."""
