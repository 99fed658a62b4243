"""Processes that tests start side by side: of this machine over loopback, and on hosts."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compiler import FLAGS

WORKER = Path(__file__).with_name("multihost_worker.py")
ABORTED = -signal.SIGABRT
PATIENCE, SILENCE = 30, 90
"""Seconds until survivors have ended, and until a host that says nothing counts as hanging."""
ENVIRONMENT = {"JAX_NUMPY_RANK_PROMOTION": "allow"}
"""Besides, each host has its own seed of hashes: 0 and 2 order a set of the axes otherwise."""
KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "COLLECTIVES_ALONE")
"""Variables that processes inherit: neither proxies nor a cluster's, by which JAX would go."""


def coordinator() -> str:
    """The address of a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def outputs(commands, env) -> list[tuple[str, str]]:
    """(stdout, stderr) of commands that all end well, within two minutes each."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    try:
        ends = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), ends
    return ends


class Loopback:
    """Processes that find each other at a free port, as `hosts.Hosts`; none outlives the block."""

    def __init__(self, n: int, devices: int = 2):
        self.n, self.started = n, []
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
        address = coordinator()
        self.env = env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NUM_HOSTS": str(n)}
        self.env |= {"COORDINATOR": address, "JAX_COORDINATOR_BIND_ADDRESS": address}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, i, command, env, log):
        """Process i, leader of a process group of its own, which writes to ``log``."""
        env, streams = self.env | {"HOST_ID": str(i)} | env, {"stdin": subprocess.DEVNULL}
        with log.open("wb") as out:
            streams |= {"stdout": out, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        self.started.append(process)
        return process


def blamed(victim):
    """JAX's messages about a host that is silent: while others compute, save or shut down."""
    return rf"Task {victim} heartbeat timeout|(heartbeats\):|task names:)\n{victim}\n"


class Group:
    """Processes of one mode on all hosts of ``made``, and their logs."""

    def __init__(self, made, folder, mode, *arguments):
        folder.mkdir(exist_ok=True, parents=True)
        command = [sys.executable, "-u", str(WORKER), mode, str(folder), *map(str, arguments)]
        self.made, self.logs = made, [folder / f"{mode}.{i}.log" for i in range(made.n)]
        self.processes = [
            made.start(i, command, env=ENVIRONMENT | {"PYTHONHASHSEED": str(2 * i)}, log=log)
            for i, log in enumerate(self.logs)
        ]

    def said(self, i):
        return self.logs[i].read_text()

    def step(self, i):
        """The last step that host i has told."""
        return max([-1, *map(int, re.findall(r"^step (\d+)$", self.said(i), re.MULTILINE))])

    def until(self, true, *, seconds=None):
        """Waits; without ``seconds`` until no host has said anything new for `SILENCE`."""
        heard, news = time.monotonic(), None
        while not true():
            before, news = news, [log.stat().st_size for log in self.logs]
            heard = time.monotonic() if news != before and seconds is None else heard
            if time.monotonic() - heard > (seconds or SILENCE):
                tails = [f"{log.name}:\n{log.read_text()[-1500:]}" for log in self.logs]
                pytest.fail("this did not happen in time\n" + "\n\n".join(tails))
            time.sleep(0.1)

    def until_step(self, count):
        """Waits until all hosts have told this step."""

        def reached():
            assert not self.ended(), self.said(0)[-3000:] + self.said(1)[-3000:]
            return all(self.step(i) >= count for i in range(self.made.n))

        self.until(reached)

    def ended(self):
        return [i for i, process in enumerate(self.processes) if process.poll() is not None]

    def statuses(self, *, seconds=None):
        """Waits for the end of all processes."""
        self.until(lambda: len(self.ended()) == self.made.n, seconds=seconds)
        return [process.returncode for process in self.processes]

    def lose(self, victim):
        """Ends a host in the middle of a step; the others end in time, and say which it was."""
        self.made.kill(victim)
        self.notices(victim)

    def notices(self, victim):
        """JAX ends all others in time, once a host has died, and tells each of them which."""
        self.until(lambda: victim in self.ended())
        statuses = self.statuses(seconds=PATIENCE)
        assert statuses[victim] == -signal.SIGKILL
        for i in set(range(self.made.n)) - {victim}:
            assert statuses[i] == ABORTED, self.said(i)[-3000:]
            assert re.search(blamed(victim), self.said(i))
