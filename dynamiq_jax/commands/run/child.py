"""The process that a supervisor starts: its output, its progress, and why it ended."""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROGRESS = "DYNAMIQ_JAX_PROGRESS"
"""The environment variable with the path of the progress file.

A process writes the number of the step that it begins into it, or before the first step the name of
what it has finished, such as "joined".
"""

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that saved and ended after SIGTERM."""

DIES_WITH_PARENT = """
import ctypes, os, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent:
    sys.exit("the supervisor has ended")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{type(error).__name__}: {sys.argv[2]}: {error.strerror}")
"""
"""Runs a command that the kernel kills with its supervisor."""

RAISED = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Failure)\b.*")
CONSEQUENCE = re.compile(
    "heartbeat|unhealthy|coordination service|coordination agent|Connection (closed|reset)|"
    "Connection refused|Broken pipe|Gloo|NCCL|Barrier|barrier|UNAVAILABLE|DEADLINE_EXCEEDED",
)
"""Messages of processes that end since another one has ended."""


class End(NamedTuple):
    """How a process ended."""

    status: int
    """The exit status; negative for a signal."""
    text: str
    """The reason in one line, as far as it is known."""
    consequence: bool
    """Whether the process probably ended since another one had ended."""


def oom_kills() -> int:
    """The number of processes that the kernel has killed in this control group for memory."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/fs/cgroup/memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    return 0


class Child:
    """A running process, whose output is forwarded to this one's.

    Args:
      command: the words of the command, without a shell.
      env: variables besides those of this process.
      forward: called with every line of output.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], forward: Callable[[bytes], None]
    ) -> None:
        self._forward = forward
        self._lines: collections.deque[str] = collections.deque(maxlen=200)
        self._rest = b""
        self._oom_kills = oom_kills()
        self._folder = tempfile.TemporaryDirectory(prefix="dynamiq_jax_")
        self.progress = Path(self._folder.name) / "progress"
        shim = [sys.executable, "-I", "-S", "-c", DIES_WITH_PARENT, str(os.getpid())]
        self._process = subprocess.Popen(
            shim + command, env=os.environ | env | {PROGRESS: str(self.progress)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        """The file descriptor of its output; `pump` reads it."""
        os.set_blocking(self.output, False)

    def pump(self) -> None:
        """Forwards what the process has written."""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.output, 2**16):
                *lines, self._rest = (self._rest + read).split(b"\n")
                for line in lines:
                    self._keep(line)

    def _keep(self, line: bytes) -> None:
        self._forward(line + b"\n")
        if text := line.decode(errors="replace").strip("\r\n"):
            self._lines.append(text)

    def reported(self) -> str:
        """What the process has written into the progress file."""
        with contextlib.suppress(OSError):
            return self.progress.read_text().strip()
        return ""

    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        with contextlib.suppress(OSError):
            # The state is the first field behind the name, which stands in parentheses.
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def ended(self) -> End | None:
        """How the process ended; `None` while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        self.pump()
        if self._rest:
            self._keep(self._rest)
            self._rest = b""
        return self._end(status)

    def _end(self, status: int) -> End:
        said = next(filter(RAISED.match, reversed(self._lines)), None)
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            if oom_kills() > self._oom_kills:
                return End(status, f"{how} by the kernel: out of memory", False)
            return End(status, f"{how} (by a person, a scheduler, or for want of memory)", False)
        fatal = next((line for line in self._lines if CONSEQUENCE.search(line)), None)
        if status == -signal.SIGABRT and fatal:
            return End(status, f"{how}: {fatal}", True)
        said = said or (self._lines[-1] if self._lines else "it wrote nothing")
        return End(status, f"{how}: {said}", bool(CONSEQUENCE.search(said)))

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kills the process, if it runs, and removes its files."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.pump()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()
