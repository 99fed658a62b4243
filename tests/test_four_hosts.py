"""A script for one GPU, and the same one on four hosts (docs/multihost.md)."""

import difflib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from supervised import Supervised, child_of
from test_hosts import needs_hosts

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "four_hosts.py"
PAGE = (ROOT / "docs" / "multihost.md").read_text()
ONE = ROOT / "examples" / "one_gpu.py"
FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
ALONE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(ROOT)}


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)", text)}


def trained(script, folder, **env):
    command = [sys.executable, str(script), str(folder)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | ALONE | env
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return losses(done.stdout)


def test_the_scripts_differ_in_seven_places():
    """All other lines are the same; every change has a number and a row of the table."""
    code, one = SCRIPT.read_text(), ONE.read_text()
    lines, one = code[code.index("import os\n") :].splitlines(), one[one.index("import sys\n") :]
    changes = list(difflib.ndiff(one.splitlines(), lines))
    new = [line[2:] for line in changes if line.startswith("+ ") and line.strip("+ ")]
    assert len(new) <= 25 and sum(line.startswith("- ") for line in changes) <= 6, changes
    numbers = [int(n) for n in re.findall(r"  # ([1-9]):", "\n".join(new))]
    rows = [int(n) for n in re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)]
    assert numbers == rows == list(range(1, 8))


@pytest.mark.release
def test_four_devices_train_as_one(tmp_path):
    expected = trained(ONE, tmp_path / "one")
    found = trained(SCRIPT, tmp_path / "four", **FOUR)
    assert list(found) == [20, 40, 60, 80] and found.keys() == expected.keys()
    assert found[80] == pytest.approx(expected[80], rel=0.01) and found != expected
    assert found[80] < 0.5 * found[20]


@needs_hosts
@pytest.mark.release
def test_on_four_hosts(tmp_path):
    with hosts.Hosts(4, devices=1) as made:
        command = [sys.executable, str(SCRIPT), str(tmp_path / "run")]
        assert hosts.run(made, command, tmp_path) == [0] * 4
    found = losses((tmp_path / "host0.log").read_text())
    assert list(found) == [20, 40, 60, 80] and found[80] < 0.5 * found[20]


@pytest.mark.release
def test_a_run_whose_process_is_killed_ends_with_the_same_loss(tmp_path):
    """The second run goes on from the step of its newest checkpoint."""
    logs = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        command = [sys.executable, str(SCRIPT), str(folder / "run")]
        env = {"JAX_PLATFORMS": "cpu"} | ALONE
        with Supervised(folder, 4, "--min-hosts", "4", command=command, env=env) as run:
            run.start()
            if killed:
                run.until_said(r"step +20 ", 0, seconds=120)
                os.kill(child_of(run.processes[2]), signal.SIGKILL)
            assert run.statuses(seconds=200) == [0] * 4
            logs.append(run.said(0))
    whole, broken = logs
    assert "killed by SIGKILL" in broken and losses(broken) == losses(whole)
    assert len(re.findall(r"way to train", broken)) == 2
