"""Hosts for which all others wait are named."""

import os
import sys

import pytest
from processes import KEPT, coordinator, outputs

from dynamiq_jax.hosts import pace


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ([0.1, 0.1, 0.1], []),
        ([0.1, 0.19, 0.1], []),  # less than a tenth of a step of 1 s
        ([0.1, 0.21, 0.1], [1]),
        ([0.5, 0.1, 0.4, 0.1, 0.1], [0, 2]),
        ([0.4, 0.1, 0.5, 0.1, 0.1], [2, 0]),  # the slowest first
        ([0.1, 0.5], [1]),  # the median of two is the faster one
        ([0.1, 9, 9, 9], []),  # one is fast
        ([3.0], []),
    ],
)
def test_the_slow_ones_are_those_that_cost_a_share_of_a_step(own, slow):
    told = [(seconds, 1.0, f"host{process}") for process, seconds in enumerate(own)]
    found = pace._slow(told, 0.1)
    assert [(s.process, s.host, s.seconds) for s in found] == [
        (i, f"host{i}", own[i]) for i in slow
    ]


def test_one_process_has_nobody_to_wait_for():
    assert pace.slow_hosts(1.0, 1.0) == []


PROCESS = """
import socket, sys
import jax
address, me, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, me)
socket.gethostname = lambda: "gpu-" + str(me) + "-" * 300
from dynamiq_jax.hosts import slow_hosts
for slow in slow_hosts([0.1, 0.1234567890123456789, 0.75][me], 1.0):
    print(slow)
"""


@pytest.mark.release
def test_all_processes_name_the_same():
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    address = coordinator()
    commands = [[sys.executable, "-c", PROCESS, address, str(i), "3"] for i in range(3)]
    line = "is slow: its own work takes 0.75 s, that of others 0.123 s"
    for said, _ in outputs(commands, env):
        (told,) = [text for text in said.splitlines() if "slow" in text]
        assert told.startswith("process 2 (gpu-2---") and told.endswith(line)
