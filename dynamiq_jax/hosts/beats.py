"""The messages between supervisors: one datagram each, many times a second."""

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping

LONGEST_CAUSE = 600
"""Characters of a cause that a datagram carries."""


class Phase(enum.StrEnum):
    """The current state of a supervisor."""

    READY = "ready"
    """Its process does not run, and may be started."""
    RUNNING = "running"
    """Its process runs in `Beat.generation`."""
    DONE = "done"
    """Its process ended with status 0 in `Beat.generation`."""
    OVER = "over"
    """The whole run has ended with `Beat.status`."""
    LEAVING = "leaving"
    """This host was told to end; the others go on without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """The state of one supervisor.

    A generation is one start of the processes, numbered from 1. All processes that are started
    together have the same generation and the same members.
    """

    host: int
    phase: Phase = Phase.READY
    generation: int = 0
    """The newest generation in which this host's process has run; 0 before the first."""
    members: tuple[int, ...] = ()
    """The hosts of that generation, in ascending order; the first one is the coordinator."""
    hears: tuple[int, ...] = ()
    """The other hosts whose beats have arrived lately."""
    step: int = -1
    """The last step that the process has reported; -1 before the first report."""
    stopping: bool = False
    """The coordinator asks all members to save and to end, since another host has come."""
    cause: str = ""
    """Why the generation ended; empty if it did not fail."""
    status: int = 0
    """The exit status of a run that is over."""

    def encode(self, run: str) -> bytes:
        """The datagram. ``run`` names the run: beats of other runs are ignored."""
        fields = dataclasses.asdict(self) | {"run": run, "cause": self.cause[:LONGEST_CAUSE]}
        return json.dumps(fields).encode()


def decode(datagram: bytes, run: str, n_hosts: int) -> Beat | None:
    """The beat of a datagram; `None` for anything else that arrives at the port."""
    try:
        fields = json.loads(datagram)
        if fields.pop("run") != run:
            return None
        for name in ("members", "hears"):
            fields[name] = tuple(map(int, fields[name]))
        for name in ("host", "generation", "step", "status"):
            fields[name] = int(fields[name])
        beat = Beat(**fields | {"phase": Phase(fields["phase"]), "cause": str(fields["cause"])})
        return beat if 0 <= beat.host < n_hosts else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def connected(me: int, hears: Mapping[int, Iterable[int]]) -> tuple[int, ...]:
    """The hosts that can train with host ``me``, in ascending order, ``me`` among them.

    Each of them hears each other one. A host with a link that works in one direction is left out.

    Args:
      me: this host.
      hears: {host: the other hosts that it hears}, of all hosts that ``me`` hears and of ``me``.
    """
    heard = {host: set(others) for host, others in hears.items()}
    group = [me]
    for host in sorted(heard):
        if host != me and all(host in heard[a] and a in heard[host] for a in group):
            group.append(host)
    return tuple(sorted(group))
