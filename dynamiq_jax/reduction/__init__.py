"""Collectives over pytrees: all-reduce, reduce-scatter, all-gather, all-to-all."""
