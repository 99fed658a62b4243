"""The example, started by a cluster's own engine on hosts of `benchmarks/hosts.py`.

Every host has its own /dev/shm, as a machine has, and a process tells its steps there.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from hosts import sh
from test_hosts import losses

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_multihost.py"
STEPS = 20
ENV = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "DYNAMIQ_JAX_PROGRESS": "/dev/shm/progress",
}  # fmt: skip
OWN_MEMORY = """
unset COORDINATOR NUM_HOSTS HOST_ID  # which an engine does not set
mkdir -p {shm} && mount --bind {shm} /dev/shm && exec "$@"
"""
FAULTS = {
    "killed": (1, signal.SIGKILL),
    "coordinator killed": (0, signal.SIGKILL),
    "stopped": (1, signal.SIGSTOP),
}
"""{fault: the host whose process gets a signal, and the signal}."""
HEARTBEATS = "--heartbeat-timeout", 10
"""Without them JAX, which alone learns of a stopped process, waits 100 s."""
NOT_OURS = "COORDINATOR", "NUM_HOSTS", "HOST_ID", "XLA_FLAGS", "PYTHONPATH", "SLURM_", "OMPI_"


class Machines:
    """The hosts of ``made`` with a memory each, and a folder for logs."""

    def __init__(self, made, folder):
        self.made, self.folder = made, Path(folder)
        self.shm = self.folder / "shm"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for i in range(self.made.n):
            self.made.kill(i)

    def start(self, i, *words, env=None, log="daemon"):
        """Starts a command on host i."""
        text = OWN_MEMORY.format(shm=self.shm / f"host{i}")
        command = ["sh", "-c", text, "sh", *map(str, words)]
        return self.made.start(i, command, env=env, log=self.folder / f"{log}{i}.log")

    def __call__(self, *words, check=True):
        """The output of a command on host 0."""
        enter = ["ip", "netns", "exec", self.made.names[0], *map(str, words)]
        done = subprocess.run(enter, env=self.env, capture_output=True, text=True, check=False)
        assert not (check and done.returncode), done.stderr
        return done.stdout.strip()

    def processes(self, i, word):
        """The processes of host i that have a word in their command."""
        found = []
        for pid in sh("ip", "netns", "pids", self.made.names[i]).stdout.split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.encode() in part for part in command[:3]):
                found.append(int(pid))
        return sorted(found)

    def kill(self, i, word, number=signal.SIGKILL):
        """Kills the newest process of host i that has a word in its command, or sends a signal."""
        os.kill(self.processes(i, word)[-1], number)

    def until(self, true, seconds=30.0, *logs):
        """Waits; shows logs if it takes too long."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                files = [*self.folder.glob("*.log"), *logs]
                texts = [f"{f.name}:\n{f.read_text()[-3000:]}" for f in files if f.exists()]
                raise AssertionError("\n".join(texts))
            time.sleep(0.1)


class Training:
    """The example under an engine; a subclass says whether it has ended."""

    def __init__(self, machines, folder):
        folder.mkdir(exist_ok=True)
        self.machines, self.folder, self.log = machines, folder, folder / "log"
        for i in range(machines.made.n):
            (machines.shm / f"host{i}" / "progress").unlink(missing_ok=True)
        self.env = ENV | {"JAX_COMPILATION_CACHE_DIR": str(machines.folder / "cache")}
        self.options = ["--steps", STEPS, "--batch-size", "1", "--out", folder / "out"]

    def ended(self):
        raise NotImplementedError

    def said(self):
        return self.log.read_text()

    def step(self, i=0):
        """The step that the process of host i has begun last; -1 before the first."""
        file = self.machines.shm / f"host{i}" / "progress"
        while file.exists() and not (told := file.read_text()):
            time.sleep(0.01)  # the process is writing it
        return int(told) if file.exists() and told.isdecimal() else -1

    def until_step(self, step, seconds=180):
        self.machines.until(lambda: self.step() >= step, seconds, self.log)

    def after(self, name, fault, words, seconds=240):
        """Makes a fault; waits for a step that was not taken; prints how long that took.

        It also prints the lines of the log that have one of these words.
        """
        reached, began = self.step(), time.time()
        fault()
        self.machines.until(lambda: self.step() == -1, 120, self.log)
        self.until_step(reached + 1, seconds)
        lines = [s for s in self.said().splitlines() if any(word in s for word in words)]
        print(f"\n{name}: {time.time() - began:.1f} s; {lines}")

    def outlives(self, fault, word, says, whole):
        """A fault after eight steps: the run goes on from memory, to the losses ``whole``.

        ``word`` is in the command of the process that one of `FAULTS` hits; ``says`` is as for
        `after`.
        """
        self.until_step(8)
        i, number = FAULTS[fault]
        self.after(fault, lambda: self.machines.kill(i, word, number), says)
        assert self.finish() == whole
        assert "from the memory of hosts" in self.said()

    def finish(self):
        """The losses of the whole run."""
        self.machines.until(self.ended, 240, self.log)
        return losses(self.folder)
