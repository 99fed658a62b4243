"""Every block of Python in the README, the quickstart, the FAQ, recipes and islands runs as pasted.

Recipes run after the first block of their page; the blocks of other pages one after the other.
"""

import csv
import os
import re
from pathlib import Path

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


START, *RECIPES = blocks("docs/recipes.md")
NAMES = [
    "jit", "auto", "auto window", "auto specs", "closed", "optax", "accumulation", "checkpoint",
    "sharded", "health", "sharded jit", "train state", "nnx optimizer", "nnx checkpoint",
    "pmap", "nnx", "linen", "linen norm", "explicit", "meshes", "constraints", "several hosts",
    "scan", "fsdp", "fsdp state", "frozen", "sequential", "scattered", "deferred",
    "loss scaling", "weight", "uneven", "private", "budget", "grid", "by path", "by step",
    "by step optax", "by step switch", "metrics",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def promoted(dtypes_promoted):
    """Recipes broadcast by NumPy's rules."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs code in a folder of its own and returns its variables."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the first block sets it
    monkeypatch.chdir(tmp_path)

    def execute(code, name):
        found: dict = {"__name__": "recipe"}  # as classes of a script have a module
        exec(compile(code, name, "exec"), found)
        return found

    return execute


@pytest.fixture
def run(execute):
    """Runs a recipe by its name, after those that it continues."""

    def run(*names):
        code = [RECIPES[NAMES.index(name)] for name in names]
        return execute("".join([START, *code]), f"recipes.md: {names[-1]}")

    return run


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
def test_faq(execute, capsys):
    found = execute("".join(blocks("docs/faq.md")), "faq.md")
    assert close(np.asarray(found["first"][0]), np.asarray(found["x"]).mean(0))
    assert "exact" in capsys.readouterr().out


EXPERTS, ISLANDS = blocks("docs/experts-and-islands.md")


@pytest.mark.release
def test_experts(execute):
    """Gradients through our exchange, against those through JAX's own."""
    ours = 'partial(dq.all_to_all, axis_name="data", tiled=True, compression=compression)'
    assert EXPERTS.count(ours) == 1
    exact = 'partial(jax.lax.all_to_all, axis_name="data", tiled=True)'
    codes = EXPERTS, EXPERTS.replace(ours, exact)
    compressed, exact = (execute(code, "experts-and-islands.md")["grads"] for code in codes)
    for name in ("experts", "router"):
        assert 1e-6 < float(vnmse(*map(np.asarray, (compressed[name], exact[name])))) < 1e-3


@pytest.mark.release
def test_islands(execute):
    """Outer steps of two islands, the second of them without one."""
    found = execute(ISLANDS, "experts-and-islands.md")
    params, state, step = (found[name] for name in ("params", "state", "outer_step"))
    rate, momentum, velocity, expected = 0.7, 0.6, 0.2, 1 - 0.7 * 1.6 * 0.2
    assert float(params["up"].mean()) == pytest.approx(expected, abs=0.01)
    local = jax.tree.map(lambda x: np.stack([x - 0.1, x * np.nan]), params)
    params, state = step(params, state, local, np.array([3, 0], np.float32))
    velocity = momentum * velocity + 0.1
    expected -= rate * (momentum * velocity + 0.1)
    for x in jax.tree.leaves(params):
        assert float(x.mean()) == pytest.approx(expected, abs=0.01)
    assert alike(params)


def test_at_most_three_lines_change_and_every_recipe_has_a_test():
    changed = [len(re.findall(r"  # [1-9]\b", recipe)) for recipe in RECIPES]
    assert len(RECIPES) == len(NAMES) and max(changed) == 3
    tested = {name for names, *_ in PRINTED for name in names}
    assert tested | {"jit", "checkpoint", "budget"} == set(NAMES)


@pytest.mark.release
def test_a_trainer_written_for_jit(execute, run):
    """With 5 bits it trains as with exact sums of the same steps."""
    found = run("jit")
    exact = START + "compression = dq.F32()\n" + RECIPES[NAMES.index("jit")]
    expected = execute(exact, "recipes.md: jit, exact")
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=0.01)
    assert float(found["loss"]) != float(expected["loss"])
    for name, weight in found["weights"].items():
        assert weight.sharding.spec == found["specs"][name]
    assert found["aux"]["errors"].shape == (2, 64)


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


PRINTED = [
    (["auto"], r"loss 0\.\d{3} of \d\d tokens, 64 rows\n",
     lambda found: int(found["aux"]["tokens"]) == int(found["masked"]["mask"].sum())),
    (["auto", "auto window"], "", of_windows),
    (["auto specs"], r"loss \d\.\d{3}\n", of_a_table),
    (["closed"], r"loss 0\.\d{3}\n", of_a_generator),
    (["optax"], r"loss 0\.\d{3}, vNMSE \d\.\de-0\d\n", of_optax),
    (["optax", "accumulation"], r"\n3 reductions in 12 steps\n",
     lambda found: finite(found["trained"]["out"]["kernel"])),
    (["optax", "sharded", "health", "sharded jit"],
     r"loss 0\.\d{3}, a worker updates \(32, 1024\), 0 skipped\n"
     r"norm of the gradient \d+\.\d\d, 0 steps skipped in a row\n",
     lambda found: part(found["opt_state"].masters["out"]["kernel"]) == (128, 8)),
    (["nnx"], r"loss 0\.[0-4]\d*\n", None),
    (["linen"], r"loss 0\.[0-4]\d*\n", None),
    (["linen", "linen norm"], r"\nstatistics of all workers: loss 0\.[0-4]\d*\n", of_statistics),
    (["explicit"], r"loss [01]\.\d+\n", None),
    (["meshes"], "", of_meshes),
    (["meshes", "constraints"], "", lambda found: (
        "constrained" in found and close(jax.device_get(found["grads"]), exact(found)))),
    (["several hosts"], "compressed, bucket 0", lambda found: close(
        found["grads"], jax.grad(found["loss_fn"])(found["params"], found["batches"][0]))),
    (["scan"], r"loss 0\.", of_layers),
    (["fsdp", "fsdp state"], r"loss 1\.\d+\n", of_fsdp),  # it was 5
    (["frozen"], r"^loss 0\.\d+, 8\.\d bits a coordinate\n$", of_adapters),
    (["sequential", "scattered"], r"loss 0\.", of_scattered),
    (["sequential", "scattered", "deferred"], r"\ndeferred: loss 0\.", of_deferred),
    (["loss scaling"], "scale 16384\n", of_finite_parameters),
    (["weight"], "all finite: True\n", None),
    (["uneven"], r"loss 0\.\d{3} of the last 5 rows\n", uneven_worker.check),
    (["train state"], r"loss 0\.\d{3}\n", lambda found: split(found["state"].opt_state)),
    (["nnx optimizer"], r"loss 0\.\d{3}\n", None),
    (["nnx optimizer", "nnx checkpoint"], r"loss 0\.\d{3}\nstep 12\n",
     lambda found: found["optimizer"].opt_state.sent.step.value.shape == (4,)),
    (["pmap"], r"loss 0\.\d{3}\n", lambda found: finite(found["per_device"]["out"]["kernel"])),
    (["private"], r"loss \d\.\d{3}\n", lambda found: alike(found["params"])),
    (["grid"], "", of_a_grid),
    (["by path"], r"\['norm'\]\['scale'\] .* exact: excluded ",
     lambda found: finite(found["grads"]["hidden"]["kernel"])),
    (["metrics"], "", of_metrics),
    (["by step"], r"loss 0\.\d{3}, 3 programs\n", of_steps),
    (["by step", "by step optax"], r"\n12 updates by 3 programs\n",
     lambda found: alike(found["trained"])),
    (["by step", "by step switch"], r"\nloss 0\.\d{3}, 1 program\n", of_switched_steps),
]  # fmt: skip
"""Recipes with those that they continue, what they print, and what holds of their variables."""


@pytest.mark.parametrize(
    ("names", "printed", "holds"), daily(PRINTED, []), ids=lambda part: str(part)[:20]
)
def test_a_recipe_prints_what_it_says_and_trains(run, capsys, names, printed, holds):
    found = run(*names)
    out = capsys.readouterr().out
    assert re.search(printed, out)
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", out, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True) or names[0] == "optax"  # continued, they fall
    assert holds is None or holds(found)


@pytest.mark.release
def test_checkpoint(run):
    with pytest.warns(UserWarning) as caught:
        found = run("checkpoint")
    said = re.search(r"# UserWarning: (.*)", RECIPES[NAMES.index("checkpoint")])[1]
    assert [str(warning.message) for warning in caught] == [said]
    assert found["opt_state"][0].memory.value[0].residual.shape[0] == 4


@pytest.mark.release
def test_a_budget_is_the_mean_over_all_micro_batches_taken(execute, run, capsys):
    """By no more than rounding, with gradients in f32."""
    start_exactly = START.replace("dq.DynamiQ(bits=5)", "dq.F32()")
    assert start_exactly != START
    found = execute(start_exactly + RECIPES[NAMES.index("budget")], "recipes.md: budget")
    assert capsys.readouterr().out == "25 of 32 micro-batches, [4 4 4 4 1 4 4 0]\n"
    start = jax.device_get(execute(START, "recipes.md: start")["params"])
    rows = {k: v.reshape(8, 4, 2, *v.shape[1:]) for k, v in found["batches"][0].items()}
    taken = [
        {k: v[worker, i] for k, v in rows.items()}
        for worker, n in enumerate(found["budget"]) for i in range(n)
    ]  # fmt: skip
    grads = [jax.device_get(jax.grad(found["loss_fn"])(start, batch)) for batch in taken]
    exact = jax.tree.map(lambda *g: np.mean(np.asarray(g, np.float64), 0), *grads)
    moved = jax.tree.map(lambda a, b: (a - np.float64(b)) / 0.1, start, found["params"])
    assert float(vnmse(moved, exact)) < 1e-9
    compressed = run("budget")
    assert of_finite_parameters(compressed)
    np.testing.assert_array_equal(compressed["budgets"]([0.1, 0.3, 9.0], 0.7, 5), [5, 2, 0])
