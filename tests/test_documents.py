"""Pages agree with files: figures, names, commands, and where the site has them."""

import inspect
import json
import pkgutil
import re
from pathlib import Path

import pages
import pytest

import dynamiq_jax as dq

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "evidence" / "results"
PACKAGES = [file.parent for file in (ROOT / "dynamiq_jax").rglob("__init__.py")]
MOST_WORDS = 20_000
OUTSIDE = ["README.md", "BUILD.md", "CHANGELOG.md"]


def test_tables_are_those_of_the_files():
    """`make figures` writes those of README and results."""
    for path, text in pages.texts().items():
        assert path.read_text() == text, f"{path}: run make figures"


def test_the_readme_has_the_newest_steps():
    """Its rows are cells of the whole table, rounded."""
    steps = json.loads((RESULTS / "steps.json").read_text())["runs"]
    table = re.search(r"<!-- table: ways -->\n(.*?)<!-- end -->", README, re.DOTALL)
    rows = [line[1:-1].split("|") for line in table[1].strip().splitlines()[2:]]
    (host,) = (r["ms"] for r in steps if (r["links"], r["cards"]) == ("25 Gb/s", "2 × H200"))
    for row, way in zip(rows, ["bf16-psum", "bf16-zero", "dp:mxfp4", "auto:5"], strict=False):
        assert row[1] == f"{host[way][0]:.0f}"
    assert len(rows) == 9 and all(len(row) == 4 for row in rows)


PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in ("results", "claims")])
def test_figures_of_gpus_stand_in_results(page):
    """Other pages link there: none names a card with a time."""
    assert not re.search(r"\bH[12]00\b.*\d", re.sub(r"Hopper", "", page.read_text()))


@pytest.mark.parametrize("folder", [".", "docs", "benchmarks", "benchmarks/evidence", "examples"])
def test_nothing_refers_to_a_commit(folder):
    """A page tells how things are, and a script that is gone is not told of."""
    for path in (p for kind in ("*.md", "*.py", "*.sh") for p in (ROOT / folder).glob(kind)):
        assert not re.search(r"[Cc]ommit\s+`?[0-9a-f]{7}\b|git show", path.read_text()), path


def test_no_page_has_marks_of_a_merge():
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")):
        assert not re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE), path


def test_pages_are_short():
    """A page has one job, and all of them together are read in an hour."""
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words
    assert len(README.split()) <= 800


def test_the_reference_has_every_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^::: dynamiq_jax\.(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted([*dq.__all__, "optax"])


PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (dq, dq.equinox, dq.optax, dq.nnx)
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
