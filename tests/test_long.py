"""benchmarks/evidence/long.py: training that goes on, and text that is gathered."""

import gzip
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "evidence"))
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import long
import training

NANO = training.Shape(256, 8, 1, 64, 1, 64, jnp.float32, 1, 4, 8, 1)  # its matrices are compressed
pytestmark = pytest.mark.usefixtures("dtypes_promoted")


@pytest.fixture(autouse=True)
def nano(monkeypatch):
    monkeypatch.setitem(training.MODELS, "nano", NANO)


def run(folder, method, *arguments, code=0):
    """The row after a command that goes on from the folder's checkpoint."""
    files = ("--json", folder / "row.json", "--checkpoint", folder / "state.npz")
    fixed = ("--model", "nano", "--steps", 4, "--every", 2, "--sequences", 8, "--method", method)
    ran = CliRunner().invoke(long.app, [*map(str, ("train", *fixed, *files, *arguments))])
    assert ran.exit_code == code, ran.output
    return ran.output if code else json.loads((folder / "row.json").read_text())


SHARDED = "dynamiq:8/dynamiq:8"


@pytest.mark.release
@pytest.mark.parametrize("method", ["bf16", "dynamiq:5", SHARDED, "dynamiq:8/dynamiq:8/whole"])
def test_a_run_that_goes_on_has_the_losses_of_one_that_did_not_stop(tmp_path, method):
    parts, once = tmp_path / "parts", tmp_path / "once"
    first = run(parts, method, "--seconds", 0)
    assert len(first["losses"]) == 2  # a part at least
    found, expected = run(parts, method), run(once, method)
    assert found["losses"] == expected["losses"] and len(found["losses"]) == 4
    figures = [
        [(part["step"], part["validation"], part.get("errors")) for part in row["parts"]]
        for row in (found, expected)
    ]
    assert figures[0] == figures[1] and [step for step, *_ in figures[0]] == [2, 4]
    assert found["settings"] == expected["settings"] and len(found["invocations"]) == 2
    assert found["settings"]["tokens"] == 4 * 8 * 8 and found["parts"][0]["validation"] < 5.8
    output = run(parts, method, "--seed", 1, code=2)
    assert "other settings" in " ".join(output.replace("│", "").split())


@pytest.mark.release
def test_methods_train_alike_and_two_orders_of_a_sum_differ_least(tmp_path):
    methods = "bf16", "bf16-reversed", "dynamiq:5", SHARDED
    rows = {method: run(tmp_path / method, method) for method in methods}
    band, ours, sharded = (
        np.subtract(rows[method]["losses"], rows["bf16"]["losses"]) for method in methods[1:]
    )
    assert band[0] == ours[0] == sharded[0] == 0  # the same start and the same batch
    assert np.abs(band).max() <= np.abs(ours).max() < 0.02 and 0 < np.abs(sharded).max() < 0.02
    errors = {method: row["parts"][-1].get("errors") for method, row in rows.items()}
    assert errors[SHARDED] is None
    squares = [errors[method]["squares"] / errors[method]["exact"] for method in methods[:3]]
    assert 0 < squares[0] < 1e-4 < squares[2] < 0.1 and squares[0] != squares[1]
    assert 0.5 < errors["dynamiq:5"]["sum"] / errors["dynamiq:5"]["squares"] < 2


@pytest.mark.release
def test_a_sharded_run_goes_on_with_other_workers(tmp_path):
    run(tmp_path, SHARDED, "--until", 2)
    with np.load(tmp_path / "state.npz") as kept:
        before = dict(kept)
    other = run(tmp_path, SHARDED, "--workers", 4, "--until", 2)
    with np.load(tmp_path / "state.npz") as kept:
        assert before.keys() == kept.keys()
        for name in before.keys() - {"record"}:
            np.testing.assert_array_equal(kept[name], before[name], err_msg=name)
    found = run(tmp_path, SHARDED, "--workers", 4)
    assert [part["workers"] for part in found["parts"]] == [8, 4]
    expected = run(tmp_path / "eight", SHARDED)
    assert found["losses"][:2] == other["losses"] == expected["losses"][:2]
    np.testing.assert_allclose(found["losses"][2:], expected["losses"][2:], rtol=1e-3)
    assert found["losses"][3] != expected["losses"][3]


def test_gathered_text_is_there_once_and_the_same_whatever_files_are_called(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(long, "HELD_OUT_PERCENT", 50)
    texts = [f"def function_{i}():\n    return {i * i}\n" * 9 for i in range(20)]
    shared = "a paragraph in every file " * 9
    found = []
    for root in (tmp_path / "one", tmp_path / "two"):
        (root / "share" / "doc").mkdir(parents=True)
        for i, text in enumerate(texts):
            name = i if root.name == "one" else 99 - i
            (root / f"{name}.py").write_text(f"{text}\n\n{shared}")
            (root / f"{name}-again.py").write_text(f"{text}\n\n{shared}")
        (root / "picture.png").write_text("a file of another kind " * 9)
        (root / "binary.txt").write_bytes(b"\xff\xfe" * 99)
        (root / "share" / "doc" / "changes.gz").write_bytes(gzip.compress(b"compressed text " * 9))
        file = tmp_path / f"{root.name}.xz"
        arguments = ["gather", str(file), "--roots", str(root), "--vocab-size", "300"]
        ran = CliRunner().invoke(long.app, arguments)
        assert ran.exit_code == 0 and "21 files" in ran.output, ran.output
        found.append(file.read_bytes())
    assert found[0] == found[1]
    corpus = long.read_text(file, 300)
    sizes = corpus.train.size, corpus.validation.size
    assert min(sizes) > 300 and corpus.train.dtype == np.int32 and corpus.train.max() < 300
    assert sum(sizes) < len("".join(texts) + shared) / 2  # most twins and paragraphs are gone
    with pytest.raises(ValueError, match=r"has 300 ids, the model 256: gather again"):
        long.read_text(file, 256)
