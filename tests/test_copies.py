"""Copies in the memory of hosts: which one counts, and that they outlive a process and a host."""

import json
import re
import sys

import copies_worker
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from compiler import FLAGS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from supervised import Supervised
from workers import mesh_of

from dynamiq_jax.commands.copies import Copies, Told, newest
from dynamiq_jax.commands.slots import VARIABLE, Slots

WORKER = copies_worker.__file__
EMPTY, NOW, BEFORE = Told(), (2, 0), (1, 5)


def host(process, *steps, session=NOW, processes=3, whole=False):
    """Two slots of a host: copies of these steps, by this process."""
    told = [Told(step, session, processes, process, whole) for step in steps]
    return [*told, EMPTY, EMPTY][:2]


HOSTS = {
    "all have the same": ([host(0, 7, 8), host(1, 7, 8), host(2, 7, 8)], (8, NOW, 3)),
    "a write was torn": ([host(0, 7, 8), host(1, 7), host(2, 8, 7)], (8, NOW, 3)),
    "two writes were torn": ([host(0, 7), host(1, 7, 8), host(2, 7)], (7, NOW, 3)),
    "one is dead": ([host(0, 8, 9), host(2, 8)], (8, NOW, 3)),
    "another one is dead": ([host(2, 9, 8), host(1, 9, 8)], (9, NOW, 3)),
    "one came back empty": ([host(0, 8), host(1, 8), [EMPTY, EMPTY]], (8, NOW, 3)),
    "two in a row are dead": ([host(1, 8, 9)], None),
    "two of four, apart, are dead": (
        [host(0, 5, processes=4), host(2, 5, processes=4)], (5, NOW, 4)
    ),
    "two of four in a row are dead": ([host(0, 5, processes=4), host(1, 5, processes=4)], None),
    "each has all": ([[EMPTY, EMPTY], host(1, 3, 4, whole=True)], (4, NOW, 3)),
    "of another session": (
        [host(0, 9, session=BEFORE), host(1, 9), host(2, 7), host(0, 7, 9)], (9, NOW, 3)
    ),
    "steps are not mixed": ([host(0, 9), host(2, 8)], None),
    "sessions are not mixed": ([host(0, 9, session=BEFORE), host(2, 9)], None),
    "nobody has any": ([[EMPTY, EMPTY]] * 3, None),
}  # fmt: skip
"""{name: (what hosts tell, the copy that counts)}; host p has shards of p and of p - 1."""


@pytest.mark.parametrize("name", HOSTS)
def test_the_newest_copy_of_which_hosts_have_everything_counts(name):
    told, expected = HOSTS[name]
    found = newest(told)
    assert (found and found[:3]) == expected
    assert newest(told[::-1]) == found


# --- Slots ----------------------------------------------------------------------------------------


class Killed(Exception):
    """In the place of SIGKILL."""


def half_of(data):
    """Parts of which only the first half comes."""
    yield data[: data.size // 2]
    raise Killed


def test_a_write_that_is_torn_leaves_the_copy_before_it():
    data = np.arange(1000).astype(np.uint8)
    with Slots.made() as slots:
        assert slots.kept() == []
        with pytest.raises(Killed):
            slots.write({"step": 1}, half_of(data))
        assert slots.kept() == []
        for step in (1, 2):
            slots.write({"step": step}, [data[step:], data[:step]])
        with pytest.raises(TypeError, match="not JSON serializable"):
            slots.write({"step": 3, "note": np.float32(1)}, [data])
        assert sorted(k.header["step"] for k in slots.kept()) == [1, 2]
        for _ in range(3):  # again and again over the older one
            with pytest.raises(Killed):
                slots.write({"step": 3}, half_of(data))
            (kept,) = Slots(slots.files).kept()  # as the next process finds them
            assert kept.header == {"step": 2}
            np.testing.assert_array_equal(slots.bytes_of(kept), np.roll(data, -2))
        # The next process goes on from that copy, and its first write leaves it alone.
        later = Slots(slots.files)
        later.keep(kept)
        later.write({"step": 3}, [data[:10]])
        assert sorted(k.header["step"] for k in later.kept()) == [2, 3]
        shorter = max(later.kept(), key=lambda k: k.header["step"])
        np.testing.assert_array_equal(later.bytes_of(shorter), data[:10])
        later.write({"step": 4}, [])
        newest = max(later.kept(), key=lambda k: k.header["step"])
        assert later.bytes_of(newest).size == 0


def test_a_file_descriptor_of_something_else_is_refused(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setenv(VARIABLE, f"{file.fileno()},{file.fileno()}")
        with pytest.raises(ValueError, match="is not a supervisor's memory"):
            Copies()


# --- One process ----------------------------------------------------------------------------------


def test_a_process_finds_what_another_one_has_saved(monkeypatch):
    mesh = mesh_of(8)
    tree = {
        "split": jax.device_put(jnp.arange(48.0).reshape(16, 3), NamedSharding(mesh, P("data"))),
        "low": jax.device_put(jnp.arange(5, dtype=jnp.bfloat16), NamedSharding(mesh, P())),
        "key": jax.random.key(3), "flag": np.bool_(True), "nothing": np.empty((0, 4), np.float32),
    }  # fmt: skip
    fresh = jax.tree.map(lambda x: x, tree) | {"low": jnp.zeros(7, jnp.bfloat16)}
    with Slots.made() as slots:
        monkeypatch.setenv(VARIABLE, slots.environment[VARIABLE])
        copies = Copies()
        assert copies.restore(tree) is None
        assert copies.save(4, tree, {"losses": [1.5]}) == 4 * 48 + 2 * 5 + 8 + 1
        copies.save(5, tree | {"flag": np.bool_(False)})
        with pytest.raises(ValueError, match=r"step=-1: give a number from 0"):
            copies.save(-1, tree)
        copy = Copies().restore(tree)
        assert (copy.step, copy.note, copy.state["flag"]) == (5, None, False)
        assert copy.state["split"].sharding == tree["split"].sharding
        assert copy.state["key"] == tree["key"]
        assert_same_bits(
            [copy.state[name] for name in ("split", "low", "nothing")],
            [tree[name] for name in ("split", "low", "nothing")],
        )
        # A leaf of another shape comes as it was.
        assert Copies().restore(fresh).state["low"].shape == (5,)
        with pytest.raises(ValueError, match=r"5 leaves and this state 4, which differ in flag"):
            Copies().restore({name: x for name, x in tree.items() if name != "flag"})
    monkeypatch.delenv(VARIABLE)
    assert Copies().save(1, tree) == 0  # without a supervisor nothing is kept
    assert Copies().restore(tree) is None


# --- Hosts ----------------------------------------------------------------------------------------


def hosts_of(folder, n, optimizer, *options, steps=8, seconds=0.2, devices=1):
    """Supervisors of ``n`` hosts with `copies_worker`, which no disk helps."""
    command = [sys.executable, "-u", WORKER, str(folder), optimizer, str(steps), str(seconds)]
    flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_NUMPY_RANK_PROMOTION": "allow"}
    options = "--silence", "2", "--wait", "2", *options
    return Supervised(folder, n, *options, command=command, env=env)


def reached(hosts, i):
    """The step that host i has told last, -1 before the first."""
    told = re.findall(r"^step (\d+)$", hosts.said(i), re.MULTILINE)
    return int(told[-1]) if told else -1


def losses(folder):
    return json.loads((folder / "losses.json").read_text())


def begun(hosts, i):
    """[(hosts, step)] of all starts that host i has seen."""
    words = [line.split() for line in hosts.said(i).splitlines() if " hosts begin after " in line]
    return [(int(line[0]), int(line[-1])) for line in words]


def test_a_host_that_lost_its_memory_goes_on_from_its_neighbours(tmp_path):
    """Each of two hosts has half of the masters, of which the other one has a copy."""
    with hosts_of(tmp_path, 2, "sharded", steps=12) as hosts:
        hosts.start()
        hosts.until(lambda: reached(hosts, 0) >= 4, 60)
        hosts.processes[1].kill()
        hosts.start(1)
        assert hosts.statuses(seconds=60) == [0, 0]
    (first, after) = begun(hosts, 0)
    assert begun(hosts, 1)[-1] == after
    assert first == (2, 0)
    assert after[0] == 2
    assert after[1] >= 4
    expected = []
    with jax.numpy_dtype_promotion("standard"):  # as in the processes
        params, opt_state, step = copies_worker.training("sharded", mesh_of(2))
        for number in range(12):
            batch = copies_worker.batch(mesh_of(2), number)
            params, opt_state, loss = step(params, opt_state, batch)
            expected.append(float(loss))
    np.testing.assert_allclose(losses(tmp_path), expected, rtol=1e-5)
