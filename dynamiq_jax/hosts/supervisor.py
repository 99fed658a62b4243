"""A supervisor: starts one host's process, and again whenever the processes of a run have ended.

Every host has one. All of them follow the same rules, and none is special:

* A supervisor sends its `Beat` to all others. The hosts that hear each other are a group.
* The first host of a group starts a new generation once all of the group are ready. The others
  start when they hear that it runs.
* When one process of a generation ends, stops, or is no longer heard, all others are killed. Each
  supervisor writes the cause. Then the next generation starts.
* A host that comes back is taken in: the first host asks all processes to save and to end.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamiq_jax.hosts.addresses import Address, Book
from dynamiq_jax.hosts.beats import Beat, Phase, connected, decode
from dynamiq_jax.hosts.child import KILLED, PROGRESS, TERMINATED, Child, Script
from dynamiq_jax.hosts.slots import Slots

PERIOD = 0.1
"""Seconds between two beats."""
LINGER = 1.0
"""Seconds for which a supervisor tells the others that the run is over."""
STOPPED = 1.0
"""Seconds after which a stopped process counts as lost."""
REPORTS = 60.0
"""Seconds after which a process that reports nothing is said to be one."""
DOUBT = 5 * PERIOD
"""Seconds for which a host that has failed lets the others name a cause before its own."""
HEALTHY = 60.0
"""Seconds after which a generation that fails no longer counts as a failed restart."""
SAVE = 120.0
"""Seconds that a process gets to save and to end after SIGTERM."""
CACHE = "JAX_COMPILATION_CACHE_DIR"
"""The variable with the folder of compiled programs, one of this run's own by default."""
PORTS = 10
"""JAX's coordination service takes one of as many ports above a supervisor's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a supervisor; equal on all hosts except ``host``. Times are in seconds."""

    hosts: tuple[Address, ...]
    host: int
    command: list[str]
    least: int
    silence: float = 5.0
    wait: float = 3.0
    patience: float = 300.0
    stall: float = 300.0
    restarts: int = 10
    events: Path | None = None
    ready: tuple[str, ...] = ()
    file: Path | None = None
    """The file of ``hosts``, which is followed."""

    def __post_init__(self) -> None:
        n = len(self.hosts)
        if not 0 <= self.host < n:
            raise ValueError(f"host_id={self.host} of {n} hosts: count from 0 to {n - 1}")
        if not 1 <= self.least <= n:
            raise ValueError(f"min_hosts={self.least} of {n} hosts: give 1 to {n}")
        for name in ("silence", "wait", "patience", "stall"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: give a positive number of seconds")
        if self.silence < 5 * PERIOD:
            raise ValueError(
                f"silence={self.silence} s: give at least {5 * PERIOD} s, the time of five beats"
            )
        if not self.command:
            raise ValueError("command: give the words of the command after --")
        if self.ready:
            Script.of(self.command)


class Supervisor:
    """One host's supervisor; `run` does it all.

    Args:
      settings: what to run, and where.
      clock: seconds of a clock that never goes back.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.clock = settings, clock
        self.beat = Beat(host=settings.host)
        self.others: dict[int, Beat] = {}
        self.heard: dict[int, float] = {}
        self.book = Book(settings.hosts, settings.file, self.hears, self.say)
        self.child: Child | None = None
        self.spare: Child | None = None
        """A process with imported modules that waits for the next start."""
        self._told: tuple[list[str], dict[str, str]] = [], {}  # the command, and its variables
        self._slots: Slots | None = None  # memory that outlives the process
        self._env: dict[str, str] = {}
        self._spares = bool(settings.ready)
        self._steps = 0  # how many numbers of steps the process has told
        self.status: int | None = None
        self._began = self._since = self._moved = clock()
        self._group: tuple[int, ...] = ()
        self._last = -1  # the step of the process that is behind
        self._failures = 0
        self._suspect: tuple[str, float] | None = None  # a consequence, and until when it waits
        self._stopped_since: float | None = None
        self._asked: float | None = None  # when SIGTERM was sent to the process
        self._signals = 0  # how many told this host to end
        self._notice = ""  # why it is to end
        self._anew: set[int] = set()  # hosts whose supervisors have started anew meanwhile
        self._stage = ""
        self._told_silence = False  # whether it was said that the process reports nothing
        # Supervisors may have read a file at different times: its lines do not name the run.
        own = (settings.file.name, len(settings.hosts)) if settings.file else settings.hosts
        self._run = hashlib.sha256(repr(own).encode()).hexdigest()[:16]

    # --- The loop ---

    def run(self) -> int:
        """Supervises until the run is over; returns the exit status."""
        datagrams = socket.socket(self.book.family, socket.SOCK_DGRAM)
        programs = tempfile.TemporaryDirectory(prefix="dynamiq_jax_", ignore_cleanup_errors=True)
        with datagrams as self._socket, Slots.made() as self._slots, programs as folder:
            self._env = {CACHE: os.environ.get(CACHE, folder)}
            self._socket.setblocking(False)
            self._bind()
            self.book.watch()
            try:
                while self.status is None:
                    self.receive()
                    self.tick()
                    self.send()
                self._farewell()
            finally:
                for child in filter(None, (self.child, self.spare)):
                    child.close()
        return self.status

    def _bind(self) -> None:
        """Takes this host's port."""
        port = self.settings.hosts[self.settings.host].port
        try:
            self._socket.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                f"UDP port {port} of host {self.settings.host} is in use on this machine, perhaps "
                "by another supervisor; end that one, or give another port in --hosts on all hosts"
            ) from error

    def receive(self) -> None:
        """Reads beats and output for the length of a period."""
        deadline = self.clock() + PERIOD
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while (left := deadline - self.clock()) > 0:
                if not selector.select(left):
                    break
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    while True:
                        self.take(self._socket.recv(2**16))
        if self.child:
            self.child.pump()

    def take(self, datagram: bytes) -> None:
        """Keeps a beat of another host."""
        beat = decode(datagram, self._run, len(self.settings.hosts))
        if beat and beat.host != self.beat.host:
            before = self._newest(beat.host)
            if before and beat.generation == 0:
                self._anew.add(beat.host)
            self.others[beat.host], self.heard[beat.host] = beat, self.clock()

    def send(self) -> None:
        """Sends this host's beat to all others."""
        hears = tuple(sorted(host for host in self.others if self.hears(host)))
        self.beat = dataclasses.replace(self.beat, hears=hears)
        datagram = self.beat.encode(self._run)
        for host, number in enumerate(self.book.numbers):
            if host != self.beat.host and number:
                with contextlib.suppress(OSError):  # a link that is down
                    self._socket.sendto(datagram, number)

    def _farewell(self) -> None:
        end = self.clock() + LINGER
        while self.clock() < end:
            self.send()
            time.sleep(PERIOD)

    # --- What is known of the others ---

    def hears(self, host: int) -> bool:
        """Whether a beat of the host has arrived lately."""
        return self.clock() - self.heard.get(host, -1e9) < self.settings.silence

    def group(self) -> tuple[int, ...]:
        """The hosts that can start together, this one among them."""
        gone = Phase.LEAVING, Phase.OVER
        live = {h: b for h, b in self.others.items() if self.hears(h) and b.phase not in gone}
        return connected(self.beat.host, {h: b.hears for h, b in live.items()} | {
            self.beat.host: live.keys()
        })  # fmt: skip

    def names(self, hosts: Any) -> str:
        """The hosts' numbers and addresses, for messages."""
        hosts = sorted(hosts)
        words = [f"{host} ({self.book.hosts[host].name})" for host in hosts]
        return ("host " if len(hosts) == 1 else "hosts ") + ", ".join(words)

    # --- The rules ---

    def tick(self) -> None:
        """Applies the rules once."""
        over = next((b for h, b in self.others.items() if b.phase is Phase.OVER and self.hears(h)),
                    None)  # fmt: skip
        if over and self.beat.phase is not Phase.OVER:
            self._over(over.status, over.cause)
        elif self._notice and not self.child:
            self._over(TERMINATED, f"told to end ({self._notice})", Phase.LEAVING)
        elif self.beat.phase is Phase.RUNNING:
            self._watch_spare()
            self._watch()
        elif self.beat.phase is Phase.DONE and self._all_done():
            self._over(0, "")
        elif self.beat.phase is Phase.READY:
            self._watch_spare()
            self._prepare()
        elif self.beat.phase is Phase.DONE:
            self._prepare()

    def _all_done(self) -> bool:
        return all(map(self._finished, set(self.beat.members) - {self.beat.host}))

    def _prepare(self) -> None:
        """While no process runs: starts one, alone as the first of a group or behind the first."""
        now, me = self.clock(), self.beat.host
        for host, beat in self.others.items():
            first = beat.phase is Phase.RUNNING and beat.members[:1] == (host,)
            if first and self.hears(host) and not beat.stopping:
                if me in beat.members and beat.generation > self.beat.generation:
                    return self._start(beat.generation, beat.members)
        group = self.group()
        if group != self._group:
            self._group, self._since = group, now
        states = [self.others[host] for host in group if host != me]
        ready = all(beat.phase in (Phase.READY, Phase.DONE) for beat in states)
        missing = set(range(len(self.settings.hosts))) - set(group)
        left = {h for h in missing if self.hears(h) and self.others[h].phase is Phase.LEAVING}
        waited = missing == left or now - self._since >= self.settings.wait
        enough = not missing or (len(group) >= self.settings.least and waited)
        if group[0] == me and ready and enough:
            known = [beat.generation for beat in self.others.values()]
            return self._start(self._free(1 + max([self.beat.generation, *known])), group)
        if len(group) >= self.settings.least:
            self._began = now
        elif now - self._began > self.settings.patience:
            self._over(
                1, f"{self.names(missing)} did not come within {self.settings.patience:g} s; "
                f"{len(group)} of {self.settings.least} hosts that are needed (--min-hosts) came",
            )  # fmt: skip

    def _free(self, generation: int) -> int:
        """The next generation whose port is free on this host, where the coordinator runs."""
        for number in range(generation, generation + PORTS):
            port = self.book.hosts[self.beat.host].port + 1 + number % PORTS
            with socket.socket(self.book.family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", port))
                    return number
                except OSError as error:
                    self.say(f"TCP port {port}, for JAX's coordinator: {error.strerror}")
        return generation

    def _start(self, generation: int, members: tuple[int, ...]) -> None:
        """Starts this host's process as one of a generation."""
        first = self.book.hosts[members[0]]
        values = {
            "coordinator": first.at(first.port + 1 + generation % PORTS),
            "processes": str(len(members)),
            "process_id": str(members.index(self.beat.host)),
        }
        env = {
            "COORDINATOR": values["coordinator"],
            "NUM_HOSTS": values["processes"],
            "HOST_ID": values["process_id"],
        }
        self._told = [_filled(word, values) for word in self.settings.command], env
        self.child = self._begun()
        self.beat = Beat(
            host=self.beat.host, phase=Phase.RUNNING, generation=generation, members=members
        )
        self._suspect = self._stopped_since = self._asked = None
        self._anew.clear()
        self._began = self._moved = self.clock()
        self._stage, self._last, self._steps, self._told_silence = "", -1, 0, False
        missing = set(range(len(self.settings.hosts))) - set(members)
        without = f", without {self.names(missing)}" if missing else ""
        self.say(f"start {generation} with {len(members)} hosts{without}")
        self.event("start", members=members, pid=self.child.pid)

    def _begun(self) -> Child:
        """A process that runs what was told: the one that waits, or a new one."""
        spare, self.spare = self.spare, None
        if spare and spare.begin(*self._told):
            return spare
        if spare:
            self._without(spare)
        command, env = self._told
        return Child(command, self._env | env, _forward, slots=self._slots)

    def _without(self, spare: Child) -> None:
        """Says why a process has ended that was to wait; from now on none does."""
        end = spare.ended()
        spare.close()
        self._spares = False
        why = end.text if end else "does not listen"
        self.say(f"the process that waits for the next start {why}; starts take longer")

    def _watch_spare(self) -> None:
        """Lets a process get ready for the next start, and says so if it ends.

        It does so while this host waits for others, and once the first step is over, which
        compiles and needs the cores.
        """
        if self.spare and self.spare.ended():
            spare, self.spare = self.spare, None
            self._without(spare)
        elif self.spare:
            self.spare.pump()
        elif self._spares and (self.child is None or self._steps > 1):
            command = list(self.settings.command)
            ready = self.settings.ready
            self.spare = Child(command, self._env, _forward, ready=ready, slots=self._slots)

    def _watch(self) -> None:
        """While the process runs: ends it when the generation has failed or a host has come."""
        assert self.child
        self._read_progress()
        if end := self.child.ended():
            if self.child.waits and self._asked is None:  # it is no end of the script's
                self._without(self.child)
                self.child = self._begun()
                return self.event("start", members=self.beat.members, pid=self.child.pid)
            return self._child_ended(end)
        if cause := self._cause():
            return self._fail(cause)
        if self._suspect and self.clock() > self._suspect[1]:
            return self._fail(self._suspect[0])
        stopping = self._to_stop()
        if stopping and self._asked is None:
            self._asked = self.clock()
            self.beat = dataclasses.replace(self.beat, stopping=True)
            self.child.signal(signal.SIGTERM)
        if self._asked is not None and self.clock() - self._asked > SAVE:
            self._fail(f"host {self.beat.host}: not ended {SAVE:g} s after SIGTERM")
        elif self._signals > 1:
            self._fail(f"host {self.beat.host}: told to end a second time, without saving")

    def _read_progress(self) -> None:
        assert self.child
        stage = self.child.reported()
        most = min(REPORTS, self.settings.stall)
        if not (stage or self._told_silence) and self.clock() - self._began > most:
            self._told_silence = True
            self.say(
                f"the process has written no step into ${PROGRESS} for {most:g} s: without it a "
                "process that hangs is not noticed, and no host that comes back is taken in"
            )
        if stage and stage != self._stage:
            self._stage = stage
            if stage.isdecimal():
                self.beat = dataclasses.replace(self.beat, step=int(stage))
                self._steps += 1
            self.event("step" if stage.isdecimal() else "stage", reached=stage)

    def _child_ended(self, end: Any) -> None:
        """The process has ended by itself."""
        if end.status == 0:
            self._close(Phase.DONE, "")
        elif self._asked is not None and end.status in (TERMINATED, -signal.SIGTERM):
            self._close(Phase.READY, "")
        elif end.status in KILLED:
            self._fail(f"{self.names([self.beat.host])}: {end.text}")
        elif self._suspect is None:
            # Another host's end may be the cause, and its beats tell so, or that there are none.
            follows = end.consequence or end.status == TERMINATED
            doubt = self.settings.silence + 1 if follows else DOUBT
            self._suspect = f"{self.names([self.beat.host])}: {end.text}", self.clock() + doubt
        elif cause := self._cause():
            self._fail(cause)
        elif self.clock() > self._suspect[1]:
            self._fail(self._suspect[0])

    def _cause(self) -> str | None:
        """Why the generation has failed, as far as other hosts and the clock tell."""
        now, beat = self.clock(), self.beat
        members = [host for host in beat.members if host != beat.host]
        told = {h: self.others[h] for h in members if h in self.others and self.hears(h)}
        for host, other in told.items():
            if other.generation == beat.generation and other.phase is Phase.READY and other.cause:
                return other.cause
            if host in self._anew:
                return f"{self.names([host])}: killed with its supervisor, which has started anew"
            if other.generation > beat.generation:
                return f"{self.names([host])}: went on without this host"
            if other.phase is Phase.LEAVING:
                return f"{self.names([host])}: {other.cause}"
            unheard = beat.host not in other.hears
            behind = other.generation < beat.generation
            if (behind or unheard) and now - self._began > self.settings.silence:
                return f"{self.names([host])}: " + (
                    f"did not start within {self.settings.silence:g} s"
                    if behind
                    else "does not hear this host; the link works in one direction alone"
                )
        if silent := [host for host in members if host not in told and not self._finished(host)]:
            if now - self._began > self.settings.silence:
                return self._silence(silent, members)
        rivals = [h for h, b in self.others.items() if b.phase is Phase.RUNNING and self.hears(h)]
        if beat.members[0] > min([beat.host, *(h for h in rivals if h not in beat.members)]):
            return f"{self.names([min(rivals)])}: runs without this host"
        return self._stopped() or self._stalled(told)

    def _newest(self, host: int) -> Beat | None:
        """The newest beat of a member, if it is of this host's generation."""
        beat = self.others.get(host)
        return beat if beat and beat.generation == self.beat.generation else None

    def _finished(self, host: int) -> bool:
        """Whether a member has ended well, and so may be silent."""
        beat = self._newest(host)
        if beat is None:
            return False
        return beat.phase in (Phase.DONE, Phase.OVER) and beat.status == 0

    def _silence(self, silent: list[int], members: list[int]) -> str:
        text = f"{self.names(silent)}: no heartbeat for {self.settings.silence:g} s"
        if len(silent) == len(members) > 1:
            return f"{text}; this host ({self.beat.host}) has lost its link, or all others are dead"
        return f"{text}; dead, stopped, or its link is cut"

    def _stopped(self) -> str | None:
        """Whether this host's process is stopped."""
        assert self.child
        if not self.child.stopped():
            self._stopped_since = None
            return None
        self._stopped_since = self._stopped_since or self.clock()
        if self.clock() - self._stopped_since < STOPPED:
            return None
        return f"{self.names([self.beat.host])}: its process is stopped (SIGSTOP)"

    def _stalled(self, told: dict[int, Beat]) -> str | None:
        """Whether the process that is behind has begun no step for long; it is to blame."""
        steps = {self.beat.host: self.beat.step} | {host: b.step for host, b in told.items()}
        last, most = min(steps.values()), max(steps.values())
        if last != self._last or last < 0:
            self._last, self._moved = last, self.clock()
        if self.clock() - self._moved < self.settings.stall:
            return None
        behind = [host for host, step in steps.items() if step == last]
        text = f"no step for {self.settings.stall:g} s, at step {last}"
        return f"{self.names(behind)}: {text}" + (f", others at {most}" if most > last else "")

    def _to_stop(self) -> bool:
        """Whether the process shall save and end: another host has come, or this one leaves."""
        if self._notice:
            return True
        first = self.beat.members[0]
        if first != self.beat.host:
            beat = self._newest(first)
            return beat is not None and beat.stopping
        group = self.group()
        if group != self._group:
            self._group, self._since = group, self.clock()
        stable = self.clock() - self._since >= self.settings.wait
        more = set(group) > set(self.beat.members)
        if more and stable and self.beat.step >= 0 and self._asked is None:
            came = set(group) - set(self.beat.members)
            self.say(f"{self.names(came)} came back: all save and start again")
        return self._asked is not None or (more and stable and self.beat.step >= 0)

    def _fail(self, cause: str) -> None:
        """Ends the generation; every host of it does so."""
        healthy = self.clock() - self._began > HEALTHY
        self._failures = 1 if healthy else self._failures + 1
        self._close(Phase.READY, cause)
        self.say(cause)
        if self._notice:
            return
        if self._failures > self.settings.restarts:
            again = self.settings.restarts
            self._over(1, f"{cause} (gave up after {again} restarts)" if again else cause)

    def _close(self, phase: Phase, cause: str) -> None:
        """Ends the process."""
        assert self.child
        self.child.close()
        self.child = None
        self._began = self._since = self.clock()
        self._group = ()
        self.beat = dataclasses.replace(self.beat, phase=phase, cause=cause, stopping=False)
        self.event("end", phase=phase, cause=cause)

    def _over(self, status: int, cause: str, phase: Phase = Phase.OVER) -> None:
        """Ends the run; the cause is the last line."""
        if self.child:
            self.child.close()
            self.child = None
        self.beat = dataclasses.replace(self.beat, phase=phase, cause=cause, status=status)
        self.event("over", status=status, cause=cause)
        self.say(cause or "the run has ended well")
        self.status = status

    # --- What is written ---

    def leave(self, *_: object) -> None:
        """The handler of SIGTERM and SIGINT: the process saves and ends, then this supervisor does.

        The second signal ends the process at once.
        """
        self._signals += 1
        self._notice = self._notice or "SIGTERM"

    def notified(self, notice: str) -> None:
        """Lets the process save and end, then this supervisor. A signal may still follow."""
        self._notice = self._notice or notice

    def say(self, text: str) -> None:
        """Writes a line about the run."""
        _forward(f"dynamiq-jax run: host {self.beat.host}: {text}\n".encode())

    def event(self, name: str, **fields: Any) -> None:
        """Appends a line to the file of events: JSON, with seconds since 1970."""
        if self.settings.events:
            row = {"time": time.time(), "event": name, "host": self.beat.host}
            row |= {"generation": self.beat.generation} | fields
            with self.settings.events.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _filled(word: str, values: dict[str, str]) -> str:
    """A word of the command with its placeholders filled; other braces stay as they are."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _forward(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
