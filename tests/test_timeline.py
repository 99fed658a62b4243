"""The table of a step's milliseconds, from programs compiled here and from traces made by hand."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timeline
import typer
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import mesh_of


def test_which_collectives_cross_hosts():
    """Two hosts of two devices: one axis crosses, the other does not; permutes by their pairs."""
    mesh = mesh_of(2, 2, names=("host", "gpu"))

    def f(x):
        inside = lax.psum(x, "gpu")
        across = lax.all_gather(jnp.tanh(inside), "host")
        swapped = lax.ppermute(jnp.sin(x), "gpu", [(0, 1), (1, 0)])
        far = lax.ppermute(jnp.cos(x), "host", [(0, 1), (1, 0)])
        return inside + across.sum() + swapped + lax.psum(far[:3].sum(), ("host", "gpu"))

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(("host", "gpu")), out_specs=P(("host", "gpu")))
    text = jax.jit(mapped).lower(jnp.ones((64, 16))).compile().as_text()
    found = timeline.collectives_of(text, 2)
    rows = 16 * 16 * 4  # bytes of one device's part
    kinds = sorted((x["crosses"], x["bytes"]) for x in found.values())
    assert kinds == [(False, rows), (False, rows), (True, 4), (True, rows), (True, 2 * rows)]


def test_asynchronous_collectives_have_the_facts_of_what_they_call():
    """As XLA prints programs for GPUs."""
    text = """
%async_computation.3 (param.1: bf16[2,8]) -> bf16[2,8] {
  ROOT %all-reduce.1 = bf16[2,8]{1,0} all-reduce(%param.1), replica_groups={{0,2},{1,3}}
}

ENTRY %main (p: bf16[2,8]) -> bf16[2,8] {
  %psum.7.1 = ((bf16[2,8]{1,0}), bf16[2,8]{1,0}) async-start(%p), calls=%async_computation.3
}
"""
    found = timeline.collectives_of(text, 2)
    assert found == dict.fromkeys(("all-reduce.1", "psum.7.1"), {"crosses": True, "bytes": 32})


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['host'=2,'gpu'=2] {'gpu'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['host'=2,'gpu'=2] {'host'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['host'=2,'gpu'=2] {'host','gpu'}, x", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,2},{2,0}}, x", [[0, 2], [2, 0]]),
        ("replica_groups={}, x", []),
    ],
)
def test_groups(line, groups):
    assert timeline._groups(line) == groups


def trace(path, events, steps=3):
    """A trace of equal steps of 10 ms; events are (name, op, start ms, ms).

    The host copies the numbers of all steps ahead of the first one.
    """
    found = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}}]
    for step in range(steps):
        copied = ("MemcpyH2D", "", 0.1 * step - 10 * step - 1, 0.01)
        for name, op, start, ms in [copied, *events]:
            ts, args = (10 * step + start) * 1e3, {"hlo_op": op}
            found.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": 7,
                    "ts": ts,
                    "dur": ms * 1e3,
                    "name": name,
                    "args": args,
                }
            )
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": found}, file)


def test_kinds_of_a_step(tmp_path):
    """Overlapping events count once; of 10 ms, 4 have a payload."""
    way = tmp_path / "zero-pipeline-5"
    way.mkdir()
    events = [
        ("fusion", "f.1", 0, 3),
        ("matmul", "f.2", 2, 2),
        ("ncclDevKernel_AllReduce", "all-reduce-start.1", 2, 1),
        ("ncclDevKernel_SendRecv", "ppermute.3", 3, 3),
        ("ncclDevKernel_ReduceScatter", "rs.1", 6, 0.5),
        ("ncclDevKernel_AllGather", "unknown.9", 8.5, 1),
    ]
    trace(way / "host0.trace.json.gz", events)
    known = {
        "all-reduce.1": {"crosses": True, "bytes": 1000},
        "ppermute.3": {"crosses": True, "bytes": 10**8},
        "rs.1": {"crosses": False, "bytes": 10**8},
    }
    (way / timeline.COLLECTIVES).write_text(json.dumps(known))
    (step,) = timeline.read_folder(tmp_path).values()
    busy = [step.busy(kind) for kind in timeline.KINDS]
    np.testing.assert_allclose([step.ms, *busy], [9.5, 4, 4, 1, 0.5])
    row = timeline.table({"zero": step}).splitlines()[-1]
    assert row == "| zero | 9.5 | 4.0 | 4.0 | 1.0 | 0.5 | 4.0 | 5.5 |"
    timeline.main([tmp_path], tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000


def test_labels_stand_in_the_place_of_ways(tmp_path, capsys):
    folders = [tmp_path / "zero-dear-5", tmp_path / "runs"]
    for way in (folders[0], folders[1] / "dp-5"):
        way.mkdir(parents=True)
        trace(way / "host0.trace.json.gz", [("fusion", "f.1", 0, 3)])
        (way / timeline.COLLECTIVES).write_text("{}")

    def names():
        lines = capsys.readouterr().out.splitlines()[2:]
        return [line.split(" | ")[0].removeprefix("| ") for line in lines]

    timeline.main(folders)
    assert names() == ["zero-dear-5", "runs, dp-5"]
    timeline.main(folders, labels=["deferred", "data parallel"])
    assert names() == ["deferred", "data parallel"]
    with pytest.raises(typer.BadParameter, match="1 labels for 2 steps"):
        timeline.main(folders, labels=["deferred"])


@pytest.mark.parametrize(
    ("events", "said"), [([], "no GPU computes"), ([("f", "f.1", 0, 1)], "one step")]
)
def test_a_trace_without_gpus_or_with_one_step_is_refused(events, said, tmp_path):
    path = tmp_path / "a.trace.json.gz"
    trace(path, events, steps=1)
    with pytest.raises(ValueError, match=said):
        timeline.read_step(path, {})
