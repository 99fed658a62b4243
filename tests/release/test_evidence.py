"""benchmarks/evidence: trainings that are paired, and pages that have what the results say."""

import json
import re

import jax
import jax.numpy as jnp
import llm_model
import numpy as np
import pages
import pytest
import training
import typer
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
STEPS, SEEDS = 8, 2
SHARDED, FSDP = "dynamiq:8/dynamiq:8", "dynamiq:8/dynamiq:8/whole"
METHODS = f"dynamiq:5,f32,{SHARDED},{FSDP}"
COMMAND = ["--models", "micro", "--methods", METHODS, "--steps", STEPS]


def invoke(*arguments):
    app = typer.Typer()
    app.command()(training.main)
    return CliRunner().invoke(app, list(map(str, (*arguments, "--seeds", SEEDS))))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The command's file for a tiny model."""
    file = tmp_path_factory.mktemp("training") / "rows.json"
    ran = invoke(*COMMAND, "--json", file)
    assert ran.exit_code == 0, ran.output
    return file


@pytest.fixture(scope="module")
def rows(file):
    """Its rows, by (init, method)."""
    kept = json.loads(file.read_text())["rows"]
    return {(row["settings"]["init"], row["settings"]["method"]): row for row in kept}


@pytest.mark.parametrize("kind", training.INITS)
def test_runs_are_paired_and_learn_and_errors_are_those_of_the_method(rows, kind):
    assert len(rows) == 10
    exact, ours, f32, sharded, fsdp = (
        rows[kind, name] for name in ("exact", "dynamiq:5", "f32", SHARDED, FSDP)
    )
    assert exact["summary"]["validation"] == {"percent": 0.0, "error": 0.0}
    assert abs(f32["summary"]["validation"]["percent"]) < 1e-3
    ratio = np.divide(ours["validation_loss"], exact["validation_loss"])
    found = ours["summary"]["validation"]
    assert found["percent"] == pytest.approx(100 * (ratio.mean() - 1))
    assert found["error"] == pytest.approx(100 * np.abs(ratio[0] - ratio[1]) / 2)
    # Far less than seeds differ among each other: the runs are paired.
    assert 1e-4 < np.abs(ratio - 1).max() < 0.02 and np.ptp(exact["validation_loss"]) > 1e-3
    assert max(max(row["validation_loss"]) for row in (exact, ours, fsdp, sharded)) < 5.4
    assert exact["vnmse"] == exact["worst_leaf"] == [0.0, 0.0]
    assert 0 < max(f32["worst_leaf"]) < 1e-12
    assert 1e-5 < min(ours["vnmse"]) and max(ours["vnmse"]) < 0.1
    assert all(np.greater(ours["worst_leaf"], ours["vnmse"]))
    assert exact["bits_per_coord"] == f32["bits_per_coord"] == 32
    assert 5 < ours["bits_per_coord"] < 5.2
    assert fsdp["bits_per_coord"] == sharded["bits_per_coord"] == 8
    apart = {row["summary"]["validation"]["percent"] for row in (ours, fsdp, sharded)}
    assert len(apart) == 3 and 0 < min(map(abs, apart)) and max(map(abs, apart)) < 1


def test_rows_that_the_file_has_are_not_trained_again(file, monkeypatch):
    monkeypatch.setattr(training, "run_seeds", None)
    before = file.read_text()
    assert invoke(*COMMAND, "--json", file).exit_code == 0
    assert file.read_text() == before
    assert invoke(*COMMAND[:-1], STEPS + 1, "--json", file).exit_code != 0


def test_the_worst_leaf_is_the_one_with_a_large_error():
    errors, norms = np.array([[[0.1, 0.0, 1], [0.1, 0.5, 1]]]), np.array([[[10.0, 1, 0]] * 2])
    result = {"losses": np.arange(100.0)[None], "validation": np.array([np.nan])}
    found = training.figures(result | {"errors": errors, "norms": norms})
    assert found["worst_leaf"] == pytest.approx([0.25])
    assert found["vnmse"] == pytest.approx([(1.1 + 1.6) / 22])
    assert found["training_loss"] == [[12.0, 37.0, 62.0, 87.0]]
    assert found["validation_loss"] == [None]


def test_differences_are_paired():
    found = training.difference([1.01, 2.04, 3.09], [1.0, 2.0, 3.0])
    assert (found["percent"], found["error"]) == pytest.approx((2.0, 3**-0.5))
    assert training.difference([2.0], [1.0]) == {"percent": 100.0, "error": None}
    assert training.difference([2.0, None], [1.0, 1.0]) == {"percent": None, "error": None}


def test_the_model_is_that_of_the_example():
    """Equal parameters have equal losses: norms, positions, attention and feed-forward agree."""
    shape = training.MODELS["micro"]
    names = ("vocab_size", "seq_len", "n_layers", "dim", "n_heads", "hidden", "dtype")
    config = llm_model.Config(
        **{name: getattr(shape, name) for name in names}, n_kv_heads=shape.n_heads
    )
    params = training.init(shape, jax.random.key(0), jnp.int32(1))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    places = {"embed": "embed.embedding", "head": "head.kernel", "norm": "norm.scale"}
    places |= {name: f"attention.{name}.kernel" for name in "qkvo"}
    places |= {name: f"mlp.{name}.kernel" for name in ("gate", "up", "down")}
    places |= {f"{name}_norm": f"{name}_norm.scale" for name in ("attention", "mlp")}
    moved = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        start, _, last = jax.tree_util.keystr(path, simple=True, separator=".").rpartition(".")
        moved[f"{start}.{places[last]}".strip(".")] = leaf

    def take(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return moved.pop(name).reshape(leaf.shape)

    theirs = jax.eval_shape(lambda: llm_model.init_params(config, jax.random.key(0)))
    theirs = jax.tree_util.tree_map_with_path(take, theirs)
    assert not moved
    tokens = jax.random.randint(jax.random.key(2), (3, shape.seq_len + 1), 0, shape.vocab_size)
    expected = llm_model.make_loss(config)(theirs, tokens)
    assert training.loss(shape, params, tokens) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "tny"], "--models 'tny': pass some of"),
        (["--methods", "dynamique:5"], "method 'dynamique:5' is not known"),
        (["--methods", "mxfp8", "--topologies", "torus"], "topology 'torus' is not known"),
        (["--methods", "mxfp8/mxfp8/bf16"], "pass GRADIENTS/DIFFERENCES"),
    ],
)
def test_wrong_options_are_refused(arguments, complaint):
    ran = invoke(*arguments)
    output = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", ran.output).split())
    assert ran.exit_code == 2 and complaint in output


# --- Pages ----------------------------------------------------------------------------------------


def test_the_pages_have_the_tables_of_today():
    for path, text in pages.texts().items():
        assert path.read_text() == text, f"{path}: run make figures"
