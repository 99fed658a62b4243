"""The example under `dynamiq-jax run`, on hosts that are killed or whose links are cut."""

import os
import re
import signal
import sys
import time

import multihost_worker as worker
import numpy as np
import pytest
from hosts import Hosts
from processes import ENVIRONMENT, WORKER, Group
from supervised import child_of
from test_hosts import losses, needs_hosts

from dynamiq_jax.hosts import notice

PORT = 29500
pytestmark = needs_hosts


class Run:
    """A supervisor on every host of ``made``, and their logs and events."""

    def __init__(self, made, folder, *options, env=None):
        folder.mkdir(exist_ok=True, parents=True)
        hosts = ",".join(f"{made.address(i)}:{PORT}" for i in range(made.n))
        self.made, self.folder, self.env = made, folder, env or {}
        self.options = ["--hosts", hosts, "--silence", "3", "--stall", "20", *options]
        self.processes = [self.start(i) for i in range(made.n)]

    def start(self, i):
        command = [sys.executable, "-m", "dynamiq_jax", "run", "--host-id", str(i), *self.options]
        command += ["--", sys.executable, "-u", str(WORKER), "training_on_hosts", str(self.folder)]
        # A supervisor that starts again keeps the lines of the one before.
        keep = ["sh", "-c", f'exec "$@" >>{self.log(i)} 2>&1', "sh"]
        env = ENVIRONMENT | self.env | {notice.VARIABLE: str(self.notice(i))}
        return self.made.start(i, keep + command, env=env)

    def notice(self, i):
        return self.folder / f"notice.{i}"

    def log(self, i):
        return self.folder / f"supervisor.{i}.log"

    def said(self, i):
        return self.log(i).read_text() if self.log(i).exists() else ""

    def until(self, true, seconds):
        deadline = time.monotonic() + seconds
        while not true():
            tails = "\n".join(f"host {i}:\n{self.said(i)[-2500:]}" for i in range(self.made.n))
            assert time.monotonic() < deadline, tails
            time.sleep(0.05)

    def until_step(self, step, start, *which, seconds=120):
        """Waits until the hosts have begun a step, or a later one, after their start number."""

        def reached(i):
            after = self.said(i).partition(f": start {start} with")[2]
            return any(int(s) >= step for s in re.findall(r"^step (\d+)$", after, re.MULTILINE))

        self.until(lambda: all(map(reached, which or range(self.made.n))), seconds)

    def training(self, i):
        """The process that a host's supervisor has started."""
        return child_of(self.processes[i])

    def statuses(self, *which, seconds=120):
        processes = [self.processes[i] for i in which or range(self.made.n)]
        self.until(lambda: all(process.poll() is not None for process in processes), seconds)
        return [process.returncode for process in processes]


FAULTS = {
    "a process killed": r"host 1 \(10.7.0.2\): killed by SIGKILL",
    "a process stopped": r"host 1 \(10.7.0.2\): its process is stopped",
    "the first process killed": r"host 0 \(10.7.0.1\): killed by SIGKILL",
    "a host killed": r"host 1 \(10.7.0.2\): no heartbeat for 3 s",
    "the first host killed": r"host 0 \(10.7.0.1\): no heartbeat for 3 s",
    "a link cut": r"host 1 \(10.7.0.2\): no heartbeat for 3 s",
    "the first host's link cut": r"host 0 \(10.7.0.1\): no heartbeat for 3 s",
    "a link cut in one direction": r"(does not hear this host|no heartbeat for 3 s)",
    "a process raises": r"host 1 \(10.7.0.2\): ended with status 1: ZeroDivisionError",
    "processes disagree": r"host \d \(10.7.0.\d\): ended with status 1: RuntimeError.*process",
}


def cause(run, fault, victim):
    """Makes a fault happen on a host."""
    if fault.endswith("process killed"):
        os.kill(run.training(victim), signal.SIGKILL)
    elif fault == "a process stopped":
        os.kill(run.training(victim), signal.SIGSTOP)
    elif fault.endswith("host killed"):
        run.made.kill(victim)
    elif fault.endswith("link cut"):
        run.made.cut(victim)
    elif fault.endswith("direction"):  # what host 1 sends is lost
        run.made.drop(victim)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_other_host_ends_within_fifteen_seconds_and_names_the_cause(tmp_path, fault):
    victim = 0 if "first" in fault else 1
    others = sorted({0, 1, 2} - {victim})
    env = {"FAULT": fault} if fault in ("a process raises", "processes disagree") else {}
    with Hosts(3, devices=2) as made:
        run = Run(made, tmp_path, "--restarts", "0", "--min-hosts", "3", env=env)
        if env:
            statuses = run.statuses(*others)
        else:
            run.until_step(4, 1)
            cause(run, fault, victim)
            began = time.monotonic()
            statuses = run.statuses(*others, seconds=15)
            print(f"{fault}: {time.monotonic() - began:.1f} s")
    assert statuses == [1, 1]
    for i in others:
        last = run.said(i).splitlines()[-1]
        print(last)
        assert re.search(FAULTS[fault], last)


def test_three_kills_leave_the_curve_as_it_is(tmp_path):
    """By the exact method and by `DynamiQ`: bit for bit, for all three hosts start again."""
    for method in ("exact", "dynamiq"):
        with Hosts(3, devices=2) as made:
            whole, broken = tmp_path / method / "whole", tmp_path / method / "broken"
            assert Run(made, whole, env={"METHOD": method}).statuses() == [0, 0, 0]
            run = Run(made, broken, env={"METHOD": method})
            for number, (victim, step) in enumerate([(1, 4), (0, 8), (2, 13)], start=1):
                run.until_step(step, number)
                os.kill(run.training(victim), signal.SIGKILL)
            assert run.statuses() == [0, 0, 0]
        assert len(re.findall("killed by SIGKILL", run.said(0))) >= 3
        assert losses(broken) == losses(whole)


def test_two_hosts_go_on_and_take_the_third_one_back(tmp_path):
    with Hosts(3, devices=2) as made:
        run = Run(made, tmp_path, env={"STEP_SECONDS": "1.5"})
        run.until_step(4, 1)
        made.kill(0)
        run.until_step(7, 2, 1, 2)
        run.processes[0] = run.start(0)
        assert run.statuses() == [0, 0, 0]
    assert "came back: all save and start again" in run.said(1)
    assert re.search(r"start \d+ with 3 hosts", run.said(0))
    curve = losses(tmp_path)
    assert len(curve) == worker.STEPS_ON_HOSTS and np.isfinite(curve).all()
    assert curve[-1] < curve[0] - 0.5


def test_a_host_with_notice_leaves_and_the_others_repeat_no_step(tmp_path):
    with Hosts(3, devices=2) as made:
        run = Run(made, tmp_path, "--wait", "20", env={"STEP_SECONDS": "0.5"})
        run.until_step(4, 1)
        began = time.monotonic()
        run.notice(1).write_text("power is cut at five")
        assert run.statuses(1) == [143]
        run.until_step(5, 2, 0, 2)
        print(f"going on after {time.monotonic() - began:.1f} s")
        assert run.statuses() == [0, 143, 0]
    assert run.said(1).endswith(f"host 1: told to end ({run.notice(1)}: power is cut at five)\n")
    for i in (0, 2):
        first, second = run.said(i).split(": start 2 with 2 hosts")
        assert f"host 1 (10.7.0.2): told to end ({run.notice(1)}: power" in first
        steps = [
            list(map(int, re.findall(r"^step (\d+)$", t, re.MULTILINE))) for t in (first, second)
        ]
        assert steps[1][0] == steps[0][-1] + 1


def test_a_process_told_to_end_in_its_first_step_saves_and_ends(tmp_path, monkeypatch):
    """Also if that step is not the first one of the run."""
    with Hosts(2, devices=2) as made:
        first = Group(made, tmp_path, "training_on_hosts")
        first.until_step(3)
        first.processes[0].send_signal(signal.SIGTERM)
        assert first.statuses() == [143, 143]
        reached = first.step(0)
        monkeypatch.setitem(ENVIRONMENT, "FAULT", "told to end")
        second = Group(made, tmp_path, "training_on_hosts")
        assert second.statuses() == [143, 143]
    assert f"starting after step {reached + 1}\n" in second.said(0)
    assert second.step(0) <= reached + 3
