"""Supervised hosts of tests: `dynamiq-jax run` on each, and a process for it that is no training.

    python supervised.py STEPS SECONDS

That process takes steps, and does what a file of its folder (``DO``) tells it to.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 15
"""Seconds until all other hosts have ended or have started again."""
ORDERS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(1000),
    "exit": lambda: os._exit(7),
    "raise": lambda: 1 / 0,
    "memory": lambda: bytearray(2**60),
    "peer": lambda: sys.exit("XlaRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed"),
}


def endless(steps, seconds):
    """Steps from 0, or from the last one of an earlier process."""
    rank = os.environ["HOST_ID"]
    folder, progress = Path(os.environ["DO"]), Path(os.environ["DYNAMIQ_JAX_PROGRESS"])
    reached = folder / "reached"
    first = int(reached.read_text()) if reached.exists() else 0
    print(f"rank {rank} of {os.environ['NUM_HOSTS']} from {first}", flush=True)
    for step in range(first, steps):
        order = folder / "order"
        if order.exists():
            name = order.read_text()
            order.unlink()
            ORDERS[name]()
        progress.write_text(str(step))
        time.sleep(seconds)
        (folder / "next").write_text(str(step))  # a process that is killed leaves no half file
        (folder / "next").rename(reached)


class Supervised:
    """Supervisors of ``n`` hosts of this machine; none outlives the block."""

    def __init__(self, folder, n=3, *options, ports=None, command=None, env=None):
        self.folder, self.n, self.options, self.env = folder, n, options, env or {}
        self.command = command or [sys.executable, "-S", "-u", __file__, "100000", "0.05"]
        self.hosts = ",".join(f"127.0.0.1:{port}" for port in ports or free_ports(n))
        self.processes = {}
        self.started = []
        # Tests may run in the background, where shells let SIGINT be ignored, by processes that
        # they start, too.
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.kill()  # the process that it supervises dies with it
            process.wait()

    def own(self, i):
        """The folder of host i."""
        folder = self.folder / f"host{i}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self, *which):
        """Starts the supervisors of these hosts, or of all."""
        for i in which or range(self.n):
            command = [sys.executable, "-m", "dynamiq_jax", "run", "--hosts", self.hosts]
            command += ["--host-id", str(i), *self.options, "--", *self.command]
            with (self.own(i) / "log").open("ab") as log:
                self.processes[i] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=os.environ | {"DO": str(self.own(i))} | self.env,
                )  # fmt: skip
            self.started.append(self.processes[i])

    def order(self, i, name):
        """Tells the process of host i to do something."""
        (self.own(i) / "new").write_text(name)
        (self.own(i) / "new").rename(self.own(i) / "order")

    def reached(self, i):
        """The last step of the process of host i, from which the next one goes on."""
        file = self.own(i) / "reached"
        return int(file.read_text()) if file.exists() else 0

    def said(self, i):
        return (self.own(i) / "log").read_text()

    def until(self, true, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(f"host {i}:\n{self.said(i)[-1500:]}" for i in self.processes)
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    def until_said(self, pattern, *which, seconds=PATIENCE):
        """Waits until the logs of these hosts, or of all, match."""
        which = which or range(self.n)
        self.until(lambda: all(re.search(pattern, self.said(i)) for i in which), seconds)

    def statuses(self, *which, seconds=PATIENCE):
        """The statuses of these hosts, or of all, after their end."""
        processes = [self.processes[i] for i in which or range(self.n)]
        self.until(lambda: all(process.poll() is not None for process in processes), seconds)
        return [process.returncode for process in processes]

    def last(self, i):
        """The last line of host i."""
        return self.said(i).splitlines()[-1]


def child_of(supervisor):
    """The process number of the process that a supervisor has started; another one may wait."""
    pid = supervisor.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def free_ports(n):
    """Ports for supervisors on this machine; those of coordination services lie above each."""
    start = 20000 + 20 * n * (os.getpid() % 300)
    return [start + 20 * i for i in range(n)]


if __name__ == "__main__":
    endless(int(sys.argv[1]), float(sys.argv[2]))
