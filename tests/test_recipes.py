"""Recipes run and print what they say; so do the blocks of Python of the pages, as pasted.

A recipe of ``examples/recipes`` runs after a new copy of ``start.py``; the blocks of a page one
after the other.
"""

import ast
import csv
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
import uneven_worker
from cases import daily
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods.metrics import vnmse

ROOT = Path(__file__).parent.parent


def blocks(page):
    """The blocks of Python of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


FOLDER = ROOT / "examples" / "recipes"
RECIPES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.py"))}
START = RECIPES.pop("start")
"""The file that recipes import."""


def promised(recipe):
    """The lines that a recipe's docstring says it prints."""
    told = re.findall(r"^    (.*)$", ast.get_docstring(ast.parse(recipe)) or "", re.MULTILINE)
    assert told and re.fullmatch(r"python examples/recipes/\w+\.py", told[0]), recipe
    return told[1:]


NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]\d+)?")


def prints(out, lines):
    """Whether the output has the lines in this order, but for the last digits of numbers."""
    printed = iter(out.splitlines())

    def same(found, line):
        if NUMBER.sub("#", " ".join(found.split())) != NUMBER.sub("#", " ".join(line.split())):
            return False
        pairs = zip(NUMBER.findall(found), NUMBER.findall(line), strict=True)
        return all(float(a) == pytest.approx(float(b), rel=0.1) for a, b in pairs)

    return all(any(same(found, line) for found in printed) for line in lines)


@pytest.fixture(autouse=True, scope="module")
def promoted(dtypes_promoted):
    """Recipes broadcast by NumPy's rules."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs code in a folder of its own, after a start, and returns its variables."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the README's script sets it
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    for name in RECIPES:  # of an earlier test, with another start
        monkeypatch.delitem(sys.modules, name, raising=False)

    def execute(code, name, start=None):
        if start is not None:
            module = ModuleType("start")
            exec(compile(start, "start.py", "exec"), vars(module))
            monkeypatch.setitem(sys.modules, "start", module)
        found: dict = {"__name__": "recipe"}  # as classes of a script have a module
        exec(compile(code, name, "exec"), found)
        return vars(sys.modules["start"]) | found if start is not None else found

    return execute


@pytest.fixture
def run(execute):
    """Runs a recipe by its name."""
    return lambda name: execute(RECIPES[name], f"{name}.py", START)


def exact(found):
    """The gradient of a page's loss, of all its rows at once."""
    return jax.grad(found["loss_fn"])(found["params"], found["x"], found["y"])


def close(grads, expected):
    """Compressed with 5 bits: near, and not the same."""
    return 0 < float(vnmse(grads, expected)) < 0.05


def finite(x):
    return bool(np.all(np.isfinite(x)))


def part(x):
    """The shape of what a device holds."""
    return x.addressable_shards[0].data.shape


def split(state):
    """Whether masters of sharded updates are split over the workers."""
    return part(state.masters["hidden"]["kernel"]) != state.masters["hidden"]["kernel"].shape


def alike(tree):
    """Whether all devices hold the same finite parameters."""
    copies = [[np.asarray(s.data) for s in x.addressable_shards] for x in jax.tree.leaves(tree)]
    return all(finite(x[0]) and all(np.array_equal(x[0], y) for y in x) for x in copies)


def test_readme(execute, capsys):
    (code,) = blocks("README.md")
    execute(code, "README.md")
    (printed,) = re.findall(r"^loss (.*)$", capsys.readouterr().out, re.MULTILINE)
    (promised,) = re.findall(r'print\(f"loss .*  # ([\d.]+) on 8 devices', code)
    assert float(printed) == pytest.approx(float(promised), abs=2e-4)


@pytest.mark.release
def test_the_example_is_a_comparison(execute, capsys):
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert len(example.splitlines()) <= 62
    execute(example, "quickstart.py")
    row = re.compile(r"^ *(bf16 psum|5 bits) +([\d.]+) +([\d.]+) +[\d.]+$", re.MULTILINE)
    printed, promised = row.findall(capsys.readouterr().out), row.findall(example)
    for (name, loss, sent), (_, as_promised, _) in zip(printed, promised, strict=True):
        assert float(loss) == pytest.approx(float(as_promised), abs=2e-4)
        assert (name, as_promised, sent) in promised


@pytest.mark.release
def test_quickstart(execute, capsys):
    found = execute("".join(blocks("docs/quickstart.md")), "quickstart.md")
    assert re.search(r"^vNMSE 1\.\de-02, 5\.\d\d bits per", capsys.readouterr().out, re.MULTILINE)
    moved = jax.tree.map(lambda p, new: (p - new) / 2.0, found["params"], found["shards"])
    again = found["mean_gradient"](found["params"], found["x"], found["y"])
    for grads in (found["grads"], moved, again):
        assert close(grads, exact(found))
    assert found["sent"] == 286_720


@pytest.mark.release
def test_experts(execute):
    """Gradients through our exchange, against those through JAX's own."""
    experts = RECIPES["experts"]
    ours = 'partial(dq.all_to_all, axis_name="data", tiled=True, compression=compression)'
    assert experts.count(ours) == 1
    exact = 'partial(jax.lax.all_to_all, axis_name="data", tiled=True)'
    codes = experts, experts.replace(ours, exact)
    compressed, exact = (execute(code, "experts.py")["grads"] for code in codes)
    for name in ("experts", "router"):
        assert 1e-6 < float(vnmse(*map(np.asarray, (compressed[name], exact[name])))) < 1e-3


def of_islands(found):
    """Outer steps of two islands, the second of them without one."""
    params, state, step = (found[name] for name in ("params", "state", "outer_step"))
    rate, momentum, velocity, expected = 0.7, 0.6, 0.2, 1 - 0.7 * 1.6 * 0.2
    assert float(params["up"].mean()) == pytest.approx(expected, abs=0.01)
    local = jax.tree.map(lambda x: np.stack([x - 0.1, x * np.nan]), params)
    params, state = step(params, state, local, np.array([3, 0], np.float32))
    velocity = momentum * velocity + 0.1
    expected -= rate * (momentum * velocity + 0.1)
    for x in jax.tree.leaves(params):
        assert float(x.mean()) == pytest.approx(expected, abs=0.01)
    return alike(params)


def of_same_bits(found):
    """The mean is near the exact one."""
    return close(np.asarray(found["first"][0]), np.asarray(found["x"]).mean(0))


def test_three_lines_change_in_keras_four_and_every_recipe_has_a_test():
    changed = [len(re.findall(r"  # [1-9]\b", recipe)) for recipe in RECIPES.values()]
    assert sorted(changed)[-2:] == [3, 4] and HOLDS.keys() == RECIPES.keys()
    assert all(promised(recipe) for recipe in RECIPES.values())


def test_pages_name_every_recipe_once():
    """Where the site shows it (docs/site_pages.py), in a paragraph of its own."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    link = r"^\[`examples/recipes/(\w+)\.py`\]\(\.\./examples/recipes/\1\.py\)$"
    shown = re.findall(link, pages, re.MULTILINE)
    assert sorted(shown) == sorted(RECIPES)


def test_lines_are_compared_but_for_last_digits():
    out = "step 3\nloss 0.412 of (8, 4) in 1.2e-03\n"
    assert prints(out, ["loss 0.413 of (8, 4) in 1.21e-03"]) and prints(out, ["step 3"])
    assert not prints(out, ["loss 0.512 of (8, 4) in 1.2e-03"]) and not prints(out, ["loss 0.412"])
    assert not prints(out, ["loss 0.412 of (8, 4) in 1.2e-03", "step 3"])


@pytest.mark.release
def test_a_trainer_written_for_jit(execute, run):
    """With 5 bits it trains as with exact sums of the same steps."""
    found = run("explicit_axes")
    exact = START.replace("dq.DynamiQ(bits=5)", "dq.F32()")
    expected = execute(RECIPES["explicit_axes"], "explicit_axes.py, exact", exact)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=0.01)
    assert float(found["loss"]) != float(expected["loss"])
    for name, weight in found["weights"].items():
        assert weight.sharding.spec == found["specs"][name]
    assert found["aux"]["errors"].shape == (2, 64)


def of_a_batch(found):
    """The gradient of the first batch."""
    batch = found["batches"][0]
    return close(found["grads"], jax.grad(found["loss_fn"])(found["params"], batch))


def of_windows(found):
    """The gradient of the loss of both windows is near that of all tokens."""

    def mean(params):
        own, aux = found["token_sum"](params, found["masked"])
        return own / aux["tokens"]

    assert found["total"] == 2 * found["masked"]["mask"].sum()
    return close(found["grads"], jax.grad(mean)(found["params"]))


def of_optax(found):
    vnmse = float(found["opt_state"][0].metrics.vnmse)
    return float(found["loss"]) < 0.5 and 1e-5 < vnmse < 0.05


def of_meshes(found):
    assert all(part(grad)[0] == grad.shape[0] // 4 for grad in found["grads"].values())
    return close(jax.device_get(found["grads"]), exact(found))


def of_fsdp(found):
    kernel, moment = found["layers"]["kernel"], found["opt_state"][0].mu["kernel"]
    return part(kernel) == part(moment) == (6, 32, 256) and finite(kernel)


def of_adapters(found):
    """They have moved; and the base has the bits of a gather that encodes."""
    assert all(np.any(np.asarray(b)) for _, b in found["adapters"].values())
    maps = {"mesh": found["mesh"], "in_specs": P("data"), "out_specs": P("data")}
    options = {"packed": {}, "base": {"compression": found["eight_bits"]}}
    kept, anew = (
        jax.jit(
            jax.shard_map(lambda x, own=own: dq.all_gather(x, "data", tiled=True, **own), **maps)
        )(found[name])
        for name, own in options.items()
    )
    return all(np.array_equal(kept[name], anew[name]) for name in kept)


def of_layers(found):
    return alike(found["params"])


def of_scattered(found):
    masters = found["opt_state"].masters["blocks"]
    return of_layers(found) and all(part(w["kernel"]) == (32, 256) for w in masters)


def of_a_grid(found):
    start = np.asarray(found["params"]["hidden"]["kernel"]) + 0.01 * found["noise"].astype(float)
    models, mean = np.asarray(found["models"]["kernel"]), start[found["alive"] > 0].mean(0)
    return np.all(models == models[0]) and close(models[0], mean)


def of_deferred(found):
    """Parameters are alike, and lack differences that `gathered` adds."""
    pairs = zip(*map(jax.tree.leaves, (found["current"], found["params"])), strict=True)
    return alike(found["current"]) and any(np.any(x != y) for x, y in pairs)


def of_finite_parameters(found):
    return all(finite(leaf) for leaf in jax.tree.leaves(found["params"]))


def of_metrics(found):
    with Path("metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(12))
    return all(1e-5 < float(row["vnmse"]) < 0.05 for row in rows)


def of_a_table(found):
    own = found["buffers"]
    value = found["table_loss"](found["params"], found["labelled"], own["scale"], buffers=own)
    return np.isclose(found["loss"], value, rtol=1e-5)


def of_a_generator(found):
    """The generator went on by one key in the loss and one after it, as in plain JAX."""
    plain = found["Keys"](jax.random.key(0))
    plain()
    data = [jax.random.key_data(key) for key in (plain(), found["key"])]
    return np.array_equal(*data) and finite(found["grads"]["hidden"]["kernel"])


def of_statistics(found):
    """The loss of the whole batch, and running averages of it."""
    own = found["weights"], found["stats"], found["batches"][0]
    (value, after), _ = found["grad_fn"](*own)
    # Alone, the mean over the axis is that of one worker.
    alone = jax.vmap(lambda batch: found["normed_loss"](*own[:2], batch), axis_name="data")
    expected, stats = alone(jax.tree.map(lambda x: x[None], own[2]))
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(stats), strict=True)
    near = all(np.allclose(a, b[0], rtol=1e-4, atol=1e-5) for a, b in pairs)
    return near and np.isclose(value, expected[0], rtol=1e-4)


def of_steps(found, step=None):
    """Gradients of steps before and after the changes: bf16's, and those of 5 and of 4 bits."""
    params, batch, schedule = found["params"], found["batches"][0], found["schedule"]
    expected = jax.grad(found["loss_fn"])(params, batch)
    run = step or (lambda number: found["step"](params, batch, method=schedule(number))[0])
    moved = [jax.tree.map(lambda p, new: p - new, params, run(n)) for n in (3, 4, 7, 8)]
    errors = [float(vnmse(jax.tree.map(lambda x: 10 * x, m), expected)) for m in moved]
    return errors[0] < 1e-3 < errors[1] == errors[2] < errors[3] < 0.2


def of_switched_steps(found):
    """As `of_steps`, by the number as an array."""
    run = found["switched_step"]
    return of_steps(found, lambda n: run(found["params"], found["batches"][0], np.int32(n))[0])


HOLDS = {
    "explicit_axes": None,  # its test is above
    "auto_axes": lambda found: (
        int(found["aux"]["tokens"]) == int(found["masked"]["mask"].sum())),
    "accumulate_auto": of_windows,
    "batch_specs": of_a_table,
    "closed_specs": of_a_generator,
    "optax_all_reduce": of_optax,
    "accumulate_scan": lambda found: finite(found["trained"]["out"]["kernel"]),
    "checkpoint": lambda found: found["opt_state"][0].memory.value[0].residual.shape[0] == 4,
    "sharded_map": lambda found: split(found["opt_state"]),
    "sharded_jit": lambda found: part(found["opt_state"].masters["out"]["kernel"]) == (128, 8),
    "train_state": lambda found: split(found["state"].opt_state),
    "nnx_optimizer": None,
    "nnx_checkpoint": lambda found: found["optimizer"].opt_state.sent.step.value.shape == (4,),
    "keras_model": None,  # test_trainers compares the losses of these three
    "equinox_net": None,
    "multi_steps": None,
    "pmap": lambda found: finite(found["per_device"]["out"]["kernel"]),
    "nnx": None,
    "linen": None,
    "batch_norm": of_statistics,
    "linen_explicit": None,
    "tensor_parallel": lambda found: close(jax.device_get(found["grads"]), exact(found)),
    "hsdp": of_meshes,
    "constraints": lambda found: close(jax.device_get(found["grads"]), exact(found)),
    "node_and_gpu": of_a_batch,
    "scan_layers": of_layers,
    "linen_scan": None,
    "nnx_scan": None,
    "equinox_scan": None,
    "fsdp": of_fsdp,
    "lora": of_adapters,
    "overlapped": of_layers,
    "overlapped_sharded": of_scattered,
    "deferred": of_deferred,
    "loss_scaling": of_finite_parameters,
    "replicas": lambda found: 0 < float(found["error"]) < 0.2,
    "weight": of_finite_parameters,
    "short_batches": uneven_worker.check,
    "privacy": of_layers,
    "micro_batches": of_finite_parameters,
    "grid": of_a_grid,
    "by_path": lambda found: finite(found["grads"]["hidden"]["kernel"]),
    "by_step": of_steps,
    "by_step_optax": lambda found: alike(found["trained"]),
    "by_step_switch": of_switched_steps,
    "metrics": of_metrics,
    "same_bits": of_same_bits,
    "experts": None,  # its test is above
    "islands": of_islands,
}  # fmt: skip
"""Recipes, and what holds of their variables."""
NEEDS = {"keras_model": "keras", "equinox_net": "equinox", "equinox_scan": "equinox"}


@pytest.mark.parametrize("name", daily([*HOLDS], []))
def test_a_recipe_prints_what_it_says_and_trains(run, capsys, monkeypatch, name):
    if name in NEEDS:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        pytest.importorskip(NEEDS[name], reason="pip install '.[clients]'", exc_type=ImportError)
    with pytest.warns(UserWarning) if name == "checkpoint" else nullcontext() as caught:
        found = run(name)
    out = capsys.readouterr().out
    assert prints(out, promised(RECIPES[name])), out
    assert HOLDS[name] is None or HOLDS[name](found)
    if name == "checkpoint":
        (said,) = re.findall(r"# UserWarning: (.*)", RECIPES[name])
        assert [str(warning.message) for warning in caught] == [said]


@pytest.mark.release
def test_a_budget_is_the_mean_over_all_micro_batches_taken(execute):
    """By no more than rounding, with gradients in f32."""
    start_exactly = START.replace("dq.DynamiQ(bits=5)", "dq.F32()")
    assert start_exactly != START
    found = execute(RECIPES["micro_batches"], "micro_batches.py, exact", start_exactly)
    start = jax.device_get(vars(sys.modules["start"])["params"])
    rows = {k: v.reshape(8, 4, 2, *v.shape[1:]) for k, v in found["batches"][0].items()}
    taken = [
        {k: v[worker, i] for k, v in rows.items()}
        for worker, n in enumerate(found["budget"]) for i in range(n)
    ]  # fmt: skip
    grads = [jax.device_get(jax.grad(found["loss_fn"])(start, batch)) for batch in taken]
    exact = jax.tree.map(lambda *g: np.mean(np.asarray(g, np.float64), 0), *grads)
    moved = jax.tree.map(lambda a, b: (a - np.float64(b)) / 0.1, start, found["params"])
    assert float(vnmse(moved, exact)) < 1e-9
    np.testing.assert_array_equal(found["budgets"]([0.1, 0.3, 9.0], 0.7, 5), [5, 2, 0])
