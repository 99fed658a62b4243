"""docs/comparison.md has what the files of benchmarks/results say. Nothing is trained here."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import comparison

from dynamiq_jax.bench import contenders

PERFORMANCE = Path(__file__).parents[1] / "docs" / "performance.md"


def invoke(*arguments):
    app = typer.Typer()
    app.command()(comparison.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def texts():
    return comparison.blocks()


@pytest.fixture(scope="module")
def small():
    """Rows of the table of all methods, by method."""
    rows = comparison.loss_rows(comparison.LOSSES["small"])
    return {row["settings"]["method"]: row for row in rows}


def test_the_page_has_the_tables_of_today(texts):
    page = comparison.PAGE.read_text()
    assert page == comparison.filled(page, texts), "run python benchmarks/comparison.py --write"


def test_differences_in_the_text_are_those_of_the_tables(texts):
    page = comparison.filled(comparison.PAGE.read_text(), dict.fromkeys(texts, ""))
    prose = " ".join(page.split())
    told = re.findall(r"[+−]\d+\.\d+ ± \d+\.\d+", prose)
    assert told
    assert all(any(figure in text for text in texts.values()) for figure in told)


@pytest.mark.parametrize("name", comparison.LOSSES)
def test_rows_of_a_group_are_sorted_by_loss(name):
    rows = comparison.loss_rows(comparison.LOSSES[name])
    groups = [comparison.group(row) for row in rows]
    assert groups == sorted(groups)
    for number in set(groups):
        losses = [comparison.loss(row) for row in rows if comparison.group(row) == number]
        assert losses == sorted(losses)


def test_rows_of_one_table_saw_the_same_text_and_machine():
    for chosen in comparison.LOSSES.values():
        rows = comparison.loss_rows(chosen)
        assert len({row["settings"]["text"] for row in rows}) == 1
        assert {row["settings"]["platform"] for row in rows} == {chosen.platform}


@pytest.mark.parametrize("other", ["clt-k-memory", "mxfp4", "perm-k"])
def test_a_pair_is_the_difference_of_its_rows(small, other):
    """Its mean is that of the rows'; its error is not: seeds are paired."""
    row, beside = small[other], small["dynamiq:5"]
    apart, error = comparison.pair_difference(row, beside)
    assert apart == pytest.approx(comparison.loss(row) - comparison.loss(beside))
    assert error > 0
    assert comparison.pair_difference(row, row) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("method", "bytes_per_coord"),
    [
        ("dynamiq:5", 0), ("mxfp4", 0), ("perm-k", 0), ("bf16-psum", 0), ("dynamiq-ef14:3", 4),
        ("dynamiq-ef21:3", 8), ("marsit", 4), ("clt-k-memory", 4), ("arc-top-k-memory", 4),
    ],
)  # fmt: skip
def test_state_is_what_the_classes_say(method, bytes_per_coord):
    topology = "native" if contenders.native_only(method) else "direct"
    found = comparison.state_bytes_per_coord(method, topology, "tiny", 8)
    assert found == pytest.approx(bytes_per_coord, abs=0.1)


def test_every_row_has_an_error_and_a_title(small):
    errors = comparison.error_texts()
    for method in set(small) - {"bf16-psum"}:
        assert comparison.error_text(method, errors), method


def test_times_are_those_of_the_page_of_performance():
    text = PERFORMANCE.read_text()
    joined = " ".join(text.split())
    for row in comparison.load(comparison.TIMES)["rows"]:
        assert row["command"].removeprefix("NCCL_P2P_DISABLE=1 ") in joined
        assert str(row["psum_us"]) in text
        assert all(str(us) in text for us in row["us"].values())


def test_an_unknown_or_missing_block_is_an_error():
    with pytest.raises(ValueError, match=r"the page has the blocks \['a'\]"):
        comparison.filled("<!-- table: a -->\n<!-- end -->", {"b": "text"})
    assert comparison.filled("x\n<!-- table: a -->\n<!-- end -->\ny", {"a": "text"}) == (
        "x\n<!-- table: a -->\n\ntext\n\n<!-- end -->\ny"
    )


def test_the_command_prints_what_it_writes(texts, tmp_path, monkeypatch):
    ran = invoke()
    assert ran.exit_code == 0, ran.output
    assert all(text in ran.stdout for text in texts.values())
    empty = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in texts)
    page = tmp_path / "page.md"
    page.write_text(empty)
    monkeypatch.setattr(comparison, "PAGE", page)
    assert invoke("--write").exit_code == 0
    assert page.read_text() == comparison.filled(empty, texts)


def test_learning_rates_are_those_of_the_files():
    """The table of docs/training-quality.md."""
    rows = {}
    for name in ("time_to_accuracy_losses.json", "learning_rates.json"):
        for row in json.loads((comparison.RESULTS / name).read_text())["rows"]:
            rows[row["settings"]["method"], row["settings"]["learning_rate"]] = row
    page = (comparison.PAGE.parent / "training-quality.md").read_text()
    page = page[page.index("## Learning rates") : page.index("## Error feedback")]
    titles = {"DynamiQ, 5 bits": "dynamiq:5", "MXFP4": "mxfp4", "MXFP8": "mxfp8"}
    titles |= {"DynamiQ, 3.5 bits, dither, scale axis": "dynamiq-dither-axis:3.5"}
    titles |= {"MXFP4, random rounding": "mxfp4-stochastic"}
    titles |= {"MXFP4, error feedback EF14": "mxfp4-ef14"}
    rate, count = None, 0
    for line in re.findall(r"^\| *(.*?) *\|$", page, re.M)[2:]:
        peak, exact, title, *said = (cell.strip() for cell in line.split("|"))
        rate = float(peak) if peak else rate
        base, row = rows["exact", rate], rows[titles[title], rate]

        def last(row):
            return np.array(row["training_loss"])[:, -1]

        apart = 100 * (last(row) / last(base) - 1)
        training = comparison.signed(apart.mean(), apart.std(ddof=1) / apart.size**0.5)
        assert said == [comparison.loss_text(row), training]
        if peak:
            values = np.mean(base["validation_loss"]), last(base).mean()
            assert exact == " / ".join(f"{value:.3f}" for value in values)
        count += 1
    assert count == 10
