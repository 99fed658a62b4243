"""The example under a real `mpirun` (Open MPI 4), over hosts that `ip netns exec` enters.

`-s` prints the seconds until a step that was not taken before, and mpirun's lines.
"""

import shutil
import sys

import pytest
from engines import EXAMPLE, FAULTS, OWN_MEMORY, REFUSED, Machines, Training, options, others
from hosts import Hosts
from test_hosts import REASON

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun: install openmpi-bin"),
]
AGENT = """#!/bin/sh
# In the place of ssh: AGENT HOST WORDS...
host=$1; shift
exec ip netns exec {run}-"${{host#host}}" unshare --uts sh -c '
  unset COORDINATOR NUM_HOSTS HOST_ID
  echo "$1" >/proc/sys/kernel/hostname; mkdir -p {shm}/"$1"; mount --bind {shm}/"$1" /dev/shm
  eval "$2"' sh "$host" "$*"
"""


class Job(Training):
    """The example by `mpirun`, which `again.sh` starts again."""

    def __init__(self, machines, folder, *options, starts=10):
        super().__init__(machines, folder)
        n = machines.made.n
        agent = machines.folder / "agent"
        run = machines.made.names[0].rpartition("-")[0]
        agent.write_text(AGENT.format(run=run, shm=machines.shm))
        agent.chmod(0o700)
        env = self.env | {"DYNAMIQ_JAX_COPIES": f"/dev/shm/{folder.name}"}
        names = ",".join(f"host{i}" for i in range(n))
        places = f"--host {names} -np {n} --map-by ppr:1:node --allow-run-as-root --bind-to none"
        places += f" --mca plm_rsh_agent {agent} --mca oob_tcp_if_include eth0"
        told = [word for name, text in env.items() for word in ("-x", f"{name}={text}")]
        command = [sys.executable, EXAMPLE, "--cluster", "ompi", *self.options, *options]
        again = ["bash", EXAMPLE.with_name("again.sh")]
        mpirun = [*again, "mpirun", *places.split(), *told, *command]
        self.process = machines.made.start(
            0, ["sh", "-c", OWN_MEMORY.format(shm=machines.shm / "host0"), "sh", *map(str, mpirun)],
            env={"STARTS": str(starts)}, log=self.log,
        )  # fmt: skip

    def ended(self):
        return self.process.poll() is not None


SAYS = "mpirun", "exited on signal", "RuntimeError", "make room", "has lost communication"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with Hosts(3, devices=1) as made, Machines(made, tmp_path_factory.mktemp("mpi")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(machines, tmp_path_factory):
    """The losses of three hosts that nothing interrupts."""
    return Job(machines, tmp_path_factory.mktemp("whole")).finish()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_rank_goes_on_from_memory(tmp_path, machines, whole, fault):
    job = Job(machines, tmp_path, *options(fault, machines))
    again = job.outlives(fault, SAYS, whole)
    assert again or fault == "network cut for 10 s"  # heartbeats are 100 s


@pytest.mark.parametrize("fault", REFUSED)
def test_a_host_that_differs_ends_the_job(tmp_path, machines, fault):
    with others(fault, machines):
        Job(machines, tmp_path, starts=2).refuses(fault, SAYS)


def test_a_host_comes_back_without_its_memory(tmp_path, machines, whole):
    job = Job(machines, tmp_path)
    job.until_step(8)

    def away():
        machines.made.kill(1)
        shutil.rmtree(machines.shm / "host1" / tmp_path.name)

    assert job.after("host away", away, SAYS)
    assert job.finish() == whole
    assert "from the memory of hosts" in job.said()


def test_two_jobs_on_the_same_hosts_do_not_disturb_each_other(tmp_path, machines, whole):
    first, second = (Job(machines, tmp_path / name) for name in ("first", "second"))
    assert first.finish() == whole
    assert second.finish() == whole
