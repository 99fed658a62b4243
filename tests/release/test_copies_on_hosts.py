"""Trainings whose hosts are killed go on from copies in memory: no disk has any of their state."""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from processes import ENVIRONMENT, Loopback
from supervised import child_of
from test_copies import WORKER, begun, hosts_of, losses

from dynamiq_jax.hosts import notice, slots

STEPS = 24


def until_step(hosts, i, start, step, seconds=120):
    """Waits until host i has begun a step after its start number."""

    def there():
        after = hosts.said(i).partition(f": start {start} with")[2]
        return any(int(s) >= step for s in re.findall(r"^step (\d+)$", after, re.MULTILINE))

    hosts.until(there, seconds)


@pytest.fixture(scope="module", params=["sharded", "memory"])
def whole(request, tmp_path_factory):
    """An optimizer, and the curve of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp(request.param)
    with hosts_of(folder, 3, request.param, steps=STEPS, devices=2) as hosts:
        hosts.start()
        assert hosts.statuses(seconds=180) == [0, 0, 0]
    assert begun(hosts, 0) == [(3, 0)]
    return request.param, losses(folder)


def test_with_as_many_hosts_the_curve_is_the_same_bit_for_bit(tmp_path, whole):
    """A process is killed, then a host with its memory, then the first host."""
    optimizer, uninterrupted = whole
    options = "--min-hosts", "3", "--ready", "jax,optax"
    with hosts_of(tmp_path, 3, optimizer, *options, steps=STEPS, devices=2, seconds=0.4) as hosts:
        hosts.start()
        until_step(hosts, 0, 1, 4)
        os.kill(child_of(hosts.processes[1]), signal.SIGKILL)
        until_step(hosts, 2, 2, 9)
        hosts.processes[2].kill()
        hosts.start(2)
        until_step(hosts, 1, 3, 14)
        hosts.processes[0].kill()
        hosts.start(0)
        assert hosts.statuses(seconds=180) == [0, 0, 0]
    starts = begun(hosts, 1)
    assert [n for n, _ in starts] == [3] * 4
    assert all(a >= b for (_, a), b in zip(starts, (0, 4, 9, 14), strict=True)), starts
    assert losses(tmp_path) == uninterrupted


def test_two_hosts_go_on_from_memory_and_take_the_third_one_back(tmp_path, whole):
    """Sums are exact and the batch is the same: only roundings differ with the number of hosts."""
    optimizer, uninterrupted = whole
    if optimizer != "sharded":
        pytest.skip("with fewer workers memories start anew")
    with hosts_of(tmp_path, 3, optimizer, steps=STEPS, devices=2, seconds=0.7) as hosts:
        hosts.start()
        until_step(hosts, 0, 1, 5)
        hosts.processes[1].kill()
        until_step(hosts, 0, 2, 9)
        hosts.start(1)
        assert hosts.statuses(seconds=180) == [0, 0, 0]
    starts = begun(hosts, 0)
    assert [n for n, _ in starts] == [3, 2, 3], hosts.said(0)
    assert starts[1][1] >= 5
    assert starts[2][1] >= 9
    curve = losses(tmp_path)
    assert len(curve) == STEPS
    assert curve != uninterrupted
    np.testing.assert_allclose(curve, uninterrupted, rtol=1e-5)


def test_without_two_hosts_in_a_row_it_begins_anew(tmp_path):
    """Nobody has the second host's shards: no copy is whole, and a mixture is not taken."""
    with hosts_of(tmp_path, 3, "sharded", "--min-hosts", "3", steps=12) as hosts:
        hosts.start()
        until_step(hosts, 0, 1, 4)
        for i in (1, 2):
            hosts.processes[i].kill()
        hosts.start(1, 2)
        assert hosts.statuses(seconds=180) == [0, 0, 0]
    assert begun(hosts, 0) == [(3, 0), (3, 0)]


def test_a_notice_ends_all_processes_after_the_same_step_without_a_supervisor(tmp_path):
    """An engine starts them again then, and they go on from copies after that step."""
    file = tmp_path / "notice"

    def said(i):
        return (tmp_path / f"log{i}").read_text()

    def start(hosts, i, steps):
        env = ENVIRONMENT | {"DYNAMIQ_JAX_PROGRESS": str(tmp_path / f"progress{i}"),
                             slots.VARIABLE: str(tmp_path / f"copies{i}")}  # fmt: skip
        env |= {notice.VARIABLE: str(file)} if i == 1 else {}
        command = [sys.executable, "-u", WORKER, str(tmp_path), "sharded", str(steps), "0.2"]
        return hosts.start(i, command, env, tmp_path / f"log{i}")

    with Loopback(2) as hosts:
        processes = [start(hosts, i, 1000) for i in range(2)]
        deadline = time.monotonic() + 100
        while "\nstep 3\n" not in said(1):
            assert time.monotonic() < deadline and processes[1].poll() is None, said(1)
            time.sleep(0.05)
        file.touch()
        assert [process.wait(60) for process in processes] == [143, 143], said(1)
    assert f"told to end ({file})" in said(1)
    file.unlink()
    last = [int(re.findall(r"^step (\d+)$", said(i), re.MULTILINE)[-1]) for i in range(2)]
    assert last[0] == last[1]
    with Loopback(2) as hosts:
        again = [start(hosts, i, last[0] + 3) for i in range(2)]
        assert [process.wait(60) for process in again] == [0, 0], said(0)
    assert f"2 hosts begin after step {last[0] + 1}\n" in said(0)
