"""Trainers of others, natively and with our patch, for 20 steps on 8 virtual CPU devices.

    python tests/clients/run.py CLIENT PATH/TO/CHECKOUT [--variant NAME] [--steps N] [--seed N]

The path is a checkout of the client's repository at the commit that its module names. The trainer
runs three times, each in a process of its own and from a copy of its files: as it is, with our
patch and the exact method `dq.F32`, and with our patch and 5 bits. Its data set is random, its
model is small; its loss, state, shardings and step are its own. Prints the patch, and for every run
the loss of the last step, the bytes that one device sends per step, the largest array of a native
all-reduce, and whether all copies of the state are equal; README.md has the figures.

Needs flax, optax, orbax-checkpoint and ml_collections. Not part of the library's tests.
"""

import argparse
import difflib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS)]  # in place of this folder, whose modules have names of clients'

CLIENTS = sorted(
    file.stem
    for file in Path(__file__).parent.glob("*.py")
    if file.stem not in ("run", "client", "measure", "stubs")
)
METHODS = {
    "native": None,
    "F32": "dq.Compression(dq.F32())",
    "5 bits": "dq.Compression(dq.DynamiQ(), min_bucket_bytes=0)",
}


def main() -> int:
    """Runs a client three times and prints its row of the table; 1 if a run fails."""
    parser = argparse.ArgumentParser(description="A trainer of others, natively and with ours.")
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("checkout", type=Path, help="a checkout of the client's repository")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variant", help="one of the client's variants")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--only", choices=METHODS, nargs="+", help="some of the three runs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    module = importlib.import_module(f"clients.{options.client}")
    variants = [options.variant] if options.variant else list(module.VARIANTS)
    if options.child:
        _train(module, module.VARIANTS[options.variant], options)
        return 0
    failed = False
    for variant in variants:
        client = module.VARIANTS[variant]
        print(f"\n{options.client}, {variant}: {client.repository} {client.commit[:10]}")
        _check_commit(options.checkout, client.commit)
        runs = options.only or METHODS
        found = {run: _run(options, variant, client, run) for run in runs}
        _report(options.client, variant, client, found)
        failed |= any("error" in result for result in found.values())
    return int(failed)


def _check_commit(checkout: Path, commit: str) -> None:
    """Says if the checkout is at another commit; a folder without git is taken as it is."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if commit and told.returncode == 0 and told.stdout.strip() != commit:
        print(f"the checkout is at {told.stdout.strip()}, the patch is for {commit}")


def _run(options: argparse.Namespace, variant: str, client, run: str) -> dict:
    """Trains in a process of its own, from a copy of the trainer's files."""
    from clients.client import apply

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source, copy = options.checkout / client.folder, root / "checkout" / client.folder
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
        apply(client.setting, root / "checkout")
        method = METHODS[run]
        if method and client.exclude:
            method = f"{method[:-1]}, exclude={client.exclude!r})"
        n_lines = apply(client.patch, root / "checkout", method) if method else 0
        flags = "--xla_force_host_platform_device_count=8 --xla_dump_hlo_as_text"
        flags += f" --xla_dump_to={root / 'dump'} --xla_dump_hlo_module_re={client.step}"
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}"}
        command = [sys.executable, __file__, options.client, str(options.checkout)]
        command += ["--steps", str(options.steps), "--seed", str(options.seed)]
        command += ["--variant", variant, "--child", folder]
        done = subprocess.run(command, env=os.environ | own, check=False)
        if done.returncode:
            return {"error": done.returncode}
        return {"lines": n_lines, **json.loads((root / "result").read_text())}


def _report(name: str, variant: str, client, found: dict[str, dict]) -> None:
    """Prints the patch, what every run gave, and the client's row of the table."""
    for change in client.patch:
        lines = difflib.ndiff(*(text.strip("\n").splitlines() for text in change[1:]))
        print("\n".join(f"    {line}" for line in lines if line[0] in "+-"))
    for run, result in found.items():
        if "error" in result:
            print(f"{run}: failed, see above")
            continue
        first, last = result["losses"][0], result["losses"][-1]
        print(
            f"{run}: loss {first:.6f} to {last:.6f} in {len(result['losses'])} steps, "
            f"{result['megabytes']:.3f} MB sent per step {result['by']}, largest native "
            f"all-reduce {result['largest']}, copies {'equal' if result['equal'] else 'DIFFER'}"
        )
    cells = [f"{name}, {variant}", client.mesh]
    cells.append(str(max(result.get("lines", 0) for result in found.values())))

    def all_of(of) -> str:
        return " / ".join("-" if "error" in result else of(result) for result in found.values())

    cells.append(all_of(lambda result: f"{result['losses'][-1]:.4f}"))
    cells.append(all_of(lambda result: f"{result['megabytes']:.2f}"))
    print("|", " | ".join(cells), "|", flush=True)


def _train(module, client, options: argparse.Namespace) -> None:
    """Trains in this process, and writes what came of it."""
    from clients import measure, stubs

    root, stubs.SEED = options.child, options.seed
    folder = root / "checkout" / client.folder
    here = folder if (folder.is_dir() and not (folder / "__init__.py").exists()) else folder.parent
    sys.path.insert(0, str(here))
    trained = module.train(options.steps, **client.options)
    program = measure.program_of(root / "dump", client.step)
    sent, largest = measure.traffic(program)
    result = {
        "losses": [float(loss) for loss in trained.losses],
        "megabytes": sum(sent.values()) / 1e6,
        "by": {name: round(n / 1e6, 3) for name, n in sorted(sent.items())},
        "largest": largest,
        "equal": measure.copies_equal(trained.state),
    }
    (root / "result").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
