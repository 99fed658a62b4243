"""`dynamiq-jax report` on two hosts: what it measures there, and what it writes."""

import json
import sys

import hosts
import pytest
from hosts import Hosts
from test_hosts import needs_hosts

SIZE = "128KiB"


@needs_hosts
@pytest.mark.parametrize(("devices", "mesh"), [(1, [2]), (2, [2, 2])])
def test_two_hosts_write_one_report(tmp_path, devices, mesh):
    """All ways learn alike, bf16 ZeRO-1 exactly as bf16 psum; bytes are those that they send."""
    out, n = tmp_path / "out", 2 * devices
    command = [sys.executable, "-m", "dynamiq_jax", "report", "--out", str(out / "%i")]
    with Hosts(2, devices=devices) as made:
        ended = hosts.run(made, [*command, "--sizes", SIZE, "--seconds", "5"], tmp_path)
    assert ended == [0, 0], (tmp_path / "host0.log").read_text()[-3000:]
    assert not [*(out / "1").glob("report.*")]
    found, page = json.loads((out / "0/report.json").read_text()), out / "0/report.md"
    assert (found["mesh"], found["warnings"], found["left_out"]) == (mesh, [], [])
    told = [(own["process"], own["host"], own["devices"]) for own in found["processes"]]
    assert told == [(0, 0, devices), (1, 1, devices)]
    native, ours = found["all_reduces"]
    assert ours["vnmse"] < 0.02 and ours["wrong"] == native["wrong"] == 0
    least = 0.35 if devices == 1 else 0.8  # within a host gradients travel in bf16
    assert ours["wire_bytes"] < least * native["wire_bytes"]
    psum, five, zero, sharded = found["steps"]
    assert len({row["steps"] for row in found["steps"]}) == 1 and psum["steps"] >= 7
    assert zero["loss"] == pytest.approx(psum["loss"], rel=1e-3)
    for row in (five, sharded):
        assert 0 < abs(row["loss"] - psum["loss"]) < 0.05 * psum["loss"]
        assert row["sent_bytes"] < least * psum["sent_bytes"]
    for row in found["steps"]:
        assert row["loss"] < 1.0 and row["hashes"] == [row["hashes"][0]] * n
    assert f"on all {n} workers" in page.read_text()
