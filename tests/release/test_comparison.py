"""docs/comparison.md has what the files of evidence/results say. Nothing is trained here."""

import re
import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "evidence"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import comparison
import llm_model

from dynamiq_jax.commands.bench import contenders

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"


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


def test_the_pages_have_the_tables_of_today(texts):
    for path, own in comparison.pages(texts).items():
        page = path.read_text()
        assert page == comparison.filled(page, own), "run comparison.py --write"


def test_differences_in_the_text_are_those_of_the_tables(texts):
    own = comparison.pages(texts)[comparison.PAGE]
    page = comparison.filled(comparison.PAGE.read_text(), dict.fromkeys(own, ""))
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


def test_a_repeated_exact_mean_differs_by_what_the_page_says():
    """The commands of 125 M have one each, and all else is alike."""
    (file,) = comparison.LOSSES["125m"].files
    kept = comparison.load(comparison.RESULTS / file)["rows"]
    rows = [row for row in kept if row["settings"]["method"] == "exact"]
    assert [row["invocation"] for row in rows] == [0, 1, 2, 3]
    assert all(row["settings"] == rows[0]["settings"] for row in rows)
    assert rows[0]["settings"]["method"] == "exact"
    first, second, *beside = (np.array(row["validation_loss"]) for row in rows)
    np.testing.assert_array_equal(*beside)
    apart = [100 * np.abs(p / q - 1) for p, q in combinations((first, second, beside[0]), 2)]
    means = [pair.mean() for pair in apart]
    told = min(means), max(means), np.max(apart)
    page = " ".join(comparison.PAGE.read_text().split())
    assert "they end {:.2f} to {:.2f}% apart, at most {:.2f}% by seed".format(*told) in page


def test_liec_with_sgd_loses_what_the_page_says():
    kept = comparison.load(comparison.RESULTS / "comparison.json")["rows"]
    sgd = [row for row in kept if row["settings"]["optimiser"] == "sgd"]
    loss = {row["settings"]["method"]: comparison.loss(row) for row in sgd}
    page = " ".join(comparison.MORE.read_text().split())
    said = "it loses more: {liec:.1f} %, and MinMax with as many bits {minmax:.1f} %"
    assert said.format(liec=loss["liec"], minmax=loss["minmax:4"]) in page


def test_rows_are_compared_with_the_exact_mean_of_their_own_command():
    rows = {r["settings"]["method"]: r for r in comparison.loss_rows(comparison.LOSSES["125m"])}
    assert rows["mxfp4"]["invocation"] != rows["dynamiq:4"]["invocation"]
    assert rows["mxfp4"]["exact"] != rows["dynamiq:4"]["exact"]
    for row in rows.values():
        apart = 100 * (np.array(row["validation_loss"]) / row["exact"] - 1)
        assert apart.mean() == pytest.approx(comparison.loss(row))
    early = rows["mxfp4"]["summary"]["early"]["percent"]
    assert f"early in the training, above the exact mean by {early:.2f} %" in " ".join(
        comparison.PAGE.read_text().split()
    )


# --- Times to a loss ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def to_loss(texts):
    """Cells of the table's rows by the method's name: bits, last loss, steps, times."""
    lines = re.findall(r"^\| .*`([\w:.-]+)` \| (.*) \|$", texts["time-to-loss"], re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def test_times_to_a_loss_are_those_of_the_files(to_loss):
    """DynamiQ at 5 bits over host memory by hand; the target is between the last two windows."""
    rows = comparison.load(comparison.RESULTS / "time_to_accuracy_losses.json")["rows"]
    found = {row["settings"]["method"]: np.mean(row["training_loss"], axis=0) for row in rows}
    target = 1.005 * found["bf16-psum"][-1]

    def steps(method):
        before, last = found[method][-2:]
        assert before > target >= last
        return 25 * (len(found[method]) - 1.5 + (before - target) / (before - last))

    run = comparison.load(comparison.TRANSPORTS)["runs"][1]
    assert run["links"] == "host memory"
    times = {row["method"]: row for row in run["rows"]}
    none, psum = comparison.load(comparison.STEPS)["runs"][0]["rows"][:2]
    assert (none["method"], psum["method"]) == ("none", "bf16-psum")

    def step_ms(name):
        """With 2 GPUs bf16 psum sends as many bytes as the gradients have."""
        row = times[name]
        return none["step_ms"] + row["time_us"] / 1e3 * psum["wire_bytes"] / row["size_bytes"]

    share = steps("dynamiq:5") / steps("bf16-psum")
    relative = share * step_ms("dynamiq:5 direct") / step_ms("bf16 psum")
    result = comparison.times_to_loss()["host memory"]["dynamiq:5"]
    assert result.relative == pytest.approx(relative, rel=1e-12)
    assert to_loss["dynamiq:5"][2] == f"{share:.2f}"
    assert to_loss["dynamiq:5"][4] == f"{relative:.2f}"
    assert relative < 0.7  # it sends a third


def test_bf16_psum_is_the_row_of_ones(to_loss):
    assert to_loss["bf16-psum"] == ["16.00", "", *["1.00"] * 4]


def test_the_fastest_over_host_memory_come_first_and_those_that_miss_the_loss_last(to_loss):
    reached = [cells[2] != "not reached" for cells in to_loss.values()]
    assert reached == sorted(reached, reverse=True)
    assert True in reached and False in reached
    times = [float(cells[4]) for cells in to_loss.values() if cells[2] != "not reached"]
    assert times == sorted(times) and len(set(times)) > 3
    missed = [cells for cells in to_loss.values() if cells[2] == "not reached"]
    losses = [float(cells[1].split()[0]) for cells in missed]
    assert losses == sorted(losses) and losses[0] >= comparison.TOLERANCE
    assert all(cells[3:] == ["–"] * 3 for cells in missed)


def test_methods_have_a_curve_and_times_of_their_own(to_loss):
    curves = set(comparison.curves())
    timed = set.intersection(*map(set, comparison.step_times().values()))
    assert set(to_loss) == curves & timed
    assert {"dynamiq:5", "mxfp4", "thc", "bf16-psum"} <= set(to_loss)


def test_gradients_are_those_of_the_model():
    """2 bytes for each of 1.1 B parameters."""
    shapes = jax.eval_shape(
        partial(llm_model.init_params, llm_model.CONFIGS["1b"]), jax.random.key(0)
    )
    coords = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert comparison.step_alone()[1] == 2 * coords


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
    assert "liec" in small  # whose workers have errors of their own
    for method in set(small) - {"bf16-psum", "liec"}:
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
    monkeypatch.setattr(comparison, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(comparison, "MORE", tmp_path / "more.md")
    expected = {}
    for path, own in comparison.pages(texts).items():
        empty = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in own)
        path.write_text(empty)
        expected[path] = comparison.filled(empty, own)
    assert invoke("--write").exit_code == 0
    assert all(path.read_text() == text for path, text in expected.items())


@pytest.mark.parametrize(
    ("number", "files", "lines"),
    [
        (0, ("time_to_accuracy_losses.json", "learning_rates.json"), 10),
        (1, ("training_125m.json", "learning_rates_125m.json"), 12),
    ],
)
def test_learning_rates_are_those_of_the_files(number, files, lines):
    """The tables of learning_rates.md, each row beside its own file's exact one."""
    rows = {}
    for name in files:
        kept = comparison.load(comparison.RESULTS / name)["rows"]
        for row in kept:
            key = row["settings"]["method"], row["settings"]["learning_rate"]
            rows.setdefault(key, (row, comparison.exact_row(row, kept)))
    page = (comparison.RESULTS / "learning_rates.md").read_text()
    table = re.findall(r"(?:^\|.*\n)+", page, re.M)[number]
    titles = {"MXFP4": "mxfp4", "MXFP8": "mxfp8"}
    titles |= {f"DynamiQ, {bits} bits": f"dynamiq:{bits}" for bits in (3, 4, 5)}
    titles |= {"DynamiQ, 3.5 bits, dither, scale axis": "dynamiq-dither-axis:3.5"}
    titles |= {"MXFP4, random rounding": "mxfp4-stochastic"}
    titles |= {"MXFP4, error feedback EF14": "mxfp4-ef14"}
    rate, found = None, table.splitlines()[2:]
    assert len(found) == lines
    for line in found:
        peak, exact, title, *said = (cell.strip() for cell in line.split("|")[1:-1])
        rate = float(peak) if peak else rate
        row, base = rows[titles[title], rate]

        def last(row):
            return np.array(row["training_loss"])[:, -1]

        apart = 100 * (last(row) / last(base) - 1)
        training = comparison.signed(apart.mean(), apart.std(ddof=1) / apart.size**0.5)
        assert said == [comparison.loss_text(row), training]
        if peak:
            values = np.mean(base["validation_loss"]), last(base).mean()
            assert exact == " / ".join(f"{value:.3f}" for value in values)


def test_what_mxfp4_gains_at_the_best_rate_is_that_of_the_file():
    """The sentences under the second table of learning_rates.md."""
    kept = comparison.load(comparison.RESULTS / "learning_rates_125m.json")["rows"]
    rows = [row for row in kept if row["settings"]["learning_rate"] == 1.2e-3]
    found = {row["settings"]["method"]: row for row in rows}
    exact = found["exact"]["validation_loss"]
    gains = 100 * (1 - np.divide(found["mxfp4"]["validation_loss"], exact))
    pair = ({**found[name], "exact": exact} for name in ("mxfp4", "dynamiq:5"))
    beside = comparison.signed(*comparison.pair_difference(*pair))
    page = " ".join((comparison.RESULTS / "learning_rates.md").read_text().split())
    said = f"Every seed gains, by {gains.min():.1f} to {gains.max():.1f}%; beside DynamiQ at 5 bits"
    assert f"{said} {beside}%" in page
