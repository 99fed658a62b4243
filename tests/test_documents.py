"""Pages agree with files: figures, names, commands, and where the site has them."""

import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest

import dynamiq_jax as dq

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "evidence" / "results"
SPEEDUPS = json.loads((RESULTS / "speedups.json").read_text())
PACKAGES = [file.parent for file in (ROOT / "dynamiq_jax").rglob("__init__.py")]
OUTSIDE = ["README.md", "BUILD.md", "CHANGELOG.md"]


@pytest.mark.parametrize("row", SPEEDUPS["rows"], ids=lambda row: f"{row['links']} {row['size']}")
def test_all_reduces_on_four_gpus_are_those_of_the_file(row):
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"{us}" in performance for us in [row["psum_us"], *row["bits_us"].values()])
    command = SPEEDUPS["commands"][row["command"]].removeprefix("NCCL_P2P_DISABLE=1 ")
    assert command in " ".join(performance.split())


@pytest.mark.parametrize(
    ("line", "way"), [*enumerate(["bf16-psum", "dp:5", "zero-pipeline:5/2.5", "fsdp-keep:5/8"])]
)
def test_steps_are_those_of_the_file(line, way):
    """Whole milliseconds; FSDP over host memory is without kept payloads, over NVLink in bf16."""
    table = re.findall(r"^\| .*", README.split("## Which way")[1], re.MULTILINE)[1:]
    cells = [cell.strip(" *") for cell in table[line].split("|")[3:6]]
    runs = json.loads((RESULTS / "ways.json").read_text())["runs"]
    columns = ("25 Gb/s", "2 × H200"), ("host memory", "2 × H200"), ("NVLink", "4 × H200")
    for column, cell in zip(columns, cells, strict=True):
        (ms,) = (run["ms"] for run in runs if (run["links"], run["cards"]) == column)
        default = "bf16-fsdp" if column[0] == "NVLink" and way.startswith("fsdp") else way
        found = ms.get(default) or ms[way.replace("-keep", "")]
        assert cell == f"{found[0]:.0f}"


@pytest.mark.parametrize("size", ["1 GiB", "256 MiB", "64 MiB", "16 MiB"])
def test_all_reduces_on_two_gpus_are_those_of_the_file(size):
    text = (ROOT / "docs" / "performance.md").read_text()
    lines = re.findall(rf"^\| {size} \| (.*) \|$", text, re.MULTILINE)
    kept = json.loads((RESULTS / "all_reduce_two_gpus.json").read_text())["rows"]
    number, unit = size.split()
    size_bytes = int(number) << {"GiB": 30, "MiB": 20}[unit]
    psum, *ours = (row for row in kept if row["size_bytes"] == size_bytes)
    cells = [f"{psum['time_us']:.0f}"]
    cells += [f"{r['time_us']:.0f} ({r['p10_us']:.0f}–{r['p90_us']:.0f})" for r in ours]
    cells.append(" / ".join(f"{row['speedup']:.2f}" for row in ours))
    assert " | ".join(cells) in lines


def test_the_reference_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^::: dynamiq_jax\.(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted([*dq.__all__, "optax"])


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (dq, dq.optax, dq.nnx)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_every_argument_and_the_result(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    arguments = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^  (\w+): ", arguments, re.MULTILINE)
    assert listed == list(inspect.signature(PUBLIC[name]).parameters)
    assert "\nReturns:\n  " in text
    if "optax" not in name:
        assert "\nRaises:\n  " in text


GRADIENTS = ["value_and_grad", "nnx.value_and_grad", "overlapped", "fsdp"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_first_sentence_says_whose_loss_it_is(name):
    first = inspect.getdoc(PUBLIC[f"dynamiq_jax.{name}"]).splitlines()[0].lower()
    assert "worker's" in first
    assert "global batch's" in first or name == "overlapped"  # which runs in maps alone


def test_the_reference_has_what_optax_exports():
    page = (ROOT / "docs" / "api.md").read_text()
    (members,) = re.findall(r"^::: dynamiq_jax\.optax\n.*?members: \[(.*?)\]", page, re.M | re.S)
    alone = re.findall(r"^::: dynamiq_jax\.optax\.(?:sharded\.)?(\w+)$", page, re.MULTILINE)
    assert sorted(members.split(", ") + alone) == sorted(dq.optax.__all__)


@pytest.mark.parametrize("kind", ["*.md", "*.py"])
def test_pages_and_docstrings_name_what_exists(kind):
    """But for the changes, which name what was moved."""
    folders = [ROOT, ROOT / "docs"] if kind == "*.md" else [ROOT / "examples", *PACKAGES]
    files = [file for folder in folders for file in folder.glob(kind)]
    for file in [file for file in files if file.name != "CHANGELOG.md"]:
        for name in re.findall(
            r"\b(?:dq|dynamiq_jax)((?:\.(?!py\b|json\b)\w+)+)", file.read_text()
        ):
            pkgutil.resolve_name("dynamiq_jax" + name)


def test_the_site_lists_every_page():
    """`make docs` follows links; this needs no MkDocs."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert len(set(listed)) == len(listed)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(listed)


@pytest.mark.parametrize(
    "page", [*OUTSIDE, *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^()\s#:]+)(?:#[^()\s]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    folders = "docs|examples|benchmarks|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+\.(?:md|py|sh|json))`", text):
        assert (ROOT / name).exists(), name
