"""`examples/again.sh`, which starts a command again under Open MPI and in Kubernetes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "again.sh"
ENV = os.environ | {"STARTS": "3"}
COUNTS = "echo >>starts; test $(wc -l <starts) -ge 3"
SAVES = (
    "trap 'sleep 0.5; echo saved >saved; exit 143' TERM; echo >>starts; while :; do sleep 0.1; done"
)


def again(folder, text, script=SCRIPT):
    return subprocess.Popen(["bash", script, "bash", "-c", text], cwd=folder, env=ENV)


def starts(folder):
    return len((folder / "starts").read_text().splitlines())


@pytest.mark.parametrize("text, status, count", [(COUNTS, 0, 3), (COUNTS + " && exit 143", 143, 3)])
def test_it_starts_again_after_a_fault_and_after_no_other_end(tmp_path, text, status, count):
    assert again(tmp_path, text).wait(timeout=30) == status
    assert starts(tmp_path) == count


def test_failures_in_a_row_end_it_and_others_do_not_count(tmp_path):
    """A run of weeks has more faults than a program may have that never works."""
    soon = tmp_path / "soon.sh"
    soon.write_text(SCRIPT.read_text().replace("< 60", "< 2"))
    fails = "echo >>starts; test $(wc -l <starts) -gt 2 || sleep 3; exit 7"
    assert again(tmp_path, fails, soon).wait(timeout=30) == 7
    assert starts(tmp_path) == 5


def test_it_passes_sigterm_on_and_waits_until_the_command_has_saved(tmp_path):
    process = again(tmp_path, SAVES)
    deadline = time.monotonic() + 20
    while not (tmp_path / "starts").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert (tmp_path / "saved").exists()
    assert starts(tmp_path) == 1
