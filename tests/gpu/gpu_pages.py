"""Runs the pages' blocks of Python and commands, recipes and examples, on this machine's devices.

    make test-gpu-pages
    python tests/gpu/gpu_pages.py --only 'recipe (hsdp|grid)' --limit 60
    python tests/gpu/gpu_pages.py --cpu 2  # virtual devices in the place of GPUs

A row is run in one process of all devices; rows of hosts on two hosts of one GPU, made by
``benchmarks/hosts.py``. Each has a line once it has ended: its status, seconds, and its last words.
The status is 0, an exit status, "late" after the limit, or "-" for a row that cannot run here. The
exit status is 1 if a row failed.
"""

import argparse
import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
VIRTUAL = re.compile(r"xla_force_host_platform_device_count=8")
PAIRS = re.compile(r"\(-1, 2|\(2, -1|size // 2|_count\(\) // 2")
"""Meshes of recipes that take an even number of devices."""

EXAMPLES = {
    "quickstart.py": [[]],
    "one_gpu.py": [["runs/one"]],
    "four_hosts.py": [["runs/four"]],
    "train_llm.py": [["--steps", "20", "--compare"]],
    "train_fsdp.py": [["--steps", "20", "--compare"]],
    "train_scanned.py": [["--way", "deferred", "--steps", "20", "--compare"]],
    "train_zero.py": [["--steps", "20", "--compare"]],
    "train_moe.py": [["--steps", "20", "--exact"]],
    "train_local_steps.py": [["--steps", "20"]],
    "train_multihost.py": [
        ["--steps", "20", "--coordinator", "localhost:29417", "--num-processes", "1",
         "--process-id", "0", "--checkpoint-dir", "run"]
    ],
    "finetune_hf.py": [
        ["make-tiny", "tiny"],
        ["train", "tiny", "tiny/train.jsonl", "--steps", "20", "--out", "tuned"],
    ],
}  # fmt: skip
"""The arguments of each example's calls, which follow each other in one folder."""

HOSTS = {
    "four_hosts.py": ["shared"],
    "train_multihost.py": ["--steps", "20", "--checkpoint-dir", "shared"],
}
"""Arguments of examples on two hosts, where each has a process."""


COMMANDS = re.compile(
    r"dynamiq-jax (bench|explain|error|advise|simulate) .*-"
    r"|python (benchmarks/(coding_kernels|step_time|crossover)\.py|examples/train_\w+\.py|-$)"
)
"""Commands of pages that run in one process, and how they begin; others are for hosts."""
WRITES = re.compile(
    r"--(json|write|gradients|measured)|\.json|FILE|NAME|--workers N|-ms$|10\.0\.0\."
)
"""Patterns that stand for files, numbers or hosts of the reader, and commands that leave files."""


class Row(NamedTuple):
    """Commands of one row of the table, or the reason why they do not run."""

    name: str
    commands: list[list[str]]
    """Called one after the other, in a folder of their own."""
    code: str = ""
    """The text of ``block.py`` in this folder."""
    reason: str = ""
    """Why it cannot run here."""


class Machine(NamedTuple):
    """The devices that rows find."""

    count: int
    virtual: bool


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def pages() -> dict[str, str]:
    """The blocks of a page, which follow each other."""
    found = {"README.md": "README.md", "quickstart.md": "docs/quickstart.md"}
    return {name: "".join(blocks(path)) for name, path in found.items()}


def missing(code: str) -> str:
    """Modules that a program imports and that are not installed here."""
    names = set()
    found = {file.stem for file in (ROOT / "examples" / "recipes").glob("*.py")}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return ", ".join(sorted(name for name in names - found if find_spec(name) is None))


def commands() -> Iterator[Row]:
    """The commands of pages that a machine with GPUs can run, once each."""
    if lacks := ", ".join(name for name in ("pytest", "typer") if find_spec(name) is None):
        yield Row("commands", [], "", f"needs {lacks}")
        return
    sys.path[:0] = [
        str(ROOT / folder) for folder in ("tests", "benchmarks", "benchmarks/evidence", ".")
    ]
    from test_commands_in_docs import PAGES, found_in

    seen = set()
    for page in PAGES:
        for command in found_in((ROOT / page).read_text()):
            text = " ".join(command.words)
            if not COMMANDS.match(text) or WRITES.search(text):
                continue
            program, *args = command.words
            if args == ["-"]:
                called = ["block.py"]
            elif program == "dynamiq-jax":
                called = ["-m", "dynamiq_jax", *args]
            else:
                called = [str(ROOT / args[0]), *args[1:]]
            if (text, command.code) not in seen:
                seen.add((text, command.code))
                yield Row(f"{page}: {text}", [[sys.executable, *called]], command.code)


def rows(machine: Machine) -> Iterator[Row]:
    """Every row for a machine, those that cannot run there with the reason."""
    for name, code in pages().items():
        reason = f"needs {lacks}" if (lacks := missing(code)) else ""
        command = [sys.executable, "block.py"]
        yield Row(name, [command], code, reason)
    for file in sorted((ROOT / "examples" / "recipes").glob("*.py")):
        code = file.read_text()
        reason = f"needs {lacks}" if (lacks := missing(code)) else ""
        if PAIRS.search(code) and machine.count % 2:
            reason = f"needs an even number of devices, here are {machine.count}"
        if file.stem != "start":
            yield Row(f"recipe {file.stem}", [[sys.executable, str(file)]], "", reason)
    for name, calls in EXAMPLES.items():
        file = ROOT / "examples" / name
        reason = f"needs {lacks}" if (lacks := missing(file.read_text())) else ""
        yield Row(f"example {name}", [[sys.executable, str(file), *c] for c in calls], "", reason)
    yield from commands()
    kind = "--devices" if machine.virtual else "--gpus"
    hosts = [sys.executable, str(ROOT / "benchmarks/hosts.py"), "--hosts", "2", kind, "1", "--"]
    for name, args in HOSTS.items():
        reason = "" if machine.count > 1 else f"needs 2 devices, here is {machine.count}"
        script = [sys.executable, str(ROOT / "examples" / name), *args]
        yield Row(f"two hosts {name}", [[*hosts, *script]], "", reason)


class Ended(NamedTuple):
    """How a row ended."""

    status: str
    seconds: float
    last: str


def run(row: Row, machine: Machine, limit: float) -> Ended:
    """Runs the commands of a row in a new folder; ends them, and all they started, at the limit."""
    if row.reason:
        return Ended("-", 0.0, row.reason)
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "MPLBACKEND": "agg"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    start, status, said = time.monotonic(), "0", ""
    with tempfile.TemporaryDirectory() as folder:
        code = row.code
        if machine.virtual:
            count = f"xla_force_host_platform_device_count={machine.count}"
            env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--{count}"}
            code = VIRTUAL.sub(count, code)
        Path(folder, "block.py").write_text(code)
        for command in row.commands:
            rest = limit - (time.monotonic() - start)
            status, said = call(command, folder, env, rest)
            if status != "0":
                break
    lines = [line for line in said.splitlines() if line.strip()] or [""]
    return Ended(status, time.monotonic() - start, lines[-1].strip())


def call(command: list[str], folder: str, env: dict[str, str], limit: float) -> tuple[str, str]:
    """The status of a command and what it said."""
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(limit, 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # hosts.py takes its namespaces away
        try:
            said, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        return "late", said
    return str(process.returncode), said


def devices(virtual: int | None) -> Machine:
    """The GPUs of this machine, or so many virtual devices."""
    if virtual:
        return Machine(virtual, virtual=True)
    ask = "import jax; print(jax.default_backend(), jax.device_count())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    backend, count = done.stdout.split()[-2:]
    if backend == "cpu":
        sys.exit("JAX finds no GPU on this machine: pass --cpu 2 for two virtual devices")
    return Machine(int(count), virtual=False)


def main() -> None:
    """Reads the options, runs the rows and prints their table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression of rows' names")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a row")
    parser.add_argument("--jobs", type=int, default=4, help="rows at a time")
    parser.add_argument("--cpu", type=int, help="virtual devices in the place of GPUs")
    args = parser.parse_args()
    machine = devices(args.cpu)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]
    wanted = [row for row in rows(machine) if re.search(args.only, row.name)]
    print(f"{machine.count} devices{', virtual' if machine.virtual else ''}, {len(wanted)} rows")
    failed, left_out, width = 0, 0, max(len(row.name) for row in wanted)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(run, row, machine, args.limit): row for row in wanted}
        for job in as_completed(jobs):
            ended = job.result()
            failed += ended.status not in ("0", "-")
            left_out += ended.status == "-"
            line = f"{ended.status:>4} {ended.seconds:6.1f}  {jobs[job].name:{width}}"
            print(f"{line}  {ended.last[:160]}", flush=True)
    ran = len(wanted) - left_out
    print(f"{ran - failed} of {ran} rows ran, {failed} failed, {left_out} cannot run here")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
