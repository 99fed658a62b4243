"""The house: few frames from `psum` to its collective, few climbs, wings whose imports go down."""

import ast
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases import CHEAP
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.request.compression

ROOT = Path(dq.__file__).parent
MOST_FRAMES, MOST_CLIMBS, MOST_FLOORS = 9, 2, 12


@functools.cache
def wing(file) -> str | None:
    """The folder, or the file, right below the package; `None` for a file elsewhere."""
    path = Path(file)
    return path.relative_to(ROOT).parts[0].removesuffix(".py") if ROOT in path.parents else None


def trace(reduce):
    """Traces ``reduce`` of one worker's tree, among 8 workers; nothing comes out of a cache."""
    jax.clear_caches()
    tree = {"a": jnp.ones((8, 300)), "b": jnp.ones((8, 17))}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"mesh": mesh, "in_specs": P("data"), "out_specs": P()}
    jax.make_jaxpr(jax.shard_map(reduce, **options))(tree)


def psum(tree):
    """Over `Direct`, whose first step is an all-to-all."""
    return dq.psum(tree, "data", method=CHEAP, topology=dq.Direct())


def test_a_psum_takes_few_frames_to_its_collective(monkeypatch):
    found, all_to_all = [], jax.lax.all_to_all

    def spy(*args, **options):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if wing(frame.f_code.co_filename) is not None:
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.append(names[::-1])
        return all_to_all(*args, **options)

    monkeypatch.setattr(jax.lax, "all_to_all", spy)
    trace(psum)
    assert found and found[0][0] == "psum"
    assert max(map(len, found)) <= MOST_FRAMES, max(found, key=len)


def imported(file: Path) -> set[str]:
    """The wings that a file imports, but for those that types alone need."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == ROOT.name:
            modules |= {f"{ROOT.name}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write the whole name of the module"
            modules.add(node.module)
    known = {path.stem for path in ROOT.iterdir()}
    parts = [[*module.split("."), ""] for module in modules]
    found = {part[1] if part[1] in known else "__init__" for part in parts if part[0] == ROOT.name}
    return found - {wing(file)}


def floors() -> dict[str, int]:
    """The floor of every wing: one above the highest that it imports."""
    imports: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        imports.setdefault(wing(file), set()).update(imported(file))
    found: dict[str, int] = {}
    while len(found) < len(imports):
        ready = [name for name in imports.keys() - found if imports[name] <= found.keys()]
        cycle = {name: sorted(imports[name] - found.keys()) for name in imports.keys() - found}
        assert ready, f"wings import each other: {cycle}"
        found |= {name: 1 + max((found[low] for low in imports[name]), default=0) for name in ready}
    return found


def test_wings_import_downwards_over_few_floors():
    found = floors()
    assert max(found.values()) <= MOST_FLOORS, found


def test_a_psum_climbs_rarely():
    """Executors call a method's codec, which encodes and decodes; no other function is called from
    a lower wing."""
    above, climbs, calls = floors(), set(), set()

    def watch(frame, event, _):
        to = wing(frame.f_code.co_filename) if event == "call" else None
        if to is None:
            return
        caller = frame.f_back
        while caller is not None and wing(caller.f_code.co_filename) is None:
            caller = caller.f_back
        if caller is None:
            return
        start = wing(caller.f_code.co_filename)
        call = start, to, frame.f_code.co_qualname
        calls.add(call)
        if above[start] < above[to]:
            climbs.add(call)

    sys.setprofile(watch)
    try:
        trace(psum)
    finally:
        sys.setprofile(None)
    assert ("executors", "core", "Axis.all_to_all") in calls
    assert len(climbs) <= MOST_CLIMBS, climbs


@pytest.mark.parametrize("metrics", [False, True])
def test_leaves_are_grouped_once(monkeypatch, metrics):
    group, calls = dynamiq_jax.request.compression.group_leaves, []

    def spy(leaves, **options):
        calls.append(leaves)
        return group(leaves, **options)

    monkeypatch.setattr(dynamiq_jax.request.compression, "group_leaves", spy)
    trace(lambda tree: dq.reduce(tree, "data", method=CHEAP, metrics=metrics)[::2])
    assert len(calls) == 1
