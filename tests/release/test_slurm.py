"""The example under a real SLURM (Debian's slurm-wlm and munge), which faults do not end.

`-s` prints, for each fault, the seconds until a step that was not taken before, and SLURM's line.
"""

import os
import signal
import time
from pathlib import Path

import hosts
import numpy as np
import pytest
from hosts import Hosts
from slurm import MISSING, Slurm
from test_hosts import REASON, losses

ROOT = Path(__file__).parents[2]
STEPS = 30
ENV = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
    "DYNAMIQ_JAX_PROGRESS": "/dev/shm/progress",
}  # fmt: skip
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: install slurm-wlm and munge"),
]


class Job:
    """The example as a job."""

    def __init__(self, slurm, folder, nodes, *options, checkpoints=False):
        folder.mkdir(exist_ok=True)
        self.slurm, self.folder, self.log = slurm, folder, folder / "log"
        for i in range(slurm.made.n):
            (slurm.shm / f"host{i}" / "progress").unlink(missing_ok=True)
        env = ENV | {"JAX_COMPILATION_CACHE_DIR": slurm.folder / "cache"}
        script = ROOT / "examples"
        kept = ["--checkpoint-dir", folder / "checkpoints"] if checkpoints else []
        self.number = slurm.submit(
            f"--nodes={nodes}", f"--output={self.log}", *options,
            "--export=ALL," + ",".join(f"{name}={text}" for name, text in env.items()),
            script / "train.sbatch", os.sys.executable, script / "train_multihost.py",
            "--cluster", "slurm", "--steps", STEPS, "--batch-size", "1",
            "--out", folder / "out", *kept,
        )  # fmt: skip

    def step(self, i=0):
        """The step that the process of host i has begun last; -1 before the first."""
        file = self.slurm.shm / f"host{i}" / "progress"
        told = file.read_text() if file.exists() else ""
        return int(told) if told.isdecimal() else -1

    def until_step(self, step, seconds=180):
        self.slurm.until(lambda: self.step() >= step, seconds, self.log)

    def after(self, name, fault, seconds=240):
        """Makes a fault; waits for a step that was not taken; prints how long that took."""
        reached, began = self.step(), time.time()
        fault()
        self.slurm.until(lambda: self.step() <= reached - 1 or self.step() == -1, 60, self.log)
        self.until_step(reached + 1, seconds)
        lines = [line for line in self.said().splitlines() if "slurm" in line or "srun" in line]
        print(f"\n{name}: {time.time() - began:.1f} s; {lines}")

    def said(self):
        return self.log.read_text()

    def finish(self):
        """The losses of the whole run."""
        self.slurm.until(lambda: not self.slurm.state(self.number), 240, self.log)
        return losses(self.folder)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(3, devices=1) as made, Slurm(made, folder) as started:
        yield started


@pytest.fixture(scope="module")
def whole(slurm, tmp_path_factory):
    """The losses of three nodes that nothing interrupts."""
    return Job(slurm, tmp_path_factory.mktemp("whole"), 3).finish()


def kill(slurm, i):
    os.kill(slurm.tasks(i, "train_multihost.py")[-1], signal.SIGKILL)


def test_a_killed_task_goes_on_from_memory_in_the_same_job(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, 3)
    job.until_step(8)
    job.after("killed task", lambda: kill(slurm, 1))
    assert job.finish() == whole
    assert "from the memory of hosts" in job.said()
    assert "host1: task 1: Killed" in job.said()


def test_a_killed_slurmd_does_not_end_its_task(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, 3)
    job.until_step(4)
    slurm.kill_slurmd(1)
    slurm.until(lambda: slurm.nodes("down"), 60)
    print("\nkilled slurmd:", slurm("sinfo"), slurm.state(job.number))
    slurm.start(1)
    assert job.finish() == whole
    slurm.until(lambda: len(slurm.nodes("idle")) == 3, 60)


def test_a_preempted_job_saves_and_is_queued_again(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, 3)
    job.until_step(8)

    def preempt():
        slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null",
                     "--wrap=sleep 3")  # fmt: skip

    job.after("preempted", preempt)
    assert job.finish() == whole
    assert "preempted after step" in job.said()


def test_a_drained_node_is_left_at_once(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, "2-3")
    job.until_step(8)
    assert "3 processes" in job.said()

    def drain():
        slurm("scontrol", "update", "nodename=host2", "state=drain", "reason=test")
        slurm("scancel", "--signal=TERM", job.number)

    job.after("drained", drain)
    curve = job.finish()
    slurm("scontrol", "update", "nodename=host2", "state=resume")
    assert "2 processes" in job.said()
    assert len(curve) == STEPS
    assert curve[:8] == whole[:8]
    np.testing.assert_allclose(curve, whole, atol=0.6)


def test_a_dead_node_is_left_behind(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, "2-3")
    job.until_step(8)
    job.after("dead node", lambda: slurm.made.kill(2))
    curve = job.finish()
    assert "2 processes" in job.said()
    assert len(curve) == STEPS
    assert curve[:8] == whole[:8]
    np.testing.assert_allclose(curve, whole, atol=0.6)
