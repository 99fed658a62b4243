"""The example, started by a cluster's own engine on hosts of `benchmarks/hosts.py`.

Every host has its own /dev/shm, as a machine has, and a process tells its steps there.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hosts import sh
from test_hosts import losses

import dynamiq_jax as dq

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_multihost.py"
STEPS = 20
OTHERS = "/dev/shm/others"
"""A folder of modules that a host has instead of the common ones."""
ENV = {
    "PYTHONPATH": f"{OTHERS}:{ROOT}:{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "DYNAMIQ_JAX_PROGRESS": "/dev/shm/progress",
}  # fmt: skip
OWN_MEMORY = """
unset COORDINATOR NUM_HOSTS HOST_ID  # which an engine does not set
mkdir -p {shm} && mount --bind {shm} /dev/shm && exec "$@"
"""
HEARTBEATS = "--heartbeat-timeout", 10
"""Without them JAX, which alone learns of a stopped process, waits 100 s."""
NOT_OURS = "COORDINATOR", "NUM_HOSTS", "HOST_ID", "XLA_FLAGS", "PYTHONPATH", "SLURM_", "OMPI_"


class Machines:
    """The hosts of ``made`` with a memory each, and a folder for logs."""

    def __init__(self, made, folder):
        self.made, self.folder = made, Path(folder)
        self.shm, self.disk = self.folder / "shm", self.folder / "disk"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}

        self.disk.mkdir(parents=True)  # which daemons must find when they start
        sh("mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", self.disk)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for i in range(self.made.n):
            self.made.kill(i)
        sh("umount", "--lazy", self.disk)

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


class Fault(NamedTuple):
    """A fault that a run outlives."""

    act: Callable[["Training"], Any]
    options: tuple[Any, ...] = HEARTBEATS
    """Options of the example."""
    again: bool = True
    """Whether processes start again under every engine."""


def signals(number, *hosts):
    """Sends a signal to the processes that train on these hosts."""

    def act(job):
        for i in hosts:
            job.machines.kill(i, job.PROCESS, number)

    return act


def cut(job):
    """Takes host 1 off the network for ten seconds."""
    job.machines.made.cut(1)
    time.sleep(10)
    job.machines.made.mend(1)


def fill(job):
    """Fills the disk of checkpoints, and makes room when the job has failed; returns when."""
    filler = job.machines.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))
    job.machines.until(lambda: ": make room" in job.said() and job.step() == -1, 120, job.log)
    filler.unlink()
    return time.time()


FAULTS = {
    "killed": Fault(signals(signal.SIGKILL, 1)),
    "coordinator killed": Fault(signals(signal.SIGKILL, 0)),
    "all killed": Fault(signals(signal.SIGKILL, 0, 1, 2)),
    "stopped": Fault(signals(signal.SIGSTOP, 1)),
    "network cut for 10 s": Fault(cut, (), False),
    "disk full": Fault(fill, ("--checkpoint-every", 4)),
}

FINDER = f"""
import importlib.util, importlib.machinery, pathlib, sys
class Others:
    def find_spec(name, path=None, target=None):
        file = pathlib.Path(__file__).with_name(name + ".other")
        if file.exists():
            loader = importlib.machinery.SourceFileLoader(name, str(file))
            where = [{str(ROOT / "dynamiq_jax")!r}] if name == "dynamiq_jax" else None
            return importlib.util.spec_from_file_location(
                name, file, loader=loader, submodule_search_locations=where)
sys.meta_path.insert(0, Others)
"""
"""Finds modules here ahead of those beside the script."""
MODEL, PACKAGE = EXAMPLE.with_name("llm_model.py"), ROOT / "dynamiq_jax" / "__init__.py"
VERSION = f'__version__ = "{dq.__version__}"'
REFUSED = {
    "wrong version": ("dynamiq_jax", PACKAGE, VERSION, '__version__ = "0.4.9"', "'0.4.9'"),
    "wrong program": ("llm_model", MODEL, "n_layers=2", "n_layers=3", "process 1 has"),
}
"""{fault: a module, its file, words of it, those that host 1 has, and what the error says}"""


class Training:
    """The example under an engine; a subclass says whether it has ended."""

    PROCESS = EXAMPLE.name
    """A word of the command of the process that trains."""

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

    def after(self, name, fault, words, seconds=240, *, again=True):
        """Makes a fault; waits for a step that was not taken; prints how long that took.

        ``fault`` may return when the time begins; without ``again`` processes need not start again.
        It also prints the lines of the log that have one of these words. Returns whether processes
        have started again.
        """
        reached, began = self.step(), time.time()
        began = fault() or began
        goes_on = lambda: not again and self.step() > reached + 1  # one had begun before the fault
        self.machines.until(lambda: self.step() == -1 or goes_on(), 120, self.log)
        again = self.step() == -1
        self.until_step(reached + 1, seconds)
        print(f"\n{name}: {time.time() - began:.1f} s; again: {again}; {self.lines(words)}")
        return again

    def outlives(self, name, says, whole):
        """A fault after eight steps: the run goes on from memory, to the losses ``whole``.

        ``says`` is as for `after`. Returns whether processes have started again.
        """
        self.until_step(8)
        reached = self.step()
        act, _, again = FAULTS[name]
        again = self.after(name, lambda: act(self), says, again=again)
        assert self.finish() == whole
        starts = re.findall(r"starting after step (\d+), from the memory", self.said())
        assert len(starts) == again
        assert all(int(step) >= reached for step in starts)  # every step is copied
        return again

    def refuses(self, name, says):
        """The job ends after a few starts, with an error that names what differs."""
        began, text = time.time(), REFUSED[name][-1]
        self.machines.until(self.ended, 240, self.log)
        print(f"\n{name}: ended after {time.time() - began:.1f} s; {self.lines(says)}")
        assert text in self.said()
        assert self.step() == -1

    def lines(self, words):
        """The lines of the log that have one of these words, each once."""
        lines = dict.fromkeys(self.said().splitlines())
        return [line for line in lines if any(word in line for word in words)]

    def finish(self):
        """The losses of the whole run."""
        self.machines.until(self.ended, 240, self.log)
        return losses(self.folder)


def options(name, machines):
    """The example's options for a fault."""
    disk = ("--checkpoint-dir", machines.disk / "kept") if name == "disk full" else ()
    return *FAULTS[name].options, *disk


@contextlib.contextmanager
def others(name, machines):
    """Host 1 has another module for a block."""
    folder = machines.shm / "host1" / Path(OTHERS).name
    folder.mkdir(parents=True)
    module, file, words, other, _ = REFUSED[name]
    (folder / "sitecustomize.py").write_text(FINDER)
    text = file.read_text()
    assert words in text
    (folder / f"{module}.other").write_text(text.replace(words, other))
    try:
        yield
    finally:
        shutil.rmtree(folder)
