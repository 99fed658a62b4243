"""Commands of several processes, started as the pages start them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release
ROOT = Path(__file__).resolve().parents[2]
LEAST = ["--sizes", "64KiB", "--repeats", "1", "--iterations", "1", "--methods", "dynamiq:5"]


def environment():
    """One CPU device for each process."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": paths, "PYTHON": sys.executable}
    return {**os.environ, **own}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_all_reduces_of_two_processes():
    """Methods are parsed after the processes have joined: parsing asks for devices."""
    command = [sys.executable, "-m", "dynamiq_jax", "bench", "all-reduce", "--processes", "2"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", *LEAST]
    started = [
        subprocess.Popen(
            [*command, "--process-id", str(i)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "2 process(es)" in said[0]
    assert "dynamiq" in said[0]


def test_the_script_of_several_processes(tmp_path):
    """As on a machine with two GPUs; CPU devices stand in."""
    command = ["benchmarks/all_reduce_processes.sh", "2", "halves", *LEAST, "--topology", "direct"]
    own = {**environment(), "OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("psum of one bf16 leaf") == 2
    assert (tmp_path / "halves_shm.json").stat().st_size > 100
