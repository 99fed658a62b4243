"""Reads the collectives of a compiled program's text (HLO): who sends whom how much."""

import numpy as np

from dynamiq_jax.plan.program import NAMES as COLLECTIVES
from dynamiq_jax.plan.program import OPERATION, arrays_of, bits_of, collectives_of, groups_of

__all__ = ["COLLECTIVES", "OPERATION", "arrays_of", "bits_of", "groups_of"]


def sent_bytes(program, n_workers):
    """Bytes that one worker sends in one run of a compiled program, given as text (HLO)."""
    return sum(x.total_bytes for x in collectives_of(program, n_workers))


def moves_of(hlo):
    """(name, bits of all its arrays) of every collective."""
    found = filter(None, map(OPERATION.search, hlo.splitlines()))
    sizes = lambda match: (bits_of(*array) for array in arrays_of(match["type"]))
    return [(match["name"], sum(sizes(match))) for match in found]


def crossing_bytes(hlo, shape, axis):
    """Bytes of operands and results of collectives between devices that differ along an axis.

    ``shape`` has the sizes of all axes of the mesh, ``axis`` is the number of one of them.
    """
    total = 0
    for line in hlo.splitlines():
        match = OPERATION.search(line)
        if match is None:
            continue
        along = [{np.unravel_index(i, shape)[axis] for i in group} for group in groups_of(line)]
        if any(len(places) > 1 for places in along):
            total += sum(bits_of(*array) // 8 for array in arrays_of(match["type"]))
    return total
