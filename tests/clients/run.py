"""Trainers of others, natively and with our patch, for 20 steps on 8 virtual CPU devices.

    python tests/clients/run.py CLIENT PATH/TO/CHECKOUT [--variant NAME] [--seed N]

    python benchmarks/hosts.py --hosts 2 --rate 25gbit --gpus 1 -- \
      python tests/clients/run.py nanodo CHECKOUT --variant DP --gpus --only native BF16 "5 bits"

The path is a checkout of the client's repository at the commit that its module names. The trainer
runs three times, each in a process of its own and from a copy of its files: as it is, with our
patch and the exact method `dq.F32`, and with our patch and 5 bits. Its data set is random, its
model is small; its loss, state, shardings and step are its own. Prints for every run the loss of
the last step, the bytes that one device sends per step and holds of the state, and whether all
copies of the state are equal; README.md has the figures. ``--gpus`` takes the GPUs of this machine
or of all hosts, and a model of their size, of clients whose ``train`` takes ``large``; it tells
milliseconds instead of bytes. All is said as it comes, so that a run that is stopped leaves what it
has found: seconds from the run's start to the first and second batch and the end of the first step,
milliseconds of every later step, a run's line, and the row of the runs until then. Runs on GPUs
share a folder of compiled programs (``JAX_COMPILATION_CACHE_DIR``, if it is set), by which later
ones start faster.

Needs flax, optax, orbax-checkpoint and ml_collections. Not part of the library's tests.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

STEPS = 20
TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS)]  # in place of this folder, whose modules have names of clients'

CLIENTS = sorted(
    file.stem
    for file in Path(__file__).parent.glob("*.py")
    if file.stem not in ("run", "client", "stubs")
)
ON_CPU = ["native", "F32", "5 bits"]
METHODS = {
    "native": None,
    "F32": "dq.Compression(dq.F32()OWN)",
    "BF16": "dq.Compression(dq.BF16()OWN)",
    "5 bits": "dq.Compression(dq.DynamiQ(), min_bucket_bytes=0OWN)",
    "5 + 8 bits": "dq.Policy(gradients=dq.Compression(dq.DynamiQ(), min_bucket_bytes=0OWN), "
    "parameters=dq.DynamiQ(bits=8))",
}
"""Runs and their ``compression``; OWN becomes what a client excludes."""


def main() -> int:
    """Runs a client three times and prints its row of the table; 1 if a run fails."""
    parser = argparse.ArgumentParser(description="A trainer of others, natively and with ours.")
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("checkout", type=Path, help="a checkout of the client's repository")
    parser.add_argument("--variant", help="one of the client's variants")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--only", choices=METHODS, nargs="+", default=ON_CPU, help="some runs")
    parser.add_argument("--gpus", action="store_true", help="a larger model, on GPUs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    module = importlib.import_module(f"clients.{options.client}")
    if options.child:
        _train(module, module.VARIANTS[options.variant], options)
        return 0
    failed = False
    for variant in [options.variant] if options.variant else module.VARIANTS:
        client = module.VARIANTS[variant]
        title = f"{options.client}, {variant}"
        print(f"\n{title}: {client.repository} {client.commit[:10]}", flush=True)
        found: dict[str, dict] = {}
        for run in options.only:
            result = _run(options, variant, client, run)
            if result:
                found[run] = result
                _report(title, client, found, options.gpus or len(found) == len(options.only))
        failed |= len(found) < len(options.only)
    return int(failed)


def _run(options: argparse.Namespace, variant: str, client, run: str) -> dict | None:
    """Trains in a process of its own, from a copy of the trainer's files; `None` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy = root / "checkout"
        ignore = shutil.ignore_patterns("__pycache__", "*.ipynb")
        shutil.copytree(options.checkout / client.folder, copy / client.folder, ignore=ignore)
        client.apply(client.setting, copy)
        method = METHODS[run]
        if method:
            own = f", exclude={client.exclude!r}" if client.exclude else ""
            method = method.replace("OWN", own)
        n_lines = client.apply(client.patch, copy, method) if method else 0
        flags = "--xla_force_host_platform_device_count=8 --xla_dump_hlo_as_text"
        flags += f" --xla_dump_to={root / 'dump'} --xla_dump_hlo_module_re={client.step}"
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}"}
        command = [sys.executable, __file__, options.client, str(options.checkout)]
        command += ["--seed", str(options.seed), "--variant", variant, "--child", folder]
        if options.gpus:
            command, own = [*command, "--gpus", "--run", run], _cache_of_programs()
        if subprocess.run(command, env=os.environ | own, check=False).returncode:
            return None
        return {"lines": n_lines, **json.loads((root / "result").read_text())}


def _cache_of_programs() -> dict[str, str]:
    """The variables by which runs of this machine share programs and what autotuning found.

    JAX has the first of several hosts write; the others read it where they share a disk.
    """
    folder = str(Path(tempfile.gettempdir()) / "dynamiq_jax_clients")
    names = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    return {name: os.environ.get(name, own) for name, own in zip(names, (folder, "0"), strict=True)}


def _report(title: str, client, found: dict[str, dict], with_row: bool) -> None:
    """Prints what the last run gave, and the client's row of the table as far as it is known."""
    run, result = list(found.items())[-1]
    first = next(iter(found.values()))
    copies = "equal" if result["equal"] else "DIFFER"
    kept = "kept" if result["shardings"] == first["shardings"] else "CHANGED"
    print(
        f"{run}: {result['losses'][0]:.6f} to {result['losses'][-1]:.6f}, copies {copies}, "
        f"shardings {kept}, compiled in {result['compile_s']:.1f} s, "
        f"state of {result['state_mb']:.2f} MB",
        flush=True,
    )
    if not with_row:
        return
    lines = max(result["lines"] for result in found.values())
    losses = " / ".join(f"{result['losses'][-1]:.4f}" for result in found.values())
    sent = " / ".join(result["sent"] for result in found.values())
    compiled = " / ".join(f"{result['compile_s']:.1f}" for result in found.values())
    print(
        "|", " | ".join([title, client.mesh, str(lines), losses, sent, compiled]), "|", flush=True
    )


def _train(module, client, options: argparse.Namespace) -> None:
    """Trains in this process, and writes what came of it."""
    from clients import stubs
    from hlo import sent_bytes

    started = time.time()
    root, stubs.SEED = options.child, options.seed
    own = root / "checkout" / client.folder
    sys.path.insert(0, str(own.parent if client.package else own))
    seconds = _compile_seconds(client.step)
    if options.gpus:
        from dynamiq_jax.commands.options import join

        join(None, 0, "localhost:29400")
        stubs.Batches.tell = staticmethod(functools.partial(_tell, options.run, started))
    trained = module.train(STEPS, **client.options, **({"large": True} if options.gpus else {}))
    if options.gpus:
        sent = f"{_step_ms(stubs.Batches.asked_at):.0f} ms"
    else:
        programs = sorted((root / "dump").glob(f"*.{client.step}.*after_optimizations.txt"))
        sent = f"{sent_bytes(programs[-1].read_text(), 8) / 1e6:.2f}"
    result = {
        "losses": [float(loss) for loss in trained.losses],
        "sent": sent,
        "equal": _copies_equal(trained.state),
        "shardings": _shardings(trained.params),
        "state_mb": _bytes_of_a_device(trained.state) / 1e6,
        "compile_s": sum(seconds.values()),
    }
    (root / "result").write_text(json.dumps(result))


def _tell(run: str, started: float, asked_at: list[float]) -> None:
    """Says how far the run is: a trainer asks for a batch when the step before last has ended."""
    import jax

    if jax.process_index():
        return
    number, seconds = len(asked_at) - 1, asked_at[-1] - started
    said = {0: "the first batch", 1: "the second batch", 2: "the end of the first step"}
    if number < len(said):
        print(f"{run}: {seconds:.1f} s to {said[number]}", flush=True)
    else:
        last, median = (asked_at[-1] - asked_at[-2]) * 1e3, _step_ms(asked_at)
        print(f"{run}: batch {number}, {last:.0f} ms, median {median:.0f} ms", flush=True)


def _step_ms(asked_at: list[float]) -> float:
    """The median milliseconds of the later half of the steps, none of them the first two."""
    taken = [(b - a) * 1e3 for a, b in itertools.pairwise(asked_at)][2:]
    return statistics.median(taken[len(taken) // 2 :])


def _compile_seconds(step: str) -> dict[str, float]:
    """The seconds that tracing, lowering and compiling the step takes, by event, once it ran."""
    import jax

    found: dict[str, float] = {}
    bare = lambda name: re.sub(r"\W+", "_", name).removeprefix("jit_").strip("_")

    def listen(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if bare(fun_name) == bare(step):
            found[event] = found.get(event, 0.0) + seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


def _shardings(tree: Any) -> list[str]:
    """The shape that each device holds of every array."""
    import jax

    return [str(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]


def _bytes_of_a_device(tree: Any) -> int:
    """The bytes that one device holds of all arrays."""
    return sum(x.addressable_data(0).nbytes for x in _arrays(tree))


def _arrays(tree: Any) -> list[Any]:
    """The arrays of a tree that are no keys."""
    import jax

    leaves = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return [x for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]


def _copies_equal(tree: Any) -> bool:
    """Whether all devices that hold the same part of an array hold the same bits of it.

    Of several processes, those of arrays that all hold whole.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    arrays = _arrays(tree)
    if jax.process_count() > 1:
        own = [_checksum(x.addressable_data(0)) for x in arrays if x.is_fully_replicated]
        found = multihost_utils.process_allgather(np.array(own, np.uint32))
        return bool((found == found[0]).all())
    first: dict = {}
    return all(
        first.setdefault((number, str(shard.index)), bits) == bits
        for number, x in enumerate(arrays)
        for shard in x.addressable_shards
        for bits in [_checksum(shard.data)]
    )


def _checksum(x: Any) -> int:
    """A hash of the bits of one device's array; a GPU forms it: gigabytes take long to get here."""
    import jax
    import numpy as np

    if next(iter(x.devices())).platform == "cpu":
        return zlib.crc32(np.asarray(x).tobytes())
    return int(jax.jit(_sum_of_bits)(x))


def _sum_of_bits(x: Any) -> Any:
    """The sum modulo 2 ** 32 of an array's elements as integers, each times an odd number."""
    import jax.numpy as jnp

    bits = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


if __name__ == "__main__":
    sys.exit(main())
