"""The example under a real `mpirun` (Open MPI 4), over hosts that `ip netns exec` enters.

`-s` prints the seconds until a step that was not taken before, and mpirun's lines.
"""

import shutil
import sys

import pytest
from engines import EXAMPLE, OWN_MEMORY, Machines, Training
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

    def __init__(self, machines, folder, n):
        super().__init__(machines, folder)
        agent = machines.folder / "agent"
        run = machines.made.names[0].rpartition("-")[0]
        agent.write_text(AGENT.format(run=run, shm=machines.shm))
        agent.chmod(0o700)
        env = self.env | {"DYNAMIQ_JAX_COPIES": "/dev/shm/run1"}
        names = ",".join(f"host{i}" for i in range(n))
        options = f"--host {names} -np {n} --map-by ppr:1:node --allow-run-as-root --bind-to none"
        options += f" --mca plm_rsh_agent {agent} --mca oob_tcp_if_include eth0"
        told = [word for name, text in env.items() for word in ("-x", f"{name}={text}")]
        command = [sys.executable, EXAMPLE, "--cluster", "ompi", *self.options]
        again = ["bash", EXAMPLE.with_name("again.sh")]
        mpirun = [*again, "mpirun", *options.split(), *told, *command]
        self.process = machines.made.start(
            0, ["sh", "-c", OWN_MEMORY.format(shm=machines.shm / "host0"), "sh", *map(str, mpirun)],
            log=self.log,
        )  # fmt: skip

    def ended(self):
        return self.process.poll() is not None


def test_a_killed_rank_goes_on_from_memory(tmp_path):
    """`again.sh` starts `mpirun` again; losses are those of an uninterrupted run, bit for bit."""
    with Hosts(3, devices=1) as made, Machines(made, tmp_path) as machines:
        whole = Job(machines, tmp_path / "whole", 3).finish()
        for i in range(3):
            shutil.rmtree(machines.shm / f"host{i}" / "run1")
        job = Job(machines, tmp_path / "killed", 3)
        job.outlives("killed", "train_multihost.py", ["mpirun"], whole)
        assert "signal 9 (Killed)" in job.said()
