"""Hosts for which all others wait, by the time of their own work."""

import socket
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dynamiq_jax.hosts.told import told_by_all

LONGEST = 40
"""Characters of a host's name that are told."""


class Slow(NamedTuple):
    """A process that is slower than the others."""

    process: int
    host: str
    """The name of its machine."""
    seconds: float
    """How long its own work takes."""
    usual: float
    """How long that of the median process takes."""

    def __str__(self) -> str:
        took = f"its own work takes {self.seconds:.3g} s, that of others {self.usual:.3g} s"
        return f"process {self.process} ({self.host}) is slow: {took}"


def slow_hosts(own: float, step: float, *, share: float = 0.1) -> list[Slow]:
    """Returns the processes whose own work takes longer, by a share of a step, than others' does.

    All processes call it alike, as they call a collective. A step ends on all hosts at the same
    time, so its seconds do not tell which one is slow. Pass those of work without collectives:
    reading a batch, or a program of this process alone, such as the loss of a micro-batch.

    Args:
      own: the seconds of this process's own work in a step.
      step: the seconds of a step. For a program that is not part of it, pass ``own`` again.
      share: of a step, by how much a process may be slower than the median one.

    Returns:
      The slow processes, the slowest first; the same on all processes.
    """
    return _slow(told_by_all([own, step, socket.gethostname()[:LONGEST]]), share)


def _slow(told: Sequence[tuple[float, float, str]], share: float) -> list[Slow]:
    """The slow ones of processes that tell own seconds, a step's, and the name of their host."""
    usual = statistics.median_low(own for own, *_ in told)  # of two processes the faster one's
    found = [
        Slow(process, host, own, usual)
        for process, (own, step, host) in enumerate(told)
        if own - usual > share * step
    ]
    return sorted(found, key=lambda slow: -slow.seconds)
