"""Runs plans: one loop over the leaves and buckets of all collectives."""
