"""Hosts of `benchmarks/hosts.py`: what deaths and cut links lead to.

`test_multihost` has the results of several processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import multihost_worker as worker
import numpy as np
import pytest
from hosts import Hosts
from processes import ABORTED, PATIENCE, Group, blamed

try:
    hosts.check_machine()
    REASON = None
except hosts.Unavailable as error:
    REASON = str(error)

needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


# --- Cut links ------------------------------------------------------------------------------------


@needs_hosts
@pytest.mark.release
@pytest.mark.parametrize(("heartbeats", "goes_on"), [(100, True), (5, False)])
def test_a_link_cut_for_ten_seconds(tmp_path, heartbeats, goes_on):
    """Longer than heartbeats may fail to come it ends both hosts; else they go on."""
    with Hosts(2, rate="1gbit", devices=2) as made:
        group = Group(made, tmp_path, "steps_on_hosts", heartbeats)
        group.until_step(3)
        made.cut(1)
        time.sleep(10)
        if goes_on:
            assert not group.ended()
            reached = group.step(0)
            made.mend(1)
            group.until_step(reached + 20)
        else:
            made.mend(1)
            assert group.statuses(seconds=PATIENCE) == [ABORTED, ABORTED]
            assert re.search(blamed(1), group.said(0))


# --- A second tenant --------------------------------------------------------------------------


FLOOD = """
import os, socket, sys, threading, time
seconds, room = float(sys.argv[1]), bytearray(2**20)
if os.environ["HOST_ID"] == "1":
    connection, _ = socket.create_server(("10.7.0.2", 5001)).accept()
    count, start = 0, time.monotonic()
    while got := connection.recv_into(room):
        count += got
    print(count / (time.monotonic() - start))
else:
    while True:
        try:
            connection = socket.create_connection(("10.7.0.2", 5001), timeout=1)
            break
        except OSError:
            time.sleep(0.05)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(bytes(2**16))
    connection.close()
"""


@pytest.mark.release
@needs_hosts
def test_a_tenant_takes_its_share_of_the_link(tmp_path):
    """A stream that could fill the link has about the rest; alone it has all of it."""
    rates = {}
    for part in (None, 0.5):
        with Hosts(2, rate="200mbit", devices=1) as made:
            files = made.share(part, tmp_path) if part else []
            command = [sys.executable, "-c", FLOOD, "2"]
            statuses = hosts.run(made, command, tmp_path)
            assert statuses == [0, 0]
            rates[part] = float((tmp_path / "host1.log").read_text()) / made.bytes_per_second
            shares = [hosts.received(file) / made.bytes_per_second for file in files]
    assert 0.85 < rates[None] < 1.05
    assert all(0.25 < share < 0.55 for share in shares), shares
    assert 0.35 < rates[0.5] < 0.75


def test_a_tenant_needs_a_share_of_a_rate(tmp_path):
    assert hosts.percent("50%") == 0.5
    with pytest.raises(ValueError, match="'half' is not a share of the link: write 50%"):
        hosts.percent("half")
    made = Hosts(2, devices=1)
    with pytest.raises(ValueError, match="the hosts have none: give rate"):
        made.share(0.5, tmp_path)
    with pytest.raises(ValueError, match="150% of a link: give 1% to 99%"):
        Hosts(2, rate="1gbit").share(1.5, tmp_path)


# --- The example ----------------------------------------------------------------------------------


def losses(folder):
    return json.loads((folder / "out" / "tiny-multihost.json").read_text())["losses"]


@needs_hosts
@pytest.mark.release
def test_training_goes_on_with_the_hosts_that_are_left_and_again_with_all(tmp_path):
    """All runs have the schedule of `STEPS_ON_HOSTS` steps; the first links are slow."""
    whole, broken, again = (tmp_path / name for name in ("whole", "broken", "again"))
    mode = "training_on_hosts"
    with Hosts(3, rate="100mbit", devices=2) as three:
        assert Group(three, whole, mode).statuses() == [0, 0, 0]
        uninterrupted = losses(whole)
        group = Group(three, broken, mode)
        group.until_step(7)
        group.lose(1)
        shutil.copytree(broken, again)
        # With as many hosts: the curve of the run that was not interrupted.
        assert Group(three, again, mode).statuses() == [0, 0, 0]
        assert losses(again) == uninterrupted
    with Hosts(2, devices=2) as two:
        group = Group(two, broken, mode)
        group.until_step(13)
        group.lose(1)
    (first,) = re.findall(r"starting after step (\d+)\n", group.said(0))
    with Hosts(3, devices=2) as three:
        group = Group(three, broken, mode)
        assert group.statuses() == [0, 0, 0]
    (second,) = re.findall(r"starting after step (\d+)\n", group.said(0))
    assert 0 < int(first) < int(second) < worker.STEPS_ON_HOSTS
    curve = losses(broken)
    assert curve[: int(first)] == uninterrupted[: int(first)]
    assert curve != uninterrupted  # batches of two hosts are smaller
    np.testing.assert_allclose(curve, uninterrupted, atol=0.25)
    assert uninterrupted[-1] < uninterrupted[0] - 0.5


# --- The tool -------------------------------------------------------------------------------------


def left_behind():
    """Namespaces of hosts, and files."""
    folder = Path("/etc/netns")
    return {*os.listdir("/run/netns"), *(os.listdir(folder) if folder.exists() else ())}


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_run_that_is_ended(tmp_path, number):
    before, seconds = left_behind(), f"1000.{os.getpid()}"
    stubborn = f"trap '' INT TERM; sleep {seconds} & echo on $(hostname) of $NUM_HOSTS; wait"
    command = ["--hosts", "3", "--logs", str(tmp_path), "--"]
    process = subprocess.Popen([sys.executable, hosts.__file__, *command, "sh", "-c", stubborn])
    log = tmp_path / "host2.log"
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert log.read_text() == "on host2 of 3\n"
    assert len(left_behind() - before) == 4  # three hosts and a switch
    process.send_signal(number)
    assert process.wait(30) == (128 + number if number == signal.SIGTERM else -number)
    while left_behind() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-f", f"sleep {seconds}"], capture_output=True, text=True)
    assert found.stdout == ""


@needs_hosts
def test_a_failing_host_ends_the_run_with_its_status(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(hosts, "GRACE", 0.5)
    script = "[ $HOST_ID = %i ] && [ %i = 1 ] && echo because && exit 7; sleep 1000"
    with Hosts(2) as made:
        assert hosts.run(made, ["sh", "-c", script], tmp_path) == [None, 7]
    with pytest.raises(hosts.typer.Exit) as ended:
        hosts.main(["sh", "-c", script], logs=tmp_path)
    assert ended.value.exit_code == 7
    assert "because" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1}, "hosts=1: give 2 to 250"),
        ({"rate": "25"}, "rate='25': give a text of a number and a unit"),
        ({"devices": 2, "gpus": 1}, "devices=2 and gpus=1: give one of them"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Hosts(**{"n": 2} | options)


def test_a_machine_without_the_tools_is_told_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(hosts.typer.Exit) as ended:
        hosts.main(["true"])
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hosts are made by tc, not found in PATH: install iproute2")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.Unavailable, match="take Linux and root"):
        hosts.check_machine()
