"""Runs every example, page, recipe and command of the pages on GPUs, and prints what ran.

    make test-gpu-pages
    python tests/gpu/run_pages.py --only recipe --limit 60

Rows of one process have all GPUs. Rows of two hosts run by `benchmarks/hosts.py` with one GPU each;
they need two GPUs and root. Without a GPU all of it runs on virtual CPU devices. A row is printed
when it ends: its status, its seconds, and the last line that it wrote if it failed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
sys.path.append(str(ROOT / "benchmarks"))

import hosts  # pyright: ignore[reportMissingImports]
import typer
from test_recipes import NAMES, PRINTED, RECIPES, START, blocks

OF_CPU = re.compile(r'^os\.environ\["XLA_FLAGS"\] = .*\n', re.MULTILINE)
JOIN = "import hosts\n\nhosts.join_hosts()\n"
EXAMPLES = {
    "quickstart.py": [],
    "four_hosts.py": ["run"],
    "train_llm.py": ["--model", "tiny", "--steps", "5"],
    "train_zero.py": ["--steps", "5"],
    "train_fsdp.py": ["--steps", "5"],
    "train_moe.py": ["--steps", "5"],
    "train_local_steps.py": ["--steps", "20"],
    "train_multihost.py": ["--steps", "5"],
}
"""Programs of `examples/` with options for a short run. `finetune_hf.py` needs a model's files."""
COMMANDS = {
    "explain": ["explain", "1M", "--workers", "16", "--rate", "25gbit"],
    "error": ["error", "--methods", "dynamiq:5", "--seeds", "1"],
    "simulate": ["simulate", "--workers", "16"],
    "bench all-reduce": ["bench", "all-reduce", "--sizes", "4MiB", "--repeats", "2"],
    "advise": ["advise", "1M", "--step-time-ms", "180"],
}
ON_HOSTS = {"four_hosts.py": ["run"], "train_multihost.py": ["--steps", "5"]}
"""Examples that find the other hosts by the variables that `hosts.py` and the supervisor set."""


class Row(NamedTuple):
    """What runs: a kind, a name, the words behind ``python``, and the code of a page."""

    kind: str
    name: str
    words: list[str]
    code: str = ""
    hosts: int = 1


def of_pages(n_hosts: int) -> list[Row]:
    """Every page whose blocks follow each other, and every recipe with those that it continues."""
    experts, islands = blocks("docs/experts-and-islands.md")
    found = {f"page {page}": "".join(blocks(page)) for page in ("README.md", "docs/quickstart.md")}
    found |= {"page docs/faq.md": "".join(blocks("docs/faq.md")), "page experts": experts}
    found["page islands"] = islands
    chains = [*(names for names, *_ in PRINTED), ["jit"], ["checkpoint"], ["budget"]]
    for names in chains:
        recipes = [RECIPES[NAMES.index(name)] for name in names]
        found[f"recipe {', '.join(names)}"] = "".join([START, *recipes])
    rows = []
    for title, code in found.items():
        kind, name = title.split(" ", 1)
        # `hosts.py` sets XLA_FLAGS, which a page would replace.
        own = JOIN + OF_CPU.sub("", code) if n_hosts > 1 else code
        rows.append(Row(kind, name, [], own, n_hosts))
    return rows


def rows() -> list[Row]:
    """All of them."""
    found = [Row("example", n, [str(ROOT / "examples" / n), *more]) for n, more in EXAMPLES.items()]
    found += [Row("command", n, ["-m", "dynamiq_jax", *more]) for n, more in COMMANDS.items()]
    found += of_pages(1)
    for name, more in ON_HOSTS.items():
        found.append(Row("example", name, [str(ROOT / "examples" / name), *more], hosts=2))
    return found + of_pages(2)


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, without JAX, which would take their memory."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ")


def why_no_hosts(gpus: int) -> str | None:
    """The reason why two hosts cannot be made here, if there is one."""
    if gpus == 1:
        return "two hosts of one GPU need 2 GPUs, this machine has 1"
    try:
        hosts.check_machine()
    except hosts.Unavailable as error:
        return str(error)
    return None


def run(row: Row, gpus: int, limit: int, folder: Path) -> tuple[int, str]:
    """The exit status, and the last line that was written; it is 124 after the time limit."""
    words = row.words
    if row.code:
        (folder / "page.py").write_text(row.code)
        words = ["page.py"]
    command = [sys.executable, *words]
    if row.hosts > 1:
        devices = ["--gpus", "1"] if gpus else ["--devices", "1"]
        made = [str(ROOT / "benchmarks" / "hosts.py"), "--hosts", str(row.hosts), *devices]
        command = [sys.executable, *made, "--", *command]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not gpus and row.hosts == 1:
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # `hosts.py` ends its hosts on this signal
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = 124
    lines = log.read_text(errors="replace").strip().splitlines()
    return status, lines[-1].strip() if lines else ""


def main(
    only: Annotated[str, typer.Option(help="a regular expression of 'hosts kind name'")] = "",
    limit: Annotated[int, typer.Option(min=1, help="seconds of a row")] = 180,
) -> None:
    """Prints a row for everything that ran, and ends with 1 if one failed."""
    gpus, failed, not_run = count_gpus(), 0, 0
    without = why_no_hosts(gpus)
    print(f"{gpus} GPUs" if gpus else "no GPU: virtual CPU devices")
    print(f"{'hosts':5}  {'rc':>7}  {'s':>5}  what")
    for row in rows():
        what = f"{row.kind} {row.name}"
        if not re.search(only, f"{row.hosts} {what}"):
            continue
        if row.hosts > 1 and without:
            not_run += 1
            print(f"{row.hosts:5}  not run  {'':5}  {what}: {without}", flush=True)
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            status, last = run(row, gpus, limit, Path(folder))
        failed += status != 0
        told = f": {last[:200]}" if status else ""
        seconds = time.monotonic() - start
        print(f"{row.hosts:5}  {status:7}  {seconds:5.0f}  {what}{told}", flush=True)
    print(f"{failed} failed, {not_run} not run")
    raise typer.Exit(int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
