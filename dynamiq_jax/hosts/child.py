"""The process that a supervisor starts: its output, its progress, and why it ended."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dynamiq_jax.hosts import notice
from dynamiq_jax.hosts.slots import Slots

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

IMPORTS_AND_WAITS = """
import contextlib, gc, importlib, json, os, runpy, socket, sys, threading, time, types
modules, path, kind, *sys.argv = sys.argv[1:]
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = path
start = open(os.dup(0))  # modules may read stdin
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
for name in modules.split(","):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # while JAX traces, the collector need not walk what modules hold
if not (line := start.readline()):
    sys.exit("the supervisor has ended")
start.close()
told = json.loads(line)
os.environ.update(told["env"])
sys.argv = told["argv"]
# Whoever asks JAX's coordinator before it listens is not heard for seconds, as gRPC asks seldom.
address, _, port = os.environ.get("COORDINATOR", "").rpartition(":")
end = time.monotonic() + 10
def listens():
    while time.monotonic() < end:
        with contextlib.suppress(OSError, UnicodeError):
            with socket.create_connection((address.strip("[]"), port), 1):
                return
        time.sleep(0.05)
if "jax" in sys.modules and os.environ["HOST_ID"] != "0":
    # Servers of names may take longer than that.
    asking = threading.Thread(target=listens, daemon=True)
    asking.start()
    asking.join(10)
os.unlink(told["waits"])
if kind == "-c":
    code, sys.argv[0] = sys.argv[0], "-c"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))
elif kind == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Imports modules, waits for a line of JSON, then runs a script as Python does."""

RAISED = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Failure)\b.*")
CONSEQUENCE = re.compile(
    r"heartbeat|unhealthy|coordination service|coordination agent|connection (closed|reset)|"
    r"connection (refused|timed out)|broken pipe|no route to host|network is unreachable|gloo|"
    r"nccl|barrier|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED",
    re.IGNORECASE,
)
"""Messages of processes that end since another one has ended."""
GREETING = re.compile(r"\[Gloo\] Rank \d+ is connected to")
"""A line that a process writes when it has met the others: it tells nothing about its end."""
FRAME = "│╭╮╰╯─"
"""Characters of the frame in which typer's programs show a wrong argument."""
LOGGED = re.compile(r"[IWEF]\d{4} |\[Gloo\]|\*{3} ")
"""How lines begin that XLA and gloo write."""
MOST = 1000
"""Characters of an exception in a supervisor's line."""
KILLED = -signal.SIGKILL, 128 + signal.SIGKILL
"""Statuses of a process that is never ended by the end of another one."""


class End(NamedTuple):
    """How a process ended."""

    status: int
    """The exit status; negative for a signal."""
    text: str
    """The reason in one line, as far as it is known."""
    consequence: bool
    """Whether the process probably ended since another one had ended."""


class Script(NamedTuple):
    """A command that runs Python, in parts."""

    python: list[str]
    """The interpreter and its options."""
    kind: str
    """"-m" for a module, "-c" for code, "" for a file."""
    argv: list[str]
    """The file, module or code, then its arguments."""

    @classmethod
    def of(cls, command: list[str]) -> "Script":
        """The parts of a command.

        Raises:
          ValueError: the command is not ``PYTHON [OPTIONS] FILE...``, nor with ``-m MODULE`` or
            ``-c CODE`` in the place of the file.
        """
        python, rest = command[:1], command[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            count = 2 if rest[0] in ("-X", "-W") else 1
            python, rest = python + rest[:count], rest[count:]
        kind = rest[0] if rest[:1] in (["-m"], ["-c"]) else ""
        argv = rest[1:] if kind else rest
        named = Path(python[0]).name.startswith("python") if python else False
        if not named or not argv or argv[0].startswith("-"):
            raise ValueError(
                f"ready: the command is {' '.join(command)!r}, and only Python waits for a start; "
                "give python SCRIPT... or python -m MODULE..., or leave --ready out"
            )
        return cls(python, kind, argv)


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
      ready: with modules, the process imports them and waits for `begin`. ``sys.argv`` is the
        script's then, without what only the start will tell.
      slots: memory for copies that outlives the process.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        forward: Callable[[bytes], None],
        *,
        ready: tuple[str, ...] = (),
        slots: Slots | None = None,
    ) -> None:
        if ready:
            script = Script.of(command)
            path = "" if script.kind else str(Path(script.argv[0]).resolve().parent)
            waits = ["-c", IMPORTS_AND_WAITS, ",".join(ready), path, script.kind]
            command = script.python + waits + script.argv
        self._forward = forward
        self._lines: collections.deque[str] = collections.deque(maxlen=200)
        self._rest = b""
        self._oom_kills = oom_kills()
        self._folder = tempfile.TemporaryDirectory(prefix="dynamiq_jax_")
        self.progress = Path(self._folder.name) / "progress"
        self._waits = Path(self._folder.name) / "waits"
        if ready:
            self._waits.touch()
        shim = [sys.executable, "-I", "-S", "-c", DIES_WITH_PARENT, str(os.getpid())]
        own = {PROGRESS: str(self.progress), notice.VARIABLE: ""}  # the supervisor watches
        env = env | own | (slots.environment if slots else {})
        self._process = subprocess.Popen(
            shim + command, env=os.environ | env, pass_fds=slots.files if slots else (),
            stdin=subprocess.PIPE if ready else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        """The file descriptor of its output; `pump` reads it."""
        os.set_blocking(self.output, False)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def waits(self) -> bool:
        """Whether it has not begun to run the script."""
        return self._waits.exists()

    def begin(self, command: list[str], env: dict[str, str]) -> bool:
        """Lets a process that waits run the command; returns whether it was still there.

        Args:
          command: as it was given, with other words behind the script at most.
          env: variables besides those that the process has.
        """
        assert self._process.stdin is not None
        told = {"argv": Script.of(command).argv, "env": env, "waits": str(self._waits)}
        try:
            with self._process.stdin as stdin:
                stdin.write(json.dumps(told).encode() + b"\n")
        except BrokenPipeError:
            return False
        return self._process.poll() is None

    def pump(self) -> None:
        """Forwards what the process has written."""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.output, 2**16):
                *lines, self._rest = (self._rest + read).split(b"\n")
                for line in lines:
                    self._keep(line)

    def _keep(self, line: bytes) -> None:
        self._forward(line + b"\n")
        text = line.decode(errors="replace").strip("\r\n")
        text = text.strip(f"{FRAME} ") if text and text[0] in FRAME else text
        if text and not GREETING.match(text):
            self._lines.append(text)

    def reported(self) -> str:
        """The text that the process has written to the progress file."""
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
        said, whole = self._raised()
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        if status in KILLED:
            if oom_kills() > self._oom_kills:
                return End(status, f"{how} by the kernel: out of memory", False)
            return End(status, f"{how} (by a person, a scheduler, or for want of memory)", False)
        fatal = next((line for line in self._lines if CONSEQUENCE.search(line)), None)
        if status == -signal.SIGABRT and fatal:
            return End(status, f"{how}: {fatal}", True)
        said = said or (self._lines[-1] if self._lines else "it wrote nothing")
        # JAX ends a process by SIGABRT or by an exception when another one has ended.
        by_others = status > 0 or status == -signal.SIGABRT
        text = f"{how}: {whole or said}"
        return End(status, text, by_others and bool(CONSEQUENCE.search(said)))

    def _raised(self) -> tuple[str, str]:
        """The first line of the last exception, and all lines of it; rich wraps long ones."""
        lines = [*self._lines]
        for number in range(len(lines) - 1, -1, -1):
            if RAISED.match(lines[number]):
                ends = (n for n in range(number, len(lines)) if LOGGED.match(lines[n]))
                rest = lines[number : next(ends, len(lines))]
                return lines[number], " ".join(map(str.strip, rest))[:MOST]
        return "", ""

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kills the process, if it runs, and removes its files."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.pump()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()
