"""Several processes over loopback: their results are those of one, and a death ends them all.

Groups of 2 and 4 processes, of 2 devices each, run `multihost_worker`, which says what they do.
"""

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import multihost_worker as worker
import numpy as np
import pytest
import typer
from asserts import assert_same_bits
from cases import daily
from compiler import FLAGS
from processes import KEPT, Group, Loopback, coordinator, outputs
from typer.testing import CliRunner

DIES = "command_line_dies"
NAMED = [(n, name) for n, names in worker.COLLECTIVES.items() for name in names]


def ended(folder, mode, n, devices=2):
    """n processes of a mode, after their end."""
    with Loopback(n, devices) as made:
        group = Group(made, folder, mode)
        if mode == DIES or (mode, n) == ("together", 4):
            group.notices(worker.VICTIM)
        else:
            assert group.statuses() == [0] * n, group.said(0)[-3000:]
        return group


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
        ended(folder, "alone", 1, 2 * n)
        return results(folder, 1)

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """n -> results of n processes, and how they ended."""

    @functools.cache
    def run(n):
        folder = tmp_path_factory.mktemp(f"together{n}")
        ended(folder, "together", n)
        return results(folder, n)

    return run


@pytest.mark.parametrize(("n", "name"), daily(NAMED, [(n, name) for n, name in NAMED if n == 2]))
def test_several_processes_give_the_bits_of_one(alone, together, n, name):
    for i in range(2 * n):
        expected = alone(n).rows[f"{name}/{i}"]
        assert np.ptp(expected) > 0
        assert_same_bits(together(n).rows[f"{name}/{i}"], expected)


def test_the_example_reads_what_a_supervisor_sets(monkeypatch):
    """And options before variables."""
    told = []
    monkeypatch.setattr(
        worker.train_multihost, "join", lambda *args: told.append(args[:3]) or 1 / 0
    )
    app = typer.Typer()
    app.command()(worker.train_multihost.main)
    env = {"COORDINATOR": "host0:29400", "NUM_HOSTS": "3", "HOST_ID": "2"}
    for options in ([], ["--process-id", "1"]):
        done = CliRunner().invoke(app, options, env=env)
        assert isinstance(done.exception, ZeroDivisionError)
    assert told == [("host0:29400", 3, 2), ("host0:29400", 3, 1)]


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
    assert "step 6" in ended(tmp_path, DIES, 2).said(0)
    assert not (tmp_path / "out").exists()

    group = ended(tmp_path, "command_line", 2)
    (resumed,) = re.findall(r"starting after step (\d+)\n", group.said(0))
    # The newest complete one: the last before the death may still have been on its way to disk.
    assert 0 < int(resumed) < worker.DIES_BEFORE_STEP
    assert "starting" not in group.said(1)  # one process speaks for all
    record = json.loads((tmp_path / "out" / "tiny-multihost.json").read_text())
    assert record["losses"] == together(2).records[0]["losses"]


# --- Processes with different numbers of rows -----------------------------------------------------


def test_a_process_without_batches_takes_part_and_uneven_ones_are_named():
    """By the recipe the loss is that of all rows; a mean of means is said to be one."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    flags = f"{FLAGS} --xla_force_host_platform_device_count=4"
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker, address = Path(__file__).with_name("uneven_worker.py"), coordinator()
    commands = [[sys.executable, str(worker), address, str(i)] for i in range(2)]
    w, means = np.full((256, 8), 0.01), []
    for i, rows in enumerate((16, 8)):
        x = np.random.default_rng(i).standard_normal((rows, 256), np.float32) + i
        means.append(np.mean((x @ w - 1) ** 2))
    expected = {"plain": np.mean(means), "weighted": np.average(means, weights=(2, 1))}
    for i, (said, _) in enumerate(outputs(commands, env)):
        for name, loss in expected.items():
            ((found, warned),) = re.findall(rf"^{name} (\S+); (.*)$", said, re.MULTILINE)
            assert float(found) == pytest.approx(loss, rel=1e-4)
            own, other = (32, 16)[:: 1 - 2 * i]
            told = rf"'x' has shape \({own}, 256\) on process {i}, and had \({other}, 256\) on"
            assert bool(re.search(told, warned)) == (name == "plain") and (warned == "[]") == (
                name == "weighted"
            )


# --- Restored states ------------------------------------------------------------------------------


@pytest.mark.release
def test_leaves_of_several_processes_get_other_zeros():
    """Each process has half of a leaf; to cut its end, and to put on another, needs all of it."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    flags = f"{FLAGS} --xla_force_host_platform_device_count=2"
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker, address = Path(__file__).with_name("padded_worker.py"), coordinator()
    commands = [[sys.executable, str(worker), address, str(i)] for i in range(2)]
    for said, _ in outputs(commands, env):
        assert re.search(r"^restored [2-9] leaves with other zeros$", said, re.MULTILINE), said
