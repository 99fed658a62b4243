"""The example under a real SLURM (Debian's slurm-wlm and munge), which faults do not end.

`-s` prints, for each fault, the seconds until a step that was not taken before, and SLURM's line.
"""

import sys

import numpy as np
import pytest
from engines import EXAMPLE, FAULTS, REFUSED, STEPS, Training, options, others
from hosts import Hosts
from slurm import MISSING, Slurm
from test_hosts import REASON

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: install slurm-wlm and munge"),
]
SAYS = "srun", "slurmstepd", "make room"


class Job(Training):
    """The example as a job."""

    def __init__(self, slurm, folder, nodes, *options, starts=10):
        super().__init__(slurm, folder)
        script = EXAMPLE.with_name("train.sbatch")
        env = ",".join(f"{name}={text}" for name, text in (self.env | {"STARTS": starts}).items())
        self.number = slurm.submit(
            f"--nodes={nodes}", f"--output={self.log}", f"--export=ALL,{env}", script,
            sys.executable, EXAMPLE, "--cluster", "slurm", *self.options, *options,
        )  # fmt: skip

    def ended(self):
        return not self.machines.state(self.number)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(3, devices=1) as made, Slurm(made, folder) as started:
        yield started


@pytest.fixture(scope="module")
def whole(slurm, tmp_path_factory):
    """The losses of three nodes that nothing interrupts."""
    return Job(slurm, tmp_path_factory.mktemp("whole"), 3).finish()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_task_goes_on_from_memory_in_the_same_job(tmp_path, slurm, whole, fault):
    job = Job(slurm, tmp_path, 3, *options(fault, slurm))
    again = job.outlives(fault, SAYS, whole)
    assert again or fault == "network cut for 10 s"  # heartbeats are 100 s
    assert "queued" not in job.said()


@pytest.mark.parametrize("fault", REFUSED)
def test_a_node_that_differs_ends_the_job(tmp_path, slurm, fault):
    with others(fault, slurm):
        Job(slurm, tmp_path, 3, starts=2).refuses(fault, SAYS)


def test_a_second_job_waits_for_the_first_one(tmp_path, slurm, whole):
    first, second = (Job(slurm, tmp_path / name, 3) for name in ("first", "second"))
    first.until_step(4)
    assert slurm.state(second.number).startswith("PENDING")
    assert first.finish() == whole
    assert second.finish() == whole


def test_a_killed_slurmd_does_not_end_its_task(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, 3)
    job.until_step(4)
    slurm.kill_slurmd(1)
    slurm.until(lambda: slurm.nodes("down"), 60)
    print("\nkilled slurmd:", slurm("sinfo"), slurm.state(job.number))
    slurm.join(1)
    assert job.finish() == whole
    slurm.until(lambda: len(slurm.nodes("idle")) == 3, 60)


def test_a_preempted_job_saves_and_is_queued_again(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, 3)
    job.until_step(8)

    def preempt():
        slurm.submit("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null",
                     "--wrap=sleep 3")  # fmt: skip

    job.after("preempted", preempt, SAYS)
    assert job.finish() == whole
    assert "preempted after step" in job.said()


def test_two_nodes_go_on_without_a_dead_one(tmp_path, slurm):
    job = Job(slurm, tmp_path, "2-3")
    job.until_step(8)
    job.after("dead host", lambda: slurm.made.kill(2), SAYS)
    curve = job.finish()
    slurm.join(2)
    slurm.until(lambda: len(slurm.nodes("idle")) == 3, 60)
    assert "Node failure on host2" in job.said()
    assert "2 processes" in job.said()
    assert "from the memory of hosts" in job.said()
    assert len(curve) == STEPS


def test_a_drained_node_is_left_at_once(tmp_path, slurm, whole):
    job = Job(slurm, tmp_path, "2-3")
    job.until_step(8)
    assert "3 processes" in job.said()

    def drain():
        slurm("scontrol", "update", "nodename=host2", "state=drain", "reason=test")
        slurm("scancel", "--signal=TERM", job.number)

    job.after("drained", drain, SAYS)
    curve = job.finish()
    slurm("scontrol", "update", "nodename=host2", "state=resume")
    slurm.until(lambda: len(slurm.nodes("idle")) == 3)
    assert "2 processes" in job.said()
    assert len(curve) == STEPS
    assert curve[:8] == whole[:8]
    np.testing.assert_allclose(curve, whole, atol=0.6)
