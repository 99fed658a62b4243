"""Several processes over loopback: their results are those of one, and a death ends them all.

Groups of 2 and 4 processes, of 2 devices each, run `multihost_worker`, which says what they do.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import multihost_worker as worker
import numpy as np
import pytest
from cases import assert_same_bits, daily
from compiler import FLAGS
from processes import coordinator

SILENCE = 60
"""Seconds without a new line from any process of a group, after which it counts as hanging."""
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
DEVICES = "--xla_force_host_platform_device_count"
KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", worker.BRIEF)
"""Variables that processes inherit: neither proxies nor a cluster's, by which JAX would go."""

BLAMES = (r"Task (\d+) heartbeat timeout", r"heartbeats\):\n(\d+)\n", r"task names:\n(\d+)\n")
"""How JAX says who died, by what the survivors were doing: computing, saving or shutting down."""


NAMED = [(n, name) for n, names in worker.COLLECTIVES.items() for name in names]


# --- Groups of processes --------------------------------------------------------------------------


class Ended(NamedTuple):
    """The end of one process."""

    status: int
    time: float
    output: str


def start(folder, mode, devices, group=()):
    """One process that runs the worker, leader of a process group of its own, and its log."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS} {DEVICES}={devices}"}
    if group:  # seeds of hashes 0 and 2 order a set of the axes otherwise
        env |= {"JAX_COORDINATOR_BIND_ADDRESS": group[0], "PYTHONHASHSEED": str(2 * group[2])}
    log = folder / f"{mode}.{group[-1] if group else 'alone'}.log"
    command = [sys.executable, "-u", worker.__file__, mode, folder, *map(str, group)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return process, log


def ends(starts):
    """How processes end that run side by side. Whatever happens, none outlives this call."""
    started, ended = [], {}
    heard, news = time.monotonic(), None
    try:
        started.extend(start() for start in starts)
        while len(ended) < len(started):
            time.sleep(0.05)
            for i, (process, log) in enumerate(started):
                if i not in ended and process.poll() is not None:
                    ended[i] = Ended(process.returncode, time.monotonic(), log.read_text())
            before, news = news, (len(ended), *(log.stat().st_size for _, log in started))
            heard = time.monotonic() if news != before else heard
            if time.monotonic() - heard > SILENCE:
                tails = [f"{log.name}:\n{log.read_text()[-1500:]}" for _, log in started]
                pytest.fail(f"no news for {SILENCE} s\n" + "\n\n".join(tails))
    finally:
        for process, _ in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [ended[i] for i in range(len(started))]


def group_ends(folder, mode, n):
    """Runs n processes that find each other at a free port; returns how they ended."""
    address = coordinator()
    members = [(address, n, i) for i in range(n)]
    return ends([functools.partial(start, folder, mode, 2, member) for member in members])


def assert_went_well(*processes):
    for process in processes:
        assert process.status == 0, process.output[-3000:]


def assert_others_noticed_the_death(processes):
    """JAX ended the survivors, in time, and told each of them who had died."""
    victim = processes[worker.VICTIM]
    assert victim.status == KILLED, victim.output[-3000:]
    for survivor in set(processes) - {victim}:
        assert survivor.status == ABORTED, survivor.output[-3000:]
        assert 0 < survivor.time - victim.time < 1.5 * worker.HEARTBEAT_TIMEOUT
        named = re.findall("|".join(BLAMES), survivor.output)
        assert str(worker.VICTIM) in sum(named, ())


# --- The library ----------------------------------------------------------------------------------


class Results(NamedTuple):
    """Files and messages of one group's processes."""

    rows: dict[str, np.ndarray]
    """{"collective/worker": that worker's result}"""
    records: list[dict]


def results(folder, n):
    rows = {}
    for i in range(n):
        with np.load(folder / f"{i}.npz") as held:
            assert not rows.keys() & held.keys()
            rows.update(held)
    files = sorted(folder.glob("?.json"))
    return Results(rows, [json.loads(file.read_text()) for file in files])


@pytest.fixture(autouse=True, scope="module")
def brief(request):
    """Only releases train: that takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.config.option.release:
            patch.setenv(worker.BRIEF, "1")
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """n -> results of one process with as many devices as n processes have."""

    @functools.cache
    def run(n):
        folder = tmp_path_factory.mktemp(f"alone{n}")
        assert_went_well(*ends([functools.partial(start, folder, "alone", 2 * n)]))
        return results(folder, 1)

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """n -> results of n processes, and how they ended."""

    @functools.cache
    def run(n):
        folder = tmp_path_factory.mktemp(f"together{n}")
        processes = group_ends(folder, "together", n)
        if n == 4:
            assert_others_noticed_the_death(processes)
        else:
            assert_went_well(*processes)
        return results(folder, n)

    return run


@pytest.mark.parametrize(("n", "name"), daily(NAMED, [(n, name) for n, name in NAMED if n == 2]))
def test_several_processes_give_the_bits_of_one(alone, together, n, name):
    for i in range(2 * n):
        expected = alone(n).rows[f"{name}/{i}"]
        assert np.ptp(expected) > 0
        assert_same_bits(together(n).rows[f"{name}/{i}"], expected)


@pytest.mark.release
@pytest.mark.parametrize("way", worker.WAYS)
def test_several_processes_train_with_the_bits_of_one(alone, together, way):
    expected, found = alone(4).rows, together(4).rows
    own = {name for name in expected if name.startswith(f"{way}/")}
    assert own == {name for name in found if name.startswith(f"{way}/")} and len(own) >= 16
    for name in own:
        if "/loss/" not in name:
            assert np.ptp(expected[name]) > 0
            assert_same_bits(found[name], expected[name])
        else:  # a mean in f32, added up in another order
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


@pytest.mark.release
@pytest.mark.parametrize("n", worker.COLLECTIVES)
def test_all_devices_end_training_with_the_bits_of_one_process(alone, together, n):
    records, (expected,) = together(n).records, alone(n).records
    assert all(record["mesh"] == {"node": n, "gpu": 2} for record in records)
    copies = [copy for record in records for copy in record["hashes"]]
    assert len(copies) == 2 * n
    assert set(copies) == set(expected["hashes"])
    for record in records:
        assert record["losses"] == records[0]["losses"]
        # Losses are averaged in f32, in another order than in one process.
        np.testing.assert_allclose(record["losses"], expected["losses"], rtol=1e-6)
    assert expected["losses"][-1] < expected["losses"][0] - 0.3


# --- The example ----------------------------------------------------------------------------------


@pytest.mark.release
def test_restart_after_a_death_draws_the_curve_of_an_uninterrupted_run(tmp_path, together):
    processes = group_ends(tmp_path, "command_line_dies", 2)
    assert_others_noticed_the_death(processes)
    assert "step 6" in processes[0].output
    assert not (tmp_path / "out").exists()

    processes = group_ends(tmp_path, "command_line", 2)
    assert_went_well(*processes)
    (resumed,) = re.findall(r"starting after step (\d+)\n", processes[0].output)
    # The newest complete one: the last before the death may still have been on its way to disk.
    assert 0 < int(resumed) < worker.DIES_BEFORE_STEP
    assert "starting" not in processes[1].output  # one process speaks for all
    record = json.loads((tmp_path / "out" / "tiny-multihost.json").read_text())
    assert record["losses"] == together(2).records[0]["losses"]
