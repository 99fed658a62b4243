"""The example under `dynamiq-jax run`, with the faults of the other engines.

`-s` prints the seconds until a step that was not taken before, and the supervisor's lines.
"""

import json
import sys

import pytest
from engines import EXAMPLE, FAULTS, REFUSED, Machines, Training, options, others
from hosts import Hosts
from test_hosts import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PORT = 29500


class Job(Training):
    """The example, with a supervisor on every host."""

    def __init__(self, machines, folder, *options, restarts=10):
        super().__init__(machines, folder)
        n = machines.made.n
        hosts = ",".join(f"{machines.made.address(i)}:{PORT}" for i in range(n))
        run = [sys.executable, "-m", "dynamiq_jax", "run", "--hosts", hosts, "--silence", "3"]
        run += ["--min-hosts", n, "--restarts", restarts]
        self.logs = [machines.folder / f"{folder.name}{i}.log" for i in range(n)]
        training = sys.executable, EXAMPLE, *self.options, *options
        self.words = lambda i: (*run, "--host-id", i, "--events", self.events(i), "--", *training)
        self.processes = [
            machines.start(i, *self.words(i), env=self.env, log=folder.name) for i in range(n)
        ]

    def events(self, i):
        return self.folder / f"events{i}"

    def step(self, i=0):
        found = -1
        for line in self.events(i).read_text().splitlines() if self.events(i).exists() else ():
            event = json.loads(line)
            found = {"start": -1, "step": event.get("reached")}.get(event["event"], found)
        return int(found)

    def said(self):
        return "\n".join(log.read_text() for log in self.logs)

    def ended(self):
        return all(process.poll() is not None for process in self.processes)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with Hosts(3, devices=1) as made, Machines(made, tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(machines, tmp_path_factory):
    """The losses of three hosts that nothing interrupts."""
    return Job(machines, tmp_path_factory.mktemp("whole")).finish()


SAYS = "host 0: start", "(10.7.0.", "came back"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_host_goes_on_from_memory(tmp_path, machines, whole, fault):
    job = Job(machines, tmp_path, *options(fault, machines))
    assert job.outlives(fault, SAYS, whole)


@pytest.mark.parametrize("fault", REFUSED)
def test_a_host_that_differs_ends_the_run(tmp_path, machines, fault):
    with others(fault, machines):
        Job(machines, tmp_path, restarts=1).refuses(fault, SAYS)


def test_a_second_supervisor_of_a_host_changes_nothing(tmp_path, machines, whole):
    job = Job(machines, tmp_path)
    job.until_step(4)
    second = machines.start(1, *job.words(1), log="second")
    assert second.wait(60)
    assert "UDP port 29500 of host 1 is in use" in (machines.folder / "second1.log").read_text()
    assert job.finish() == whole
