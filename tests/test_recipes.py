"""Every block of Python in the README, the quickstart, the FAQ and the recipes runs as pasted.

Recipes run after the first block of their page; the blocks of other pages one after the other.
"""

import csv
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import daily

from dynamiq_jax.methods.metrics import vnmse

pytestmark = pytest.mark.usefixtures("padding_counts")

ROOT = Path(__file__).parent.parent


def blocks(page):
    """The blocks of Python of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


START, *RECIPES = blocks("docs/recipes.md")
NAMES = [
    "jit", "auto", "auto window", "optax", "accumulation", "checkpoint", "sharded",
    "sharded jit", "nnx", "linen", "explicit", "meshes", "several hosts", "scan", "fsdp",
    "fsdp state", "sequential", "loop", "scattered", "loss scaling", "weight", "budget", "grid",
    "by path", "by step", "metrics",
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
        found: dict = {}
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


def test_readme(execute, capsys):
    (code,) = blocks("README.md")
    execute(code, "README.md")
    (printed,) = re.findall(r"^loss (.*)$", capsys.readouterr().out, re.MULTILINE)
    (promised,) = re.findall(r'print\(f"loss .*  # ([\d.]+) on 8 devices', code)
    assert float(printed) == pytest.approx(float(promised), abs=2e-4)


@pytest.mark.release
def test_the_example_is_the_readme_and_a_comparison(execute, capsys):
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert len(example.splitlines()) <= 62
    execute(example, "quickstart.py")
    row = re.compile(r"^ *(bf16 psum|5 bits) +([\d.]+) +([\d.]+) +[\d.]+$", re.MULTILINE)
    printed, promised = row.findall(capsys.readouterr().out), row.findall(example)
    for (name, loss, sent), (_, as_promised, _) in zip(printed, promised, strict=True):
        assert float(loss) == pytest.approx(float(as_promised), abs=2e-4)
        assert (name, as_promised, sent) in promised
    (readme,) = blocks("README.md")
    for line in (
        "    return jnp.mean(",
        "    return jax.tree.map(",
        "params[",
        "keys =",
        "x = jax.r",
    ):
        (same,) = [other for other in readme.splitlines() if other.startswith(line)]
        assert same in example or same.replace("params[", "start[") in example


@pytest.mark.release
def test_quickstart(execute, capsys):
    found = execute("".join(blocks("docs/quickstart.md")), "quickstart.md")
    assert re.search(r"^vNMSE 1\.\de-02, 5\.\d\d bits per", capsys.readouterr().out, re.MULTILINE)
    moved = jax.tree.map(lambda p, new: (p - new) / 2.0, found["params"], found["shards"])
    again = found["mean_gradient"](found["params"], found["x"], found["y"])
    for grads in (found["grads"], moved, again):
        assert 0 < float(vnmse(grads, exact(found))) < 0.05
    assert found["sent"] == 286_720


@pytest.mark.release
def test_faq(execute, capsys):
    found = execute("".join(blocks("docs/faq.md")), "faq.md")
    exact = np.asarray(found["x"]).mean(0)
    assert 0 < float(vnmse(np.asarray(found["first"][0]), exact)) < 0.05
    assert "exact" in capsys.readouterr().out


def test_every_recipe_has_a_test():
    assert len(RECIPES) == len(NAMES)


def test_at_most_three_lines_change():
    changed = [len(re.findall(r"  # [1-9]\b", recipe)) for recipe in RECIPES]
    assert dict(zip(NAMES, changed, strict=True)) == {
        "jit": 2, "auto": 1, "auto window": 0, "optax": 3, "accumulation": 0, "checkpoint": 0,
        "sharded": 1, "sharded jit": 0, "nnx": 2, "linen": 3, "explicit": 0, "meshes": 0,
        "several hosts": 2, "scan": 2, "fsdp": 1, "fsdp state": 0, "sequential": 1, "loop": 1,
        "scattered": 2,
        "loss scaling": 1, "weight": 1, "budget": 1, "grid": 1, "by path": 0, "by step": 3,
        "metrics": 0,
    }  # fmt: skip


def test_a_trainer_written_for_jit(execute, run):
    """With 5 bits it trains as with exact sums of the same steps."""
    found = run("jit")
    exact = START + "method = dq.F32()\n" + RECIPES[NAMES.index("jit")]
    expected = execute(exact, "recipes.md: jit, exact")
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=0.01)
    assert float(found["loss"]) != float(expected["loss"])
    for name, weight in found["weights"].items():
        assert weight.sharding.spec == found["specs"][name]
    assert found["aux"]["errors"].shape == (2, 64)


@pytest.mark.release
def test_a_loss_on_each_workers_examples(run, capsys):
    found = run("auto")
    assert re.fullmatch(r"loss 0\.\d{3} of \d\d tokens, 64 rows\n", capsys.readouterr().out)
    assert int(found["aux"]["tokens"]) == int(found["masked"]["mask"].sum())


@pytest.mark.release
def test_accumulation_on_auto_axes(run):
    found = run("auto", "auto window")
    batch = found["masked"]

    def mean(params):
        own, aux = found["token_sum"](params, batch)
        return own / aux["tokens"]

    assert found["total"] == 2 * batch["mask"].sum()
    error = vnmse(found["grads"], jax.grad(mean)(found["params"]))
    assert 0 < float(error) < 0.05


def test_optax(run, capsys):
    found = run("optax")
    assert re.fullmatch(r"loss 0\.\d{3}, vNMSE \d\.\de-0\d\n", capsys.readouterr().out)
    assert float(found["loss"]) < 0.5
    assert 1e-5 < float(found["opt_state"][0].metrics.vnmse) < 0.05


@pytest.mark.release
def test_accumulation(run, capsys):
    found = run("optax", "accumulation")
    assert capsys.readouterr().out.endswith("\n3 reductions in 12 steps\n")
    assert int(found["opt_state"].inner_opt_state[0].step) == 3


@pytest.mark.release
def test_checkpoint(run):
    with pytest.warns(UserWarning) as caught:
        found = run("checkpoint")
    said = re.search(r"# UserWarning: (.*)", RECIPES[NAMES.index("checkpoint")])[1]
    assert [str(warning.message) for warning in caught] == [said]
    residual = found["opt_state"][0].memory.value[0].residual
    assert residual.shape[0] == 4


@pytest.mark.release
def test_sharded_updates(run, capsys):
    """Both ways train alike; outside of maps the loss is that of all rows."""
    outside = run("optax", "sharded", "sharded jit")
    _, *printed = capsys.readouterr().out.splitlines()
    said = r"loss (0\.\d{3}), a worker updates \(32, 1024\), 0 skipped\nloss (0\.\d{3})"
    mapped, global_loss = map(float, re.fullmatch(said, "\n".join(printed)).groups())
    assert global_loss == pytest.approx(mapped, rel=0.02)
    masters = outside["opt_state"].masters["out"]["kernel"]
    assert masters.addressable_shards[0].data.shape == (128, 8)


@pytest.mark.parametrize(
    ("name", "highest"), daily([("nnx", 0.5), ("linen", 0.5), ("explicit", 2.0)], [])
)
def test_flax(run, capsys, name, highest):
    """Losses fall below this, from 0.8, 0.6 and 4.2."""
    run(name)
    (loss,) = re.findall(r"^loss (\S+)$", capsys.readouterr().out, re.M)
    assert 0 < float(loss) < highest


@pytest.mark.release
def test_meshes(run):
    found = run("meshes")
    plain = exact(found)
    for name, grad in found["grads"].items():
        assert dict(grad.sharding.mesh.shape) == {"replica": 2, "fsdp": 4}
        assert grad.addressable_shards[0].data.shape[0] == grad.shape[0] // 4
        assert 0 < float(vnmse(np.asarray(grad), plain[name])) < 0.05


@pytest.mark.release
def test_several_hosts(run, capsys):
    found = run("several hosts")
    assert "compressed, bucket 0" in capsys.readouterr().out
    plain = jax.grad(found["loss_fn"])(found["params"], found["batches"][0])
    assert 0 < float(vnmse(found["grads"], plain)) < 0.05


@pytest.mark.release
def test_loss_scaling(run, capsys):
    found = run("loss scaling")
    assert capsys.readouterr().out == "scale 16384\n"
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found["params"]))


@pytest.mark.release
def test_fsdp(run, capsys):
    found = run("fsdp", "fsdp state")
    assert re.fullmatch(r"loss 1\.\d+\n", capsys.readouterr().out)  # it was 5
    kernel = found["layers"]["kernel"]
    for own in (kernel, found["opt_state"][0].mu["kernel"]):
        assert own.addressable_shards[0].data.shape == (6, 32, 256)
    assert np.all(np.isfinite(kernel))


@pytest.mark.parametrize("name", daily(["scan", "sequential"], []))
def test_layers_reduce_in_the_backward_pass(run, capsys, name):
    found = run(name)
    assert capsys.readouterr().out.startswith("loss 0.")
    for leaf in jax.tree.leaves(found["params"]):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
        assert np.all(np.isfinite(copies[0]))


@pytest.mark.release
def test_layers_in_a_loop(run, capsys):
    """Layers in a loop train on after the recipe before."""
    found = run("sequential", "loop")
    before, after = (float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out))
    assert after < before  # trained on from there
    assert found["stacked"]["blocks"]["kernel"].shape == (6, 256, 256)
    assert np.all(np.isfinite(found["stacked"]["blocks"]["kernel"]))


@pytest.mark.release
def test_sharded_updates_beside_the_backward_pass(run, capsys):
    """They train on after the recipes before, and all workers' copies are equal."""
    found = run("sequential", "loop", "scattered")
    *_, before, after = (float(x) for x in re.findall(r"loss (\S+)", capsys.readouterr().out))
    assert after < before
    for leaf in jax.tree.leaves(found["stacked"]):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
    masters = found["opt_state"].masters["blocks"]["kernel"]
    assert masters.addressable_shards[0].data.shape == (6, 32, 256)


@pytest.mark.release
def test_a_worker_that_is_left_out(run, capsys):
    run("weight")
    assert capsys.readouterr().out == "all finite: True\n"


@pytest.mark.release
def test_a_budget_is_the_mean_over_all_micro_batches_taken(execute, capsys):
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


@pytest.mark.release
def test_a_budget_compressed(run):
    found = run("budget")
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found["params"]))
    np.testing.assert_array_equal(found["budgets"]([0.1, 0.3, 9.0], 0.7, 5), [5, 2, 0])


@pytest.mark.release
def test_a_grid(run, capsys):
    found = run("grid")
    first, second = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^# (along .*)$", RECIPES[NAMES.index("grid")], re.MULTILINE)
    assert [re.sub(r"\d\.\de-03", "9.3e-03", first), second] == promised
    start = np.asarray(found["params"]["hidden"]["kernel"]) + 0.01 * found["noise"].astype(float)
    (model, *others), mean = (
        np.asarray(found["models"]["kernel"]),
        start[found["alive"] > 0].mean(0),
    )
    assert all(np.array_equal(other, model) for other in others)
    assert 0 < float(vnmse(model, mean)) < 0.05


@pytest.mark.release
def test_by_path(run, capsys):
    found = run("by path")
    table = capsys.readouterr().out
    for path, route in (
        ("['hidden']['kernel']", "compressed, bucket 0"),
        ("['norm']['scale']", "exact: excluded"),
        ("['out']['kernel']", "compressed, bucket 1"),
    ):
        assert re.search(rf"{re.escape(path)} .* {route} ", table)
    assert np.all(np.isfinite(found["grads"]["hidden"]["kernel"]))


@pytest.mark.release
def test_by_step(run, capsys):
    found = run("by step")
    assert capsys.readouterr().out == f"loss {float(found['loss']):.3f}, 3 programs\n"


@pytest.mark.release
def test_metrics(run, tmp_path):
    run("metrics")
    with (tmp_path / "runs" / "first" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert all(1e-5 < float(row["vnmse"]) < 0.05 for row in rows)
