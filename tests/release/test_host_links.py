"""Links between hosts: bytes and times of topologies."""

import json
import os
import subprocess
import sys

import host_links
import hosts
import jax.numpy as jnp
import pytest
from processes import ENVIRONMENT
from test_hosts import needs_hosts

import dynamiq_jax as dq

SLOWEST = {"ring": 1.2, "direct": 1.2, "butterfly": 1.5, "hierarchical": 1.5}
"""Times over those of the bytes; processes take turns where two of them exchange messages."""
COMPUTATION = 1.5
"""Seconds of four hosts on two cores that others use, too."""


def run_on_hosts(folder, n, devices, rate, *command):
    words = ["--hosts", n, "--devices", devices, "--rate", rate, "--logs", folder, "--", *command]
    done = subprocess.run(
        [sys.executable, hosts.__file__, *map(str, words)], env=os.environ | ENVIRONMENT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def links(folder, n, devices, rate):
    """Rows of host_links.py by topology."""
    file = folder / "rows.json"
    options = ["--rate", rate, "--out", file]
    run_on_hosts(folder, n, devices, rate, sys.executable, host_links.__file__, *options)
    rows = {row["topology"]: row for row in json.loads(file.read_text())}
    assert set(rows) == set(host_links.TOPOLOGIES)
    return rows


@pytest.mark.parametrize("name", host_links.TOPOLOGIES)
def test_single_devices_send_all_that_explain_counts(name):
    size = 64 * 256 * 64
    told, as_f32 = host_links.explained(name, size, 4, 1)
    cost = dq.explain(
        jnp.zeros(size), host_links.axis_sizes(name, 4, 1), method=host_links.METHOD,
        topology=host_links.TOPOLOGIES[name], verbose=False,
    )  # fmt: skip
    assert told == cost.wire_bytes < as_f32


@needs_hosts
def test_links_of_four_hosts_carry_the_bytes_explained_in_their_time(tmp_path):
    for name, row in links(tmp_path, 4, 1, "3mbit").items():
        assert 1 <= row["sent MB"] / row["as f32 MB"] < 1.08, row
        assert 0.9 * row["wire s"] < row["s"], row
        assert row["s"] < SLOWEST[name] * row["wire s"] + COMPUTATION, row


@needs_hosts
def test_links_of_hosts_with_two_devices_carry_the_bytes_explained(tmp_path):
    for row in links(tmp_path, 2, 2, "1gbit").values():
        assert 1 <= row["sent MB"] / row["as f32 MB"] < 1.05, row
        assert row["sent MB"] / row["explained MB"] < 1.05, row
