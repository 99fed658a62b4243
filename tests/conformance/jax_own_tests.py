"""JAX's own tests of collectives, with ours in the place of `jax.lax`'s.

    python tests/conformance/jax_own_tests.py PATH/TO/jax

The path is a checkout of JAX's source at the tag of the installed version. It runs the tests of
`FILES` whose source mentions a collective, three times: with `jax.lax`'s collectives; with ours as
they are, where small arrays travel exactly; and with every floating leaf of a psum or pmean sent
through our own all-reduce, as f32. Tests that call no collective, or fail with `jax.lax`'s, do not
count. Prints a table, and every test that fails with its error; docs/api.md says which
differ on purpose.

Needs absl-py, as JAX's tests do. Not part of the library's tests.
"""

import argparse
import ast
import collections
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = ("psum", "pmean", "psum_scatter", "all_gather")
FILES = ("tests/pmap_test.py", "tests/shard_map_test.py")
RUNS = {
    "lax": "jax.lax",
    "default": "dynamiq_jax",
    "all": "dynamiq_jax, every leaf through its all-reduce",
}


def main() -> int:
    """Runs the tests in processes of their own and prints the table; 1 if a test fails."""
    parser = argparse.ArgumentParser(description="JAX's own tests, with our collectives.")
    parser.add_argument("checkout", type=Path, help="a checkout of JAX's source")
    checkout = parser.parse_args().checkout.resolve()
    files = [checkout / file for file in FILES]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        parser.error(f"{missing[0]} does not exist; pass the folder of a checkout of JAX's source")
    found = {run: _results(run, files) for run in RUNS}
    counted = [
        test
        for test, result in found["lax"].items()
        if result["outcome"] == "passed" and result["called"]
    ]
    failures = collections.defaultdict(list)
    print("\n| file | tests |", " | ".join(list(RUNS.values())[1:]), "|\n|---|---|---|---|")
    for file in files:
        own = [test for test in counted if test.startswith(f"{file.name}::")]
        cells = []
        for run in list(RUNS)[1:]:
            failed = [t for t in own if found[run].get(t, {}).get("outcome") != "passed"]
            failures[run] += failed
            cells.append(f"{len(own) - len(failed)} pass, {len(failed)} fail")
        print(f"| `{file.name}` | {len(own)} |", " | ".join(cells), "|")
    for run, tests in failures.items():
        print(f"\nFail with {RUNS[run]}:" if tests else f"\nAll pass with {RUNS[run]}.")
        for test in tests:
            print(f"  {test.split('::', 1)[1]}: {found[run].get(test, {}).get('error', 'not run')}")
    return int(any(failures.values()))


def _results(run: str, files: list[Path]) -> dict[str, dict]:
    """Outcome, collectives called and last line of the error of every test that ran."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results"
        flags = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
        own = {"CONFORMANCE_RUN": run, "CONFORMANCE_OUT": str(out), "XLA_FLAGS": flags}
        path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["--import-mode=importlib", "-p", Path(__file__).stem]
        command += ["--rootdir", folder, "-c", os.devnull, "-W", "ignore", *map(str, files)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | own
        print(f"{RUNS[run]}:", flush=True)
        subprocess.run(command, cwd=folder, env=env, check=False)
        lines = out.read_text().splitlines() if out.exists() else []
    if not lines:
        raise SystemExit(f"no test ran with {RUNS[run]}: see pytest's output above")
    return {result["test"]: result for result in map(json.loads, lines)}


# What follows runs in pytest's process, of which this file is a plugin.

called: set[str] = set()
"""The collectives that the test at hand has called."""


def pytest_configure(config):
    """Puts our collectives where tests look for them."""
    run = os.environ["CONFORMANCE_RUN"]
    import jax

    import dynamiq_jax as dq

    native = types.SimpleNamespace(**vars(jax.lax))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("dynamiq_jax", "pallas_kernels") and hasattr(module, "lax"):
            module.lax = native  # what our collectives call themselves
    limits = {"min_leaf_size": 1, "min_bucket_size": 1}
    every_leaf = {"compression": dq.Compression(dq.F32(), topology=dq.Direct(), **limits)}
    for name in COLLECTIVES:
        chosen = getattr(jax.lax if run == "lax" else dq, name)
        options = every_leaf if run == "all" and name in ("psum", "pmean") else {}
        setattr(jax.lax, name, _noted(name, functools.partial(chosen, **options), chosen))


def _noted(name, collective, signature):
    @functools.wraps(signature)
    def noting(*args, **options):
        called.add(name)
        return collective(*args, **options)

    return noting


def pytest_collection_modifyitems(items):
    """Keeps the tests whose source mentions a collective."""
    mentions = functools.cache(_tests_with_collectives)
    items[:] = [item for item in items if mentions(item.path)(item.originalname or item.name)]


def _tests_with_collectives(file: Path):
    """Whether a test of this name does; parameterised tests have longer names."""
    source = file.read_text()
    wanted = re.compile(rf"\b({'|'.join(COLLECTIVES)})\(")
    tests = {
        node.name: bool(wanted.search(ast.get_source_segment(source, node) or ""))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }

    def mentioned(name: str) -> bool:
        known = [test for test in tests if name.startswith(test)]
        return bool(known) and tests[max(known, key=len)]

    return mentioned


def pytest_runtest_setup(item):
    """Starts the list of calls anew."""
    called.clear()


def pytest_runtest_makereport(item, call):
    """Writes one line for every test."""
    if call.when != "call":
        return
    error, outcome = "", "passed"
    if call.excinfo is not None:
        outcome = "skipped" if call.excinfo.typename == "SkipTest" else "failed"
        first = (str(call.excinfo.value).strip().splitlines() or [""])[0]
        error = f"{call.excinfo.typename}: {first}"[:300]
    test = f"{item.path.name}::{item.nodeid.split('::', 1)[1]}"
    result = {"test": test, "outcome": outcome, "called": sorted(called), "error": error}
    with Path(os.environ["CONFORMANCE_OUT"]).open("a") as out:
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
