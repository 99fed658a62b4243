"""benchmarks/evidence/training.py: rows that are paired, kept and compared, and what it refuses."""

import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "evidence"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import llm_data
import llm_model
import training
import training_model
import training_report
import training_run

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
PNG = b"\x89PNG"
STEPS, SEEDS = 8, 2
COMMAND = ["--models", "micro", "--methods", "dynamiq:5,f32", "--steps", STEPS, "--seeds", SEEDS]


def invoke(*arguments):
    app = typer.Typer()
    app.command()(training.main)
    return CliRunner().invoke(app, list(map(str, arguments)))


def plain(text):
    """Error text without the frame and line breaks that a terminal adds."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """XLA optimises less: compiling takes half the time, and running next to none as it is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The command's files for a tiny model: rows.json, table.md and plot.png."""
    folder = tmp_path_factory.mktemp("training")
    files = ["--json", folder / "rows.json", "--table", folder / "table.md"]
    ran = invoke(*COMMAND, *files, "--plot", folder / "plot.png")
    assert ran.exit_code == 0, ran.output
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """Its rows, by (init, method)."""
    kept = json.loads((folder / "rows.json").read_text())["rows"]
    return {(row["settings"]["init"], row["settings"]["method"]): row for row in kept}


@pytest.fixture(scope="module")
def task():
    return training_run.load_task("micro", 8, STEPS)


@pytest.fixture
def untrained(monkeypatch):
    """Nothing is compiled, and what runs fails."""

    def fail(*_):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(
        training, "compile_program", lambda program: training.Compiled(lambda *_: None, 0.0)
    )
    monkeypatch.setattr(training, "run_seeds", fail)


# --- What is trained ------------------------------------------------------------------------------


def test_runs_are_paired(rows):
    assert len(rows) == 6
    for kind in training_model.INITS:
        exact, ours, f32 = (rows[kind, name] for name in ("exact", "dynamiq:5", "f32"))
        assert exact["summary"]["validation"] == {"percent": 0.0, "error": 0.0}
        assert abs(f32["summary"]["validation"]["percent"]) < 1e-3
        ratio = np.divide(ours["validation_loss"], exact["validation_loss"])
        found = ours["summary"]["validation"]
        assert found["percent"] == pytest.approx(100 * (ratio.mean() - 1))
        assert found["error"] == pytest.approx(100 * np.abs(ratio[0] - ratio[1]) / 2)
        # Far less than seeds differ among each other, which is what pairing is for.
        assert 1e-4 < np.abs(ratio - 1).max() < 0.02
        assert np.ptp(exact["validation_loss"]) > 1e-3
    starts = [rows[kind, "exact"]["training_loss"] for kind in training_model.INITS]
    assert np.abs(np.subtract(*starts)).min() > 1e-3


def test_training_learns(rows):
    """From the loss of a guess, log 256 = 5.5, to something lower on text that it did not see."""
    for row in rows.values():
        assert max(row["validation_loss"]) < 5.4


def test_errors_are_those_of_the_method(rows):
    for kind in training_model.INITS:
        exact, ours, f32 = (rows[kind, name] for name in ("exact", "dynamiq:5", "f32"))
        assert exact["vnmse"] == exact["worst_leaf"] == [0.0, 0.0]
        assert 0 < max(f32["worst_leaf"]) < 1e-12
        assert 1e-5 < min(ours["vnmse"])
        assert max(ours["vnmse"]) < 0.1
        assert all(np.greater(ours["worst_leaf"], ours["vnmse"]))
        assert exact["bits_per_coord"] == f32["bits_per_coord"] == 32
        assert 5 < ours["bits_per_coord"] < 5.2


def test_methods_and_their_routes_by_name():
    texts = "dynamiq:5 dynamiq:4.50 dynamiq-mse:5 dynamiq-paper:4 mxfp8 thc:4 omnireduce:8 f32"
    matrices = {
        "powersgd": False,
        "arc-top-k:4": False,
        "arc-top-k-memory:8": True,
        "clt-k-memory:4": True,
        "topk-chunked-memory:4": True,
        "sidco:4": False,
        "sidco-memory:4": True,
    }
    parsed = dict(training_run.parse_method(text, "jnp") for text in texts.split())
    assert list(parsed) == texts.replace("4.50", "4.5").split()
    for text, memory in matrices.items():
        _, method = training_run.parse_method(text, "jnp")
        assert isinstance(method, dq.ErrorFeedback) is memory
    assert parsed["dynamiq:5"].floor is not None
    assert parsed["dynamiq-mse:5"].floor is parsed["dynamiq-paper:4"].floor is None
    assert parsed["dynamiq-paper:4"].widths == (2, 4, 8)
    means = training_run.parse_means(
        ["bf16-psum", "mxfp8", "thc:4", "powersgd-memory", "exact"], ["ring", "direct"], "jnp"
    )
    routes = [("exact", "native"), ("bf16-psum", "native"), ("mxfp8", "ring"), ("mxfp8", "direct")]
    assert [(mean.method, mean.topology) for mean in means] == [
        *routes,
        ("thc:4", "native"),
        ("powersgd-memory", "native"),
    ]


def test_bf16_psum_rounds_to_bf16_and_comes_back_in_f32():
    x = jax.random.normal(jax.random.key(0), (8, 512))
    average = partial(training_run.bf16_mean().average, key=jax.random.key(1), state=())
    found = jax.vmap(average, axis_name=training_run.AXIS)({"leaf": x})[0]["leaf"][0]
    assert found.dtype == jnp.float32
    assert 1e-4 < float(jnp.abs(found - x.mean(axis=0)).max()) < 2**-6


def test_workers_have_gradients_of_their_own(task):
    """A "mean" that is worker 0's own gradient is far from the mean."""
    alone = training_run.exact_mean()._replace(average=lambda grads, key, state: (grads, state))
    own = training_run.make_trainer(task.shape, "sgd", alone, 8, 2)
    two_steps = task._replace(steps=2)
    result = training_run.run_seeds(own, two_steps, "unit", 0.1, 1, 1)
    by_leaf = training.leaf_errors(result["errors"], result["norms"])
    assert by_leaf.shape == (1, len(training_run.large_leaves(task.gradients)))
    assert by_leaf.min() > 0.1


def test_workers_may_have_models_of_their_own(task):
    """Models are equal where all results are; else they differ until their means meet."""

    def run(mean):
        trainer = training_run.make_trainer(task.shape, "adamw", mean, 8, STEPS)
        return training_run.run_seeds(trainer, task, "unit", 1e-2, 1, 1)

    exact = training_run.exact_mean()
    alone = exact._replace(average=lambda grads, key, state: (grads, state))
    one, copies = run(exact), run(exact._replace(period=3))
    for name in ("validation", "losses"):
        np.testing.assert_allclose(copies[name], one[name], rtol=1e-4)
    apart, met = run(alone._replace(period=STEPS + 1)), run(alone._replace(period=2))
    for result in (apart, met):  # the mean of own gradients is the mean
        assert training.leaf_errors(result["errors"], result["norms"]).max() < 1e-9
    np.testing.assert_array_equal(apart["losses"][:, :2], met["losses"][:, :2])
    differs = np.abs(apart["losses"] / met["losses"] - 1)
    assert differs[:, 2:].min() > 1e-4
    assert abs(apart["validation"][0] / met["validation"][0] - 1) > 1e-4


def test_the_validation_loss_is_that_of_the_models_mean(task, monkeypatch):
    """After one step of SGD on own gradients that mean is the model of their mean."""
    monkeypatch.setattr(training_run, "make_optimizer", lambda *_: optax.sgd(1.0))
    task = task._replace(steps=1)
    exact = training_run.exact_mean()
    alone = exact._replace(average=lambda grads, key, state: (grads, state), period=2)

    def validation(mean, peak=0.1):
        trainer = training_run.make_trainer(task.shape, "sgd", mean, 8, 1)
        return training_run.run_seeds(trainer, task, "unit", peak, 1, 1)["validation"][0]

    start, found, wanted = validation(exact, 0.0), validation(alone), validation(exact)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted - start) > 1e-2


def test_liec_is_minmax_with_models_that_are_averaged(task):
    liec, minmax = training_run.parse_means(["liec:4", "minmax:4"], ["direct"], "jnp")[1:]
    assert (liec.method, liec.topology, liec.period) == ("liec:4", "native", 32)
    assert minmax.period == 0
    apart = liec.bits_per_coord(task.gradients, 8) - minmax.bits_per_coord(task.gradients, 8)
    assert apart == pytest.approx(32 / 32)  # f32, every 32 steps


def test_batches_depend_on_seed_and_step_and_worker(task):
    starts = np.stack([training_run.window_starts(task, seed) for seed in range(3)])
    assert starts.shape == (3, STEPS, 8 * task.shape.sequences)
    by_worker = starts.reshape(-1, task.shape.sequences)
    assert len(np.unique(by_worker, axis=0)) == len(by_worker)
    np.testing.assert_array_equal(starts[1], training_run.window_starts(task, 1))
    longer = training_run.window_starts(task._replace(steps=2 * STEPS), 1)
    np.testing.assert_array_equal(starts[1], longer[:STEPS])


def test_validation_windows_are_spread_over_text_that_is_not_trained_on(task):
    corpus = llm_data.load_corpus(task.shape.vocab_size)
    length = task.shape.seq_len + 1
    assert task.windows.shape == (task.shape.windows, length)
    np.testing.assert_array_equal(task.windows[0], corpus.validation[:length])
    np.testing.assert_array_equal(task.windows[-1], corpus.validation[-length:])
    np.testing.assert_array_equal(task.text, corpus.train)


def test_seeds_run_in_groups_and_come_back_in_order(task):
    def program(kind, peak, seeds, *_):
        groups.append(list(seeds))
        return {"validation": 10.0 * seeds}

    groups = []
    found = training_run.run_seeds(program, task, "gpt2", 1.0, 5, 2)
    assert groups == [[0, 1], [2, 3], [4, 0]]
    assert found["validation"].tolist() == [0, 10, 20, 30, 40]


def test_the_model_is_that_of_the_example():
    """Equal parameters have equal losses: norms, positions, attention and feed-forward agree."""
    shape = training_model.MODELS["micro"]
    names = ("vocab_size", "seq_len", "n_layers", "dim", "n_heads", "hidden", "dtype")
    own = {name: getattr(shape, name) for name in names}
    config = llm_model.Config(**own, n_kv_heads=shape.n_heads)
    params = training_model.init(shape, jax.random.key(0), jnp.int32(1))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    ours = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(training_model.unstack(params))
    }
    places = {"embed": "embed.embedding", "head": "head.kernel", "norm": "norm.scale"}
    places |= {name: f"attention.{name}.kernel" for name in "qkvo"}
    places |= {name: f"mlp.{name}.kernel" for name in ("gate", "up", "down")}
    places |= {f"{name}_norm": f"{name}_norm.scale" for name in ("attention", "mlp")}
    moved = {}
    for name, leaf in ours.items():
        start, _, last = name.rpartition(".")
        moved[f"{start}.{places[last]}".strip(".")] = leaf

    def take(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return moved.pop(name).reshape(leaf.shape)

    theirs = jax.eval_shape(lambda: llm_model.init_params(config, jax.random.key(0)))
    theirs = jax.tree_util.tree_map_with_path(take, theirs)
    assert not moved
    tokens = jax.random.randint(jax.random.key(2), (3, shape.seq_len + 1), 0, shape.vocab_size)
    expected = llm_model.make_loss(config)(theirs, tokens)
    assert training_model.loss(shape, params, tokens) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", training_run.OPTIMISERS)
def test_optimisers_decay_matrices_alone_and_clip(task, name):
    params = training_model.init(task.shape, jax.random.key(0), jnp.int32(1))
    gradients = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), params)
    optimizer = training_run.make_optimizer(name, 10)

    @jax.jit
    def second_update(scale, factor):
        start = jax.tree.map(lambda p: factor * p, params)
        grads = jax.tree.map(lambda g: scale * g, gradients)
        _, state = optimizer.update(grads, optimizer.init(start), start)
        return optimizer.update(grads, state, start)[0]

    update = second_update(1.0, 1.0)
    for a, b in zip(*map(jax.tree.leaves, (update, second_update(100.0, 1.0))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)  # both are clipped to norm 1
    moved = second_update(1.0, 2.0)
    decay = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()) > 1e-6, update, moved)
    blocks = decay["blocks"]
    assert not (decay["norm"] or blocks["attention_norm"] or blocks["mlp_norm"])
    assert blocks["q"] == blocks["down"] == (name != "sgd")
    assert decay["head"] == (name in ("adamw", "lion"))


def test_muon_orthogonalises_the_matrix_of_each_layer(task):
    zeros = jax.tree.map(jnp.zeros_like, training_model.init(task.shape, jax.random.key(0), 0))
    gradients = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), zeros)
    optimizer = training_run.make_optimizer("muon", 10)
    _, state = optimizer.update(gradients, optimizer.init(zeros), zeros)  # at rate 0
    update, _ = optimizer.update(gradients, state, zeros)
    stretch = jnp.linalg.svd(update["blocks"]["down"], compute_uv=False)
    assert stretch.shape == (task.shape.n_layers, task.shape.dim)
    assert float((stretch[:, 0] / stretch[:, -1]).max()) < 2  # of the gradients: 5


def test_starts_have_the_deviations_of_their_kind():
    shape = training_model.MODELS["micro"]
    residual = (2 * shape.n_layers) ** -0.5
    trees = [training_model.init(shape, jax.random.key(0), jnp.int32(kind)) for kind in (0, 1)]
    for tree, embed, head, wide, narrow in zip(
        trees, (0.02, 1.0), (0.02, 0.25 / 8), (0.02, 1 / 8), (0.02, 128**-0.5), strict=True
    ):
        blocks = tree["blocks"]
        expected = {"q": wide, "k": wide, "v": wide, "gate": wide, "up": wide}
        expected |= {"o": wide * residual, "down": narrow * residual}
        found = {name: float(blocks[name].std()) for name in expected}
        assert found == pytest.approx(expected, rel=0.05)
        ends = [float(tree[name].std()) for name in ("embed", "head")]
        assert ends == pytest.approx([embed, head], rel=0.05)
    ratio = trees[1]["head"] / trees[0]["head"]
    np.testing.assert_allclose(ratio, 0.25 / 8 / 0.02, rtol=1e-5)  # one draw, two deviations


def test_the_library_sees_one_leaf_per_layer_and_matrix(task):
    tree = task.gradients
    assert len(tree["blocks"]) == task.shape.n_layers
    assert tree["blocks"][1]["down"].shape == (task.shape.hidden, task.shape.dim)
    params = training_model.init(task.shape, jax.random.key(0), jnp.int32(0))
    again = training_model.stack(training_model.unstack(params))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    scales = {name for name, keep in training_model.is_matrix(params)["blocks"].items() if not keep}
    assert scales == {"attention_norm", "mlp_norm"}


# --- Figures --------------------------------------------------------------------------------------


def test_the_worst_leaf_is_the_one_with_a_large_error():
    rng = np.random.default_rng(0)
    leaves = {"a": (64, 64), "b": (2, 4096), "small": (64,), "c": (8192,)}
    exact = {name: rng.normal(size=size).astype(np.float32) for name, size in leaves.items()}
    exact["b"] *= 1e-3  # its error is hardly seen in the whole tree's
    errors, norms = [], []
    for relative in (0.0, 0.5):  # of two steps
        shares = {"a": 0.01, "b": relative, "small": 9.0, "c": 0.02}
        errors.append(training_run.squares({n: x * shares[n] ** 0.5 for n, x in exact.items()}))
        norms.append(training_run.squares(exact))
    names = list(training_run.large_leaves(exact))
    result = {
        "errors": np.stack(errors)[None], "norms": np.stack(norms)[None],
        "losses": np.ones((1, 2)), "validation": np.ones(1),
    }  # fmt: skip
    found = training.figures(result, names)
    assert names == ["a", "b", "c"]
    assert found["worst_leaf"] == pytest.approx([0.25])
    assert found["worst_leaf_name"] == "b"
    assert found["vnmse"] == pytest.approx([0.05 / 3], rel=0.1)


def test_a_leaf_without_gradient_has_no_relative_error():
    errors, norms = np.ones((1, 2, 2)), np.array([[[0.0, 4.0], [0.0, 4.0]]])
    assert training.leaf_errors(errors, norms).tolist() == [[0.0, 0.25]]


def test_curves_are_averaged_in_windows_and_early_follows_a_quarter():
    losses = np.arange(200.0)[None]
    ones = np.ones((1, 200, 1))
    result = {"errors": ones, "norms": ones, "losses": losses, "validation": np.array([np.nan])}
    found = training.figures(result, ["leaf"])
    assert found["training_loss"] == [[12.0 + 25 * i for i in range(8)]]
    assert found["early_loss"] == [74.5]
    assert found["validation_loss"] == [None]


def test_differences_are_paired():
    found = training.difference([1.01, 2.04, 3.09], [1.0, 2.0, 3.0])
    assert found["percent"] == pytest.approx(2.0)
    assert found["error"] == pytest.approx(1 / math.sqrt(3))
    assert training.difference([2.0], [1.0]) == {"percent": 100.0, "error": None}
    assert training.difference([2.0, None], [1.0, 1.0]) == {"percent": None, "error": None}
    row = {"summary": {"validation": {"percent": 100.0, "error": None}}}
    assert training_report.compared(row, "validation") == "+100.000 ± -"


# --- Files ----------------------------------------------------------------------------------------


def test_the_file_has_settings_figures_and_environment(folder, rows, task):
    document = json.loads((folder / "rows.json").read_text())
    (invocation,) = document["invocations"]
    assert invocation["command"].startswith("python benchmarks/evidence/training.py")
    assert f"jax {jax.__version__}" in invocation["versions"]
    assert {"device", "host", "started"} <= set(invocation)
    row = rows["unit", "dynamiq:5"]
    settings = row["settings"]
    assert settings["topology"] == "direct"
    assert (settings["steps"], settings["seeds"], settings["workers"]) == (STEPS, SEEDS, 8)
    assert settings["learning_rate"] == training.RATES["adamw", "unit"]
    assert re.search(r"DynamiQ\{'bits': 5.0.*'backend': 'jnp'.*Direct\{", settings["options"])
    per_seed = ("validation_loss", "early_loss", "training_loss", "vnmse", "worst_leaf")
    assert {len(row[name]) for name in per_seed} == {SEEDS}
    assert row["worst_leaf_name"] in training_run.large_leaves(task.gradients)
    assert not list(folder.glob("*.part"))


def test_the_table_has_all_rows_and_the_plot_is_one(folder, rows):
    text = (folder / "table.md").read_text()
    assert text.count("| dynamiq:5 | direct | 5.0") == 2
    assert "## micro, gpt2, adamw" in text
    assert "## micro, unit, adamw" in text
    assert f"{rows['unit', 'dynamiq:5']['summary']['validation']['percent']:+.3f} ±" in text
    assert "Python 3" in text
    assert (folder / "plot.png").read_bytes().startswith(PNG)


def test_kept_rows_are_not_trained_again(folder, untrained, monkeypatch):
    before = (folder / "rows.json").read_bytes()
    monkeypatch.setattr(training, "compile_program", lambda *_: pytest.fail("compiled"))
    again = invoke(*COMMAND, "--json", folder / "rows.json")
    assert again.exit_code == 0, again.output
    assert again.output.count("dynamiq:5") == 2
    assert (folder / "rows.json").read_bytes() == before


def test_commands_that_share_a_file_keep_each_others_rows(folder, tmp_path):
    first, second = (training.Record(tmp_path / "rows.json", {"command": c}) for c in "ab")
    kept = training.Record(folder / "rows.json", {"command": "c"}).rows
    for record, row in zip((first, second, first), kept, strict=False):
        record.add(row)
    second.add(kept[2])  # what both have trained is kept once
    read = training.Record(tmp_path / "rows.json", {})
    assert [row["settings"] for row in read.rows] == [row["settings"] for row in kept[:3]]
    assert [row["invocation"] for row in read.rows] == [0, 1, 0]
    assert [invocation["command"] for invocation in read.invocations] == ["a", "b"]


@pytest.mark.parametrize(
    "change",
    [("--seeds", 3), ("--steps", 9), ("--learning-rate", 1), ("--workers", 4)],
    ids=lambda c: c[0],
)
def test_other_settings_are_other_rows(folder, untrained, tmp_path, change):
    file = tmp_path / "rows.json"
    file.write_bytes((folder / "rows.json").read_bytes())
    ran = invoke(*COMMAND, *change, "--json", file)
    assert ran.exit_code == 1
    assert ran.output.count("out of memory") == 2  # the exact rows of both initialisations
    assert ran.output.count("no exact row") == 4
    assert file.read_bytes() == (folder / "rows.json").read_bytes()


def test_nothing_starts_after_the_time_is_over(untrained, tmp_path):
    ran = invoke(*COMMAND, "--json", tmp_path / "rows.json", "--until", 0)
    assert ran.exit_code == 1
    assert "goes on from here" in ran.output
    assert "left out" not in ran.output
    assert not (tmp_path / "rows.json").exists()


def test_programs_compile_ahead_in_order():
    started = []

    def build(i):
        started.append(i)
        return i

    ready = training.ahead([lambda i=i: build(i) for i in range(6)], 2)
    assert next(ready).result() == 0
    assert len(started) <= 3
    assert [future.result() for future in ready] == [1, 2, 3, 4, 5]


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "huge"], "--models 'huge': pass some of micro, tiny"),
        (["--inits", "gpt3"], "--inits 'gpt3': pass some of gpt2, unit"),
        (["--optimisers", "adam"], "--optimisers 'adam': pass some of adamw, sgd"),
        (["--methods", "zip:5"], "method 'zip:5' is not known: pass some of exact, bf16-psum"),
        (["--methods", "mxfp8:5"], "mxfp8 has no choice of bits: write mxfp8"),
        (["--methods", "dynamiq:x"], "'x' is not a number of bits: write for example 5"),
        (["--methods", "dynamiq:1"], "bits=1.0 is below"),
        (["--topologies", "star"], "topology 'star' is not known: pass one of direct, ring"),
        (["--topologies", "hierarchical"], "'hierarchical' reduces over two axes"),
        (["--topologies", "butterfly", "--workers", 6], "power of two"),
        (["--plot", "no/such/folder.png"], "there is no folder no/such: create it first"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_refusals_say_what_to_pass(arguments, message, tmp_path):
    ran = invoke("--models", "micro", *arguments, "--json", tmp_path / "rows.json")
    assert ran.exit_code == 2
    assert message in plain(ran.output)
    assert not (tmp_path / "rows.json").exists()


def test_an_optax_without_muon_is_named(monkeypatch, tmp_path):
    monkeypatch.delattr(training_run.contrib, "muon")
    options = ["--models", "micro", "--optimisers", "adamw,muon"]
    ran = invoke(*options, "--json", tmp_path / "rows.json")
    assert ran.exit_code == 2
    assert "lacks it or its options; upgrade optax" in plain(ran.output)
