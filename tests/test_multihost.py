"""Several processes over loopback: their results are those of one, and a death is noticed.

Groups of 2 and 4 processes, of 2 devices each, run `multihost_worker`, which says what they do.
"""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import multihost_worker as worker
import numpy as np
import pytest
from cases import assert_same_bits

SILENCE = 60
"""Seconds without a new line from any process of a group, after which it counts as hanging."""
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
FLAGS = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # newer XLA refuses it; it halves compile time again
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
DEVICES = "--xla_force_host_platform_device_count"
KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
"""Of the environment: neither proxies nor a cluster's variables, by which JAX would go."""

BLAMES = (r"Task (\d+) heartbeat timeout", r"heartbeats\):\n(\d+)\n", r"task names:\n(\d+)\n")
"""How JAX says who died, by what the survivors were doing: computing, saving or shutting down."""


# --- Groups of processes --------------------------------------------------------------------------


class Ended(NamedTuple):
    """What became of one process."""

    status: int
    time: float
    output: str


def start(folder, mode, devices, group=()):
    """One process that runs the worker, leader of a process group of its own, and its log."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS} {DEVICES}={devices}"}
    if group:
        env["JAX_COORDINATOR_BIND_ADDRESS"] = group[0]
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
    """The same for n processes that find each other at a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    members = [(coordinator, n, i) for i in range(n)]
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
    """What the processes of one group left."""

    rows: dict[str, np.ndarray]
    """{"collective/worker": that worker's result}"""
    records: list[dict]


def results(folder, n):
    rows = {}
    for i in range(n):
        with np.load(folder / f"{i}.npz") as held:
            assert not rows.keys() & held.keys()
            rows.update(held)
    return Results(rows, [json.loads((folder / f"{i}.json").read_text()) for i in range(n)])


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    folders = {n: tmp_path_factory.mktemp(f"alone{n}") for n in worker.COLLECTIVES}
    assert_went_well(*ends([functools.partial(start, folders[n], "alone", 2 * n) for n in folders]))
    return {n: results(folder, 1) for n, folder in folders.items()}


@pytest.fixture(scope="module")
def of_several(tmp_path_factory):
    """{n: results of n processes}, and how the processes ended."""
    folders = {n: tmp_path_factory.mktemp(f"together{n}") for n in worker.COLLECTIVES}
    ended = {n: group_ends(folder, "together", n) for n, folder in folders.items()}
    assert_went_well(*ended[2])
    return {n: results(folder, n) for n, folder in folders.items()}, ended


@pytest.mark.parametrize(
    ("n", "name"), [(n, name) for n, names in worker.COLLECTIVES.items() for name in names]
)
def test_several_processes_give_the_bits_of_one(of_one_process, of_several, n, name):
    for i in range(2 * n):
        expected = of_one_process[n].rows[f"{name}/{i}"]
        assert np.ptp(expected) > 0
        assert_same_bits(of_several[0][n].rows[f"{name}/{i}"], expected)


@pytest.mark.parametrize("n", worker.COLLECTIVES)
def test_all_devices_of_all_processes_end_training_with_the_bits_of_one_process(
    of_one_process, of_several, n
):
    records = of_several[0][n].records
    assert all(record["mesh"] == {"node": n, "gpu": 2} for record in records)
    (alone,) = of_one_process[n].records
    copies = sum((record["hashes"] for record in records), [])
    assert len(copies) == 2 * n
    assert set(copies) == set(alone["hashes"])
    for record in records:
        assert record["losses"] == records[0]["losses"]
        # Losses are averaged in f32, in another order than in one process.
        np.testing.assert_allclose(record["losses"], alone["losses"], rtol=1e-6)
    assert alone["losses"][-1] < alone["losses"][0] - 0.3


@pytest.mark.parametrize("n", worker.COLLECTIVES)
def test_processes_that_were_told_different_keys_say_so(of_several, n):
    for record in of_several[0][n].records:
        assert "key: process 0 has" in record["complaint"]
        assert f"(differs from process 0 on {[*range(1, n)]})" in record["complaint"]


def test_a_death_ends_the_others_with_its_name(of_several):
    assert_others_noticed_the_death(of_several[1][4])


# --- The example ----------------------------------------------------------------------------------


def test_restart_after_a_death_draws_the_curve_of_an_uninterrupted_run(tmp_path, of_several):
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
    assert record["losses"] == of_several[0][2].records[0]["losses"]
