"""Where supervisors listen: a list, or a file whose lines may change while a run lasts.

A name may also get another number, as the pods of Kubernetes do when they are replaced. A thread
asks for numbers, since a server of names may be slow to answer and heartbeats must not wait.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LOOK_UP = 1.0
"""Seconds between two looks at names, and at the file."""


class Address(NamedTuple):
    """Where a supervisor listens."""

    name: str
    port: int

    def at(self, port: int) -> str:
        """NAME:PORT of another port, as JAX reads it: numbers of IPv6 in brackets."""
        return f"[{self.name}]:{port}" if ":" in self.name else f"{self.name}:{port}"


def parse_hosts(text: str) -> tuple[Address, ...]:
    """The addresses of "10.0.0.1:29500,10.0.0.2:29500"; of "@FILE" those of its lines.

    Raises:
      ValueError: a host is named twice, or without a port.
      OSError: the file cannot be read.
    """
    words = text.split(",")
    if file := file_of(text):
        lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
        words = [line for line in lines if line]
    found = []
    for word in words:
        name, _, port = word.strip().rpartition(":")
        if not name or not port.isdecimal() or not 1024 <= int(port) <= 65000:
            raise ValueError(
                f"hosts={word.strip()!r}: give NAME:PORT for each host, with a port from 1024 to "
                "65000, for example 10.0.0.1:29500,10.0.0.2:29500, or @FILE with one in each line"
            )
        found.append(Address(name.removeprefix("[").removesuffix("]"), int(port)))
    if not found:
        raise ValueError(f"hosts={text!r} has no host: give NAME:PORT in each line")
    if len(set(found)) < len(found):
        raise ValueError(f"hosts={text!r} names a host twice: give each host once")
    return tuple(found)


def file_of(text: str) -> Path | None:
    """The file that ``--hosts`` names; `None` if it is a list."""
    return Path(text[1:]) if text.startswith("@") else None


class Book:
    """The addresses of all supervisors of a run, as they are now.

    Args:
      hosts: what ``--hosts`` said at the start.
      file: the file that it came from, if any.
      hears: whether a host is heard, whose number is then right.
      say: called with a line about a file that does not fit.
    """

    def __init__(
        self,
        hosts: tuple[Address, ...],
        file: Path | None,
        hears: Callable[[int], bool],
        say: Callable[[str], None],
    ) -> None:
        self.hosts, self._file, self._hears, self._say = hosts, file, hears, say
        self.family = socket.AF_INET6 if ":" in hosts[0].name else socket.AF_INET
        self.numbers: list[Any] = [self._known(host) for host in hosts]
        """Arguments of `socket.sendto`; `None` for a name that nobody knows yet."""
        self._complaint = ""

    def watch(self) -> None:
        """Follows changes from now on, if there is anything that can change."""
        if self._file or None in self.numbers:
            threading.Thread(target=self._follow, daemon=True).start()

    def look_up(self) -> None:
        """Reads the file and asks for the numbers of names, once."""
        before = self.hosts
        if self._file:
            self._read()
        for i, host in enumerate(self.hosts):
            if host != before[i] or not (self.numbers[i] and self._hears(i)):
                self.numbers[i] = self._known(host) or self._asked(host)

    def _follow(self) -> None:
        while True:
            self.look_up()
            time.sleep(LOOK_UP)

    def _read(self) -> None:
        complaint = ""
        try:
            hosts = parse_hosts(f"@{self._file}")
        except (OSError, ValueError) as error:  # while somebody writes it
            complaint = str(error)
        else:
            if len(hosts) == len(self.hosts):
                self.hosts = hosts
            else:
                complaint = f"it has {len(hosts)} hosts, and this run {len(self.hosts)}"
        if complaint and complaint != self._complaint:
            self._say(f"{self._file} is not followed until it is right: {complaint}")
        self._complaint = complaint

    def _known(self, host: Address) -> Any:
        """An address that is a number already."""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host.name)
            return tuple(host)
        return None

    def _asked(self, host: Address) -> Any:
        with contextlib.suppress(OSError, UnicodeError):
            return socket.getaddrinfo(*host, self.family, socket.SOCK_DGRAM)[0][-1]
        return None
