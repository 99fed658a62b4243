"""`benchmarks/slow_host.py`: what a step takes while one host is slow."""

import re
import sys
from pathlib import Path

import hosts
import pytest
import slow_host
from test_hosts import needs_hosts

SCRIPT = Path(slow_host.__file__)
STEPS, SECONDS = 4, 0.2


@pytest.mark.parametrize(
    ("seconds", "count"), [(0.1, 4), (0.12, 4), (0.2, 2), (0.3, 1), (0.5, 1), (0.6, 0)]
)
def test_a_worker_takes_what_it_can_within_the_deadline(seconds, count):
    assert slow_host.budget(seconds, 0.5) == count
    assert slow_host.budget(seconds, float("inf")) == slow_host.MOST


def refused(monkeypatch, what, **env):
    for name in ("NUM_HOSTS", "HOST_ID", "COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit) as error:
        slow_host.main(what)
    return str(error.value)


def test_it_says_how_it_is_run(monkeypatch):
    said = refused(monkeypatch, slow_host.What.MICRO_BATCHES)
    assert "benchmarks/hosts.py --hosts 3 --devices 1" in said and "micro-batches" in said
    three = {"NUM_HOSTS": "3", "HOST_ID": "0", "COORDINATOR": "10.7.0.1:1"}
    assert "there are 3" in refused(monkeypatch, slow_host.What.GRID, **three)


def rows(tmp_path, n_hosts, what):
    """{name: (s of all steps, ms of a step, ms that host 0 waits, taken)}."""
    options = ["--steps", str(STEPS), "--seconds", str(SECONDS)]
    with hosts.Hosts(n_hosts, devices=1) as made:
        command = [sys.executable, str(SCRIPT), what, *options]
        assert hosts.run(made, command, tmp_path) == [0] * n_hosts
    said = (tmp_path / "host0.log").read_text()
    found = re.findall(r"^\| (\w.*?) \| ([\d.]+) \| (\d+) \| (\d+) \| (\d+) \|", said, re.MULTILINE)
    return {name: tuple(map(float, cells)) for name, *cells in found}


@needs_hosts
@pytest.mark.release
def test_a_budget_ends_the_wait_for_a_slow_host(tmp_path):
    alike, waits, dropped = rows(tmp_path, 3, "micro-batches").values()
    work = slow_host.MOST * SECONDS
    assert alike[0] >= STEPS * work and waits[0] >= 2 * STEPS * work
    assert waits[2] >= 1000 * work > dropped[2]  # by sleeps: the others' work takes as long again
    # The first slow step is not foreseen; then the slow host takes 2 of 4.
    full = 3 * slow_host.MOST
    assert alike[3] == waits[3] == STEPS * full
    assert dropped[3] == full + (STEPS - 1) * (full - 2)
    assert (STEPS + 1) * work <= dropped[0] < waits[0]


@needs_hosts
@pytest.mark.release
def test_a_grid_waits_for_one_slow_host_and_not_for_all_that_are_slow_in_turn(tmp_path):
    found = rows(tmp_path, 4, "grid")
    all_slow = 2 * STEPS * SECONDS
    among_all, in_grid = (found[f"one slow, in turn, {way}"] for way in ("among all", "in a grid"))
    assert among_all[0] >= all_slow > in_grid[0]
    assert found["one slow, among all"][0] >= all_slow
    assert found["one slow, in a grid"][0] >= all_slow  # one that is always slow holds up all
    for way in ("among all", "in a grid"):
        taken = {kind: found[f"{kind}, {way}"][3] for kind in ("all alike", "one missing")}
        assert taken == {"all alike": 4 * STEPS, "one missing": 3 * STEPS}
        assert found[f"one missing, {way}"][0] < all_slow
