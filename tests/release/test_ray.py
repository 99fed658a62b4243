"""The example under a real Ray: a raylet on every host, of which actors and raylets are killed.

`-s` prints the seconds until a step that was not taken before, and the driver's lines.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import EXAMPLE, STEPS, Machines, Training
from hosts import Hosts
from test_hosts import REASON

pytest.importorskip("ray", reason="no ray: pip install 'dynamiq_jax[ray]'")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
RAY = str(Path(sys.executable).with_name("ray"))
SMALL = ["--num-cpus=1", "--object-store-memory=80000000", "--block"]


class Cluster(Machines):
    """A raylet on every host; that of host 0 is the head."""

    def __enter__(self):
        self.env |= {"RAY_USAGE_STATS_ENABLED": "0"}
        self.raylets = [self.join(i) for i in range(self.made.n)]
        self.until(lambda: self.alive() == self.made.n, 90)
        return self

    def join(self, i):
        """Starts the raylet of host i."""
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        role = ["--address=10.7.0.1:6379"] if i else head
        own = f"--node-ip-address={self.made.address(i)}"
        # As in a fresh shell, with no more variables than the driver tells actors.
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.short())}
        return self.start(i, RAY, "start", *role, own, *SMALL, env=env, log="raylet")

    def short(self):
        """A folder with a short name: Ray's sockets have at most 107 characters."""
        return Path("/tmp") / self.made.names[0]

    def alive(self):
        """How many nodes the head counts."""
        code = "import ray; ray.init('10.7.0.1:6379', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"  # noqa: E501
        said = self(sys.executable, "-c", code, check=False).splitlines()
        return int(said[-1]) if said and said[-1].isdecimal() else 0


class Job(Training):
    """The driver on host 0."""

    def __init__(self, machines, folder, least=3):
        super().__init__(machines, folder)
        script = EXAMPLE.with_name("train_ray.py")
        command = [sys.executable, script, *self.options, "--least", least, "--copies",
                   f"/dev/shm/{folder.name}"]  # fmt: skip
        env = {"RAY_ADDRESS": "10.7.0.1:6379", "RAY_TMPDIR": str(machines.short())}
        self.process = machines.made.start(
            0, list(map(str, command)), env=self.env | env, log=self.log
        )

    def ended(self):
        return self.process.poll() is not None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Hosts(3, devices=1) as made:
        with Cluster(made, tmp_path_factory.mktemp("ray")) as started:
            yield started


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    """The losses of three nodes that nothing interrupts."""
    return Job(cluster, tmp_path_factory.mktemp("whole")).finish()


def test_a_killed_actor_goes_on_from_memory(tmp_path, cluster, whole):
    job = Job(cluster, tmp_path)
    job.until_step(8)
    job.after("killed actor", lambda: cluster.kill(1, "Worker"), ["nodes:"])
    assert job.finish() == whole
    assert "from the memory of hosts" in job.said()


def test_a_node_that_dies_is_left_behind_and_taken_back(tmp_path, cluster, whole):
    """The raylet is killed, and so are its actors; another joins before the next fault."""
    job = Job(cluster, tmp_path, least=2)
    job.until_step(6)
    raylet = cluster.processes(2, "raylet/raylet")[-1]
    job.after("killed raylet", lambda: os.kill(raylet, signal.SIGKILL), ["nodes:"])
    assert "2 processes" in job.said()
    cluster.made.kill(2)
    cluster.join(2)
    cluster.until(lambda: cluster.alive() == 3, 60)
    reached = job.step()
    job.after("killed actor, node back", lambda: cluster.kill(1, "Worker"), ["nodes:"])
    curve = job.finish()
    assert reached < STEPS - 1
    assert job.said().count("3 processes") == 2
    assert len(curve) == STEPS
    np.testing.assert_allclose(curve, whole, atol=0.6)
