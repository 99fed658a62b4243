"""The example under a real Ray: a raylet on every host of `benchmarks/hosts.py`.

`-s` prints, for each fault, the seconds until a step that was not taken before, and lines.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from engines import ENV, EXAMPLE, FAULTS, REFUSED, STEPS, Machines, Training, options, others
from hosts import Hosts
from test_hosts import REASON

ray = pytest.importorskip("ray", reason="no ray: pip install 'dynamiq_jax[ray]'")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PORT = 6379
PLACE = str(Path(ray.__file__).parents[1])
SMALL = "--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats --block"
SAYS = "host 10.7.0.", "a host has joined"
OWN_SESSION = "mkdir -p {short}/host{i} {short}/ray && mount --bind {short}/host{i} {short}/ray"


class Ray(Machines):
    """A cluster whose head is on host 0."""

    def __init__(self, made, folder):
        super().__init__(made, folder)
        self.variables = ENV | {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{PLACE}"}
        self.variables |= {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}

    def __enter__(self):
        # The path of a socket has at most 107 characters.
        self.short = tempfile.TemporaryDirectory(prefix="dq")
        self.ray(0, "--head", f"--port={PORT}", "--include-dashboard=false",
                 f"--temp-dir={self.short.name}/ray")  # fmt: skip
        self.until(lambda: self.runs(0), 60)
        for i in range(1, self.made.n):
            self.join(i)
        self.until(lambda: all(map(self.runs, range(self.made.n))), 60)
        return self

    def __exit__(self, *_):
        super().__exit__()
        self.short.cleanup()

    def ray(self, i, *options):
        own = f"--node-ip-address={self.made.address(i)}"
        words = sys.executable, "-m", "ray.scripts.scripts", "start", own, *options, *SMALL.split()
        self.inside(i, *words, log="raylet")

    def inside(self, i, *words, log):
        """Starts a command on host i, which has a folder of Ray's sockets of its own."""
        own = OWN_SESSION.format(short=self.short.name, i=i) + ' && exec "$@"'
        return self.start(i, "sh", "-c", own, "sh", *words, env=self.variables, log=log)

    def runs(self, i):
        return "Ray runtime started" in (self.folder / f"raylet{i}.log").read_text()

    def join(self, i):
        """Starts the raylet of host i."""
        self.ray(i, f"--address={self.made.address(0)}:{PORT}")

    def kill_raylet(self, i):
        """Kills the raylet of host i, and the command that would say so."""
        self.kill(i, "raylet/raylet")


class Job(Training):
    """The example by `train_ray.py` on host 0."""

    PROCESS = "ray::Host"

    def __init__(self, cluster, folder, n, *options, starts=10):
        super().__init__(cluster, folder)
        command = [sys.executable, "-u", EXAMPLE.with_name("train_ray.py"), "--min-hosts", n]
        command += ["--starts", starts]
        command += ["--copies", f"/dev/shm/{folder.name}", "--", *self.options, *options]
        self.process = cluster.inside(0, *command, log=folder.name)
        self.log = cluster.folder / f"{folder.name}0.log"

    def ended(self):
        return self.process.poll() is not None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Hosts(3, devices=1) as made, Ray(made, tmp_path_factory.mktemp("ray")) as started:
        yield started


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory):
    """The losses of three hosts that nothing interrupts."""
    return Job(cluster, tmp_path_factory.mktemp("whole"), 3).finish()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_actor_goes_on_from_memory(tmp_path, cluster, whole, fault):
    job = Job(cluster, tmp_path, 3, *options(fault, cluster))
    again = job.outlives(fault, SAYS, whole)
    assert again or fault == "network cut for 10 s"  # heartbeats are 100 s


@pytest.mark.parametrize("fault", REFUSED)
def test_a_host_that_differs_ends_the_run(tmp_path, cluster, fault):
    with others(fault, cluster):
        Job(cluster, tmp_path, 3, starts=2).refuses(fault, SAYS)


def test_a_second_run_waits_for_the_first_one(tmp_path, cluster, whole):
    first = Job(cluster, tmp_path / "first", 3)
    first.until_step(4)
    second = Job(cluster, tmp_path / "second", 3)
    assert first.finish() == whole
    assert second.finish() == whole


def test_two_hosts_go_on_without_a_raylet_and_take_a_new_one(tmp_path, cluster, whole):
    steps = 4 * STEPS  # a raylet takes longer to join than the other steps
    job = Job(cluster, tmp_path, 2, "--steps", steps)
    job.until_step(6)
    job.after("killed raylet", lambda: cluster.kill_raylet(2), SAYS)
    job.after("joined", lambda: cluster.join(2), SAYS)
    curve = job.finish()
    assert "starting on 2 hosts" in job.said()
    assert "3 processes" in job.said().partition("a host has joined")[2]
    assert "from the memory of hosts" in job.said().rpartition("3 processes")[2]
    assert len(curve) == steps
    np.testing.assert_allclose(curve[:2], whole[:2], rtol=1e-4)  # later rates are others
    assert curve[-1] < curve[0] - 0.5
