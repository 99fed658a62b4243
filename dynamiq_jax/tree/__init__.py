"""Pytrees: which leaf travels how."""
