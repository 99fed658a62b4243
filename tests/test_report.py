"""`dynamiq-jax report`: what it reads, warns of and writes. A release runs it on two hosts."""

import json
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_cli import plain, ran, refused
from workers import auto_mesh

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import all_reduce
from dynamiq_jax.commands.report import command, hosts, network, steps

pytestmark = pytest.mark.usefixtures("keep_xla_flags")

HEAD = "worker-1:71:80 [0] NCCL INFO "
LOGS = {
    "sockets": (
        "NET/IB : No device found.\nNET/Socket : Using [0]eth0:10.7.0.1<0>\n"
        "Using network Socket\n"
        "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
        "Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/1\n"
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n",
        ["Socket"], {"NET/Socket": 2, "P2P": 1}, True,
    ),
    "InfiniBand": (
        "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\nAssigned NET plugin IB to comm\n"
        "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0(1)/GDRDMA\n",
        ["IB"], {"NET/IB": 1}, False,
    ),
    "EFA": (
        "Using network AWS Libfabric\nRing 00 : 7 -> 8 [receive] via NET/AWS Libfabric/0\n",
        ["AWS Libfabric"], {"NET/AWS Libfabric": 1}, False,
    ),
    "one host": (
        "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n", [], {"SHM": 1}, False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_the_log_says_which_network_and_links_nccl_took(name):
    text, networks, connections, without = LOGS[name]
    found = network.read("".join(f"{HEAD}{line}\n" for line in text.splitlines()))
    expected = {"networks": networks, "connections": connections, "no_infiniband": without}
    assert found == expected


def process(number=0, **own):
    """The facts of a process."""
    facts = {
        "host": number, "process": number, "devices": 1, "kind": "H200", "slices": [number],
        "nvlink": False, "slow_by_choice": None, "rdma": [], "nics": {}, "variables": {},
        "network": {"networks": ["IB"], "connections": {"NET/IB": 4}, "no_infiniband": False},
    }  # fmt: skip
    return facts | dict.fromkeys(hosts.VERSIONS, "1.2.3") | own


SOCKETS = {"networks": ["Socket"], "connections": {"NET/Socket": 2}, "no_infiniband": False}
NOTHING = {"networks": [], "connections": {}, "no_infiniband": False}
CARD = [{"device": "mlx5_0", "kind": "InfiniBand", "rate": "400 Gb/sec"}]
CASES = [
    ({}, []),
    ({"rdma": CARD}, []),
    ({"network": SOCKETS}, []),
    ({"network": SOCKETS, "rdma": CARD}, ["took sockets", "InfiniBand: its log says why"]),
    (
        {"network": SOCKETS, "rdma": CARD, "variables": {"NCCL_IB_DISABLE": "1"}},
        ["took sockets", "environment has NCCL_IB_DISABLE=1"],
    ),
    ({"network": NOTHING, "variables": {"NCCL_DEBUG": "WARN"}}, ["NCCL_DEBUG=WARN, does not tell"]),
    ({"network": NOTHING, "nccl": None}, []),
    ({"slow_by_choice": "NCCL_P2P_DISABLE=1"}, ["NCCL_P2P_DISABLE=1 keeps NCCL from the NVLink"]),
]


@pytest.mark.parametrize(("own", "words"), CASES)
def test_a_network_that_is_not_expected_is_a_warning(own, words):
    facts = [process(0, **own), process(1, **own)]
    found = network.warnings(facts, [facts[0]["network"]] * 2)
    assert len(found) == bool(words)
    assert all(word in found[0] and found[0].endswith("(processes 0, 1)") for word in words)


def test_processes_that_differ_are_named():
    facts = [process(0, variables={"NCCL_HOSTID": "a"}), process(1, jax="0.12.0")]
    facts[1]["variables"] = {"NCCL_HOSTID": "b", "NCCL_NSOCKS_PERTHREAD": "4"}
    assert command.warnings({"processes": facts, "all_reduces": [], "steps": []}) == [
        "processes differ in the variable NCCL_NSOCKS_PERTHREAD: None (process 0), 4 (process 1)",
        "processes differ in jax: 1.2.3 (process 0), 0.12.0 (process 1)",
    ]


def test_users_say_what_nccl_logs_and_where(monkeypatch, tmp_path):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    network.ask_for_log(tmp_path)
    own = tmp_path / os.path.basename(os.environ["NCCL_DEBUG_FILE"])
    own.write_text("mine")
    assert (os.environ["NCCL_DEBUG"], network.own_log()) == ("INFO", "mine")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "theirs.%h.%p"))
    network.ask_for_log(tmp_path)
    for pid, text in ((os.getpid(), "of this process"), (1, "of another")):
        (tmp_path / f"theirs.host7.{pid}").write_text(text)
    assert (os.environ["NCCL_DEBUG"], network.own_log()) == ("WARN", "of this process")


def test_active_cards_are_found(monkeypatch, tmp_path):
    files = {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "infiniband/mlx5_2/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_2/ports/1/link_layer": "Ethernet\n",
        "infiniband/rdmap0/ports/1/state": "4: ACTIVE\n",
        "infiniband/rdmap0/device/vendor": "0x1d0f\n",
        "net/eth0/speed": "25000\n",
        "net/eth0/operstate": "up\n",
        "net/eth0/device/vendor": "0x15b3\n",
        "net/veth/speed": "10000\n",
        "net/veth/operstate": "up\n",
        "net/eth1/speed": "-1\n",
        "net/eth1/operstate": "up\n",
        "net/eth1/device/vendor": "0x15b3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hosts, "SYS", tmp_path)
    ports = {port["device"]: (port["kind"], port["rate"]) for port in hosts.rdma_ports()}
    assert ports == {
        "mlx5_0": ("InfiniBand", "400 Gb/sec"), "mlx5_2": ("RoCE", ""), "rdmap0": ("EFA", "")
    }  # fmt: skip
    assert hosts.nic_rates() == {"eth0": "25 Gb/s"}


def test_the_driver_is_that_of_the_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "DRIVER", tmp_path / "version")
    assert hosts.driver_version() is None
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    hosts.DRIVER.write_text(text + "GCC version: gcc 13.2.0\n")
    assert hosts.driver_version() == "570.124.06"


def devices_of(platform, slices, processes):
    return [
        SimpleNamespace(platform=platform, slice_index=s, process_index=p)
        for s, p in zip(slices, processes, strict=True)
    ]


@pytest.mark.parametrize(
    ("slices", "processes", "nodes"),
    [
        ([0] * 4, [0] * 4, 1),
        ([0, 1], [0, 1], 1),
        ([0, 0, 1, 1], [0, 1, 2, 3], 2),
        ([None] * 4, [0, 0, 1, 1], 2),
        ([0, 0, 1], [0, 0, 1], 1),
    ],
)
def test_several_hosts_of_several_gpus_are_two_axes(slices, processes, nodes):
    assert command.nodes_of(devices_of("gpu", slices, processes)) == nodes


def test_bits_of_one_device_that_differ_are_seen():
    mesh = auto_mesh(4)
    own = [np.arange(6, dtype=np.float32) for _ in range(4)]
    own[2][3] = np.nextafter(np.float32(3), np.float32(4))
    placed = [jax.device_put(x, d) for x, d in zip(own, mesh.devices.flat, strict=True)]
    whole = jax.make_array_from_single_device_arrays((6,), NamedSharding(mesh, P()), placed)
    found = steps.hashes_of(mesh, [whole])
    assert [found.count(text) for text in found] == [3, 3, 1, 3]


ROW = {"time_us": 2e3, "p10_us": 1e3, "p90_us": 3e3, "speedup": 1.5}
DATA = {"size_bytes": 2**20, "method": "dynamiq:5 direct", "busbw_gb_per_s": 1.0, "vnmse": 0.01}


def test_a_report_is_a_page_and_what_it_was_made_from(monkeypatch, tmp_path):
    """And its warnings come from the rows."""

    def reduced(sizes, ours, *, repeats, **_):
        told = {"wire_gb_per_s": 1.0, "wire_bytes": 7, "n_workers": 8, "iterations": 1}
        told |= DATA | ROW | {"size_bytes": sizes[0], "wrong": 9}
        row = all_reduce.AllReduceRow(**told, backend="jnp", transport="xla")
        assert ours[0].label == row.method and repeats == command.MOST
        return [row]

    def trained(mesh, model, rounds):
        calls = [lambda: None] * 4
        assert (mesh.size, model, rounds(calls)) == (8, steps.SMALL, command.MOST)
        told = {"sent_bytes": 5e6, "steps": 7, "loss": 0.25}
        return [
            steps.StepRow(**ROW, **told, way=way, hashes=hashes)
            for way, hashes in (("bf16 psum", ("aa",) * 8), ("ours", ("aa",) * 7 + ("bb",)))
        ]

    monkeypatch.setattr(all_reduce, "bench_all_reduce", reduced)
    monkeypatch.setattr(steps, "bench_steps", trained)
    out = tmp_path / "new" / "folder"
    shown = ran("report", "--out", out, "--sizes", "1MiB,2MiB").stdout
    page, found = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert page in shown and "CPU devices: a check" in page
    assert [row["size_bytes"] for row in found["all_reduces"]] == [2**20, 2**21]
    assert [row["way"] for row in found["steps"]] == ["bf16 psum", "ours"]
    assert found["processes"][0]["jax"] == jax.__version__ and found["mesh"] == [8]
    assert os.uname().nodename not in json.dumps(found)
    many = "by dynamiq:5 direct: 9 coordinates are not the same bits on all workers"
    few = "ours: parameters are not the same bits on all workers"
    assert found["warnings"] == [f"all-reduce of {size} {many}" for size in ("1MiB", "2MiB")] + [
        few
    ]
    assert all(f"* {text}\n" in page for text in found["warnings"])
    times = "| bf16 psum | 2 | 1 to 3 | 1.50 | 5 | 0.2500 after 7 steps |"
    assert f"{times} aa on all 8 workers |\n| ours |" in page
    assert f"| jax | {jax.__version__} |" in page and "`dq.psum` goes by Direct" in page


def test_sizes_that_take_too_long_are_left_out(monkeypatch):
    seen = []

    def slow(sizes, *_, repeats, **__):
        seen.append((sizes[0], repeats))
        told = dict.fromkeys(all_reduce.AllReduceRow.__dataclass_fields__, 0)
        return [all_reduce.AllReduceRow(**told | {"time_us": 1e5 * sizes[0] / 2**20})]

    monkeypatch.setattr(all_reduce, "bench_all_reduce", slow)
    mesh = all_reduce.make_mesh(jax.devices())
    sizes = [2**24, 2**20, 2**21]
    rows, left_out = command.all_reduces(mesh, sizes, None, 30.0)
    assert seen == [(2**20, 20), (2**21, command.LEAST)] and len(rows) == 2
    (line,) = left_out
    assert line.startswith("16MiB was left out: it would take about 77 s, more than the 30 s")


def test_what_cannot_run_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "--out" in refused("report", "--out", tmp_path / "file")
    assert "--sizes" in refused("report", "--out", tmp_path, "--sizes", "3")
    monkeypatch.setattr(jax, "devices", lambda: [jax.local_devices()[0]])
    assert "1 device found" in plain(refused("report", "--out", tmp_path))


def test_commands_take_the_variables_of_hosts(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *told: joined.append(told))
    told = {"COORDINATOR": "10.0.0.1:29400", "NUM_HOSTS": "2", "HOST_ID": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    options.join(None, 0, "localhost:29400")
    options.join(4, 3, "localhost:29401")
    monkeypatch.delenv("NUM_HOSTS")
    options.join(None, 0, "localhost:29400")
    assert joined == [("10.0.0.1:29400", 2, 1), ("localhost:29401", 4, 3)]
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    options.join(None, 0, "localhost:29400")
    assert joined[2:] == [()]


def test_the_parameters_of_the_standard_model_are_counted():
    model = steps.Model(blocks=1, width=4, hidden=8, rows=2)
    params = jax.eval_shape(model.init)
    assert sum(x.size for x in jax.tree.leaves(params)) == model.parameters
    assert steps.Model().parameters == 268_435_456
