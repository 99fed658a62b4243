"""Docstrings begin with the thing that they describe."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_SUBJECT = re.compile(r"(Of|Those|What|The same|Likewise)\b")


def docstrings(file: Path):
    """All strings that stand alone as statements, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        for line in (
            getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        ):
            value = getattr(line, "value", None)
            if isinstance(line, ast.Expr) and isinstance(value, ast.Constant):
                if isinstance(value.value, str):
                    yield line.lineno, value.value.strip()


FOLDERS = "dynamiq_jax", "pallas_kernels", "examples", "benchmarks", "tests"


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_subject(folder):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(file)
        if NO_SUBJECT.match(text)
    ]
    assert not found, "\n".join(found)
