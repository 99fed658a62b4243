"""The house: a call runs few files and climbs rarely, wings import downwards, functions are short
and take few arguments."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from cases import CHEAP, over
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import auto_mesh, mesh_of

import dynamiq_jax as dq
import dynamiq_jax.compression.compression
import pallas_kernels as pk

ROOT = Path(dq.__file__).parent
ROOTS = ROOT, Path(pk.__file__).parent
WRITTEN = *ROOTS, *(ROOT.parent / name for name in ("benchmarks", "examples", "tests"))
OPENING = re.compile(r'^\s*r?"""(Of|Those|What|The same|Likewise)\b', re.MULTILINE)
MOST_CLIMBS, MOST_FLOORS = 5, 10
MOST_LINES, MOST_ARGUMENTS = 60, 7


CACHED = type(functools.cache(len))

PASSES_ON = "former"
"""The file whose functions pass calls on to those of now; it goes with the former names."""


@functools.cache
def wing(file) -> str | None:
    """The folder, or the file, right below the package; `None` for a file elsewhere."""
    path = Path(file)
    return path.relative_to(ROOT).parts[0].removesuffix(".py") if ROOT in path.parents else None


def forget():
    """Empties the caches of JAX and ours, so that all that a call needs runs again."""
    jax.clear_caches()
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in (dq.__name__, pk.__name__):
            cached = [x for x in vars(module).values() if isinstance(x, CACHED)]
            for function in cached:
                function.cache_clear()


def trace(reduce):
    """Traces ``reduce`` of one worker's tree, among 8 workers; nothing comes out of a cache."""
    forget()
    tree = {"a": jnp.ones((8, 300)), "b": jnp.ones((8, 17))}
    mapped = jax.shard_map(reduce, mesh=auto_mesh(), in_specs=P("data"), out_specs=P())
    jax.make_jaxpr(mapped)(tree)


def psum(tree):
    """Over `Direct`, whose first step is an all-to-all."""
    return dq.psum(tree, "data", compression=over(dq.Direct(), CHEAP))


EXPLICIT = mesh_of(8, kind=AxisType.Explicit)
W, X = jnp.ones((64, 24)), jnp.ones((16, 64))
OPTIONS = {"axis_name": "data", "compression": dataclasses.replace(CHEAP, topology=dq.Direct())}


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def gradients_of(loss, spec):
    """Traces gradients of every worker's own loss, inside a map."""
    options = {"mesh": auto_mesh(), "in_specs": (spec, P("data")), "out_specs": spec}
    jax.make_jaxpr(jax.shard_map(jax.grad(loss), **options))(W, X)


def on_auto(**specs):
    jax.make_jaxpr(dq.value_and_grad(loss, mesh=auto_mesh(), **specs, **OPTIONS))(W, X)


def on_explicit(loss=loss, axes=(), **options):
    with jax.set_mesh(EXPLICIT):
        f = dq.value_and_grad(loss, **options, **OPTIONS)
        jax.make_jaxpr(f)(jax.reshard(W, P(*axes)), jax.reshard(X, P("data")))


def pipeline():
    functions = [lambda w, x: jnp.tanh(x @ w), lambda _, x: jnp.sum(x)]
    gradients_of(lambda w, x: dq.overlapped(functions, [w, {}], x, **OPTIONS), P())


def fsdp():
    options = OPTIONS | {"specs": P("data")}
    gradients_of(lambda w, x: loss(dq.fsdp(w, **options), x), P("data"))


def sharded_updates():
    policy = dq.Policy(gradients=OPTIONS["compression"], parameters=CHEAP)
    optimizer = dq.optax.sharded(optax.sgd(1.0), **OPTIONS | {"compression": policy})
    update = lambda g, w: optimizer.update(g[0], optimizer.init(w), w)[0]
    options = {"mesh": auto_mesh(), "in_specs": (P("data"), P()), "out_specs": P()}
    jax.make_jaxpr(jax.shard_map(update, **options))(jnp.ones((8, *W.shape)), W)


def fsdp_on_explicit():
    layers = lambda w, x: loss(dq.fsdp(w, **OPTIONS), x)
    on_explicit(layers, ["data"], ungathered=True)


WAYS = {
    "psum": (lambda: trace(psum), 22), "gradients on Auto axes": (on_auto, 30),
    "gradients on Explicit axes": (on_explicit, 30), "overlapped": (pipeline, 28),
    "FSDP": (fsdp, 24),
    "FSDP by value_and_grad on Auto axes": (functools.partial(on_auto, specs=P("data")), 31),
    "FSDP by value_and_grad on Explicit axes": (fsdp_on_explicit, 32),
    "sharded updates": (sharded_updates, 28),
}  # fmt: skip
"""Functions that trace a way, and the most files of ours that they may run."""


def files_of(run) -> list[str]:
    """The files of both packages in which a function of ``run()`` runs, their kernels included."""
    seen = set()

    def watch(frame, event, _):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    forget()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    packages = ROOT.parent
    return sorted(
        str(Path(file).relative_to(packages))
        for file in seen
        if is_ours(file) and wing(file) != PASSES_ON
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("padding_is_free")
def test_a_way_runs_few_files(way):
    """To read how a psum travels, open these; `pytest -rP -k runs_few_files` prints them."""
    run, most = WAYS[way]
    found = files_of(run)
    print(f"{way}: {len(found)} files\n  " + "\n  ".join(found))
    assert "dynamiq_jax/engine/run.py" in found
    assert len(found) <= most, found


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
    """The storey of every wing: one above the highest storey that it imports."""
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


def test_the_core_needs_no_kernels():
    """But for the hash, whose one home is beside the kernels that draw noise by it."""
    own = re.compile(r"^\s*((?:import|from) pallas_kernels.*)", re.MULTILINE)
    files = (ROOT / "core").rglob("*.py")
    assert {line for file in files for line in own.findall(file.read_text())} == {
        "from pallas_kernels import mix"
    }


def test_training_does_not_need_the_supervisor_of_hosts():
    """Only the command and the package's own lazy names import `hosts`."""
    users = {wing(file) for file in ROOT.rglob("*.py") if "hosts" in imported(file)}
    assert users == {"commands"}


@functools.cache
def is_ours(file: str) -> bool:
    """Whether a file is of one of both packages."""
    return any(root in Path(file).parents for root in ROOTS)


@functools.cache
def calls_of_a_psum() -> list[tuple[str | None, str, str]]:
    """Calls in their order, each once: the file of ours that calls, the file, and the function."""
    calls = {}

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if event != "call" or not is_ours(file):
            return
        caller = frame.f_back
        while caller is not None and wing(caller.f_code.co_filename) in (None, PASSES_ON):
            caller = caller.f_back
        start = None if caller is None else caller.f_code.co_filename
        calls[start, file, frame.f_code.co_qualname] = None

    sys.setprofile(watch)
    try:
        trace(psum)
    finally:
        sys.setprofile(None)
    return [*calls]


@pytest.mark.usefixtures("padding_is_free")
def test_a_psum_runs_as_the_page_for_builders_says():
    """Its table names functions of a psum in the order in which they are first called."""
    page = (ROOT.parent / "BUILD.md").read_text().partition("\n## How a psum runs\n")[2]
    rows = re.findall(r"^\| `(\S+\.py)` \| `(\S+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    calls = [
        (str(Path(file).relative_to(ROOT.parent)), name) for _, file, name in calls_of_a_psum()
    ]
    assert len(rows) > 20 and not {*rows} - {*calls}
    assert rows == sorted(rows, key=calls.index)


@pytest.mark.usefixtures("padding_is_free")
def test_a_psum_climbs_rarely():
    """Executors call a method's codec, which encodes and decodes, and the engine the three
    functions of a rule; no other function is called from a lower wing."""
    above = floors()
    calls = {
        (wing(start), wing(file), name)
        for start, file, name in calls_of_a_psum()
        if start is not None and wing(file) is not None
    }
    climbs = {(start, to, name) for start, to, name in calls if above[start] < above[to]}
    assert ("topologies", "core", "Axis.all_to_all") in calls
    assert len(climbs) <= MOST_CLIMBS, climbs


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.usefixtures("padding_is_free")
def test_leaves_are_grouped_once(monkeypatch, metrics):
    group, calls = dynamiq_jax.compression.compression.group_leaves, []

    def spy(leaves, **options):
        calls.append(leaves)
        return group(leaves, **options)

    monkeypatch.setattr(dynamiq_jax.compression.compression, "group_leaves", spy)
    known = {"c": jnp.ones(300)}  # on all workers, which JAX knows
    trace(lambda tree: dq.reduce(tree | known, "data", compression=CHEAP, metrics=metrics)[::2])
    grouped = sorted(leaf.index for leaves in calls for leaf in leaves)
    assert grouped == [0, 1, 2]


PUBLIC = {
    function: f"{module.__name__}.{name}"
    for module in (dq, dq.equinox, dq.optax, dq.nnx)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
}


def calls_of_public_functions() -> set[str]:
    """The text "file: function" for every call of a public function in what is not a command."""
    found = set()
    for file in ROOT.rglob("*.py"):
        if wing(file) in ("commands", "contrib", "__main__"):
            continue
        name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        known = vars(importlib.import_module(name.removesuffix(".__init__")))
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name):
                function = known.get(called.id)
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                function = getattr(known.get(called.value.id), called.attr, None)
            else:
                continue
            if inspect.isfunction(function) and function in PUBLIC:
                found.add(f"{file.relative_to(ROOT)}: {PUBLIC[function]}")
    return found


def test_no_public_function_calls_a_public_function():
    assert not calls_of_public_functions()


MANY_ARGUMENTS = {
    "pallas_kernels/kernels.py: _decode_kernel",
    "pallas_kernels/kernels.py: _encode_kernel",
    "pallas_kernels/kernels.py: _finish_kernel",
    "pallas_kernels/push.py: all_reduce",
    "pallas_kernels/triton.py: _begin_kernel",
    "pallas_kernels/triton.py: _place_kernel",
}
"""Functions that take more arguments than others may: Pallas gives kernels their references one by
one, and the push kernel takes what `pallas_kernels.all_reduce` takes."""


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The text "file: function" and the code of every function of both packages."""

    def inside(node, before):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            name = [*before, child.name] if named else before
            if isinstance(child, ast.FunctionDef):
                yield ".".join(name), child
            yield from inside(child, name)

    for file in sorted(file for root in ROOTS for file in root.rglob("*.py")):
        for name, node in inside(ast.parse(file.read_text()), []):
            yield f"{file.relative_to(ROOT.parent)}: {name}", node


def called_by_users() -> set[str]:
    """The text "file: function" of public functions, methods of public classes, and commands."""
    found = {name for name, _ in functions() if "/commands/" in name and name.endswith(": command")}
    for module in (dq, dq.equinox, dq.optax, dq.nnx, pk):
        for public in (inspect.unwrap(getattr(module, name)) for name in module.__all__):
            is_class = inspect.isclass(public)
            if not is_class and not inspect.isfunction(public):
                continue
            file = Path(inspect.getfile(public)).relative_to(ROOT.parent)
            methods = [f".{name}" for name in vars(public) if not name.startswith("_")]
            found |= {
                f"{file}: {public.__name__}{name}" for name in (methods if is_class else [""])
            }
    return found


def lines(node: ast.FunctionDef) -> int:
    """The lines of a function after its docstring."""
    first = node.body[ast.get_docstring(node) is not None :]
    return node.end_lineno - first[0].lineno + 1 if first else 0


def arguments(node: ast.FunctionDef) -> int:
    """The arguments of a function, but for a method's own object."""
    found = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(found) - (found[:1] in (["self"], ["cls"]))


def test_functions_are_short():
    assert not {name for name, node in functions() if lines(node) > MOST_LINES}


def test_functions_take_few_arguments():
    """Users' functions may take more: their options stay what they are."""
    public = called_by_users()
    internal = [(name, node) for name, node in functions() if name not in public]
    many = {name for name, node in internal if arguments(node) > MOST_ARGUMENTS}
    assert many == MANY_ARGUMENTS


def test_docstrings_begin_with_their_subject():
    files = sorted(file for root in WRITTEN for file in root.rglob("*.py"))
    found = {str(file): OPENING.findall(file.read_text(encoding="utf-8")) for file in files}
    assert len(files) > 200 and not {file: words for file, words in found.items() if words}
