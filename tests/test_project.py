"""Workflows and hooks name what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_workflows_exist(path):
    """Targets of the Makefile, and scripts that may be run."""
    text = path.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = re.findall(r"^ +- run: (\S+) ?(\S*)", text, re.MULTILINE)
    assert runs or path.stem == "release"
    for command, first in runs:
        if command == "make":
            assert first in targets
        else:
            script = ROOT / command
            assert script.exists(), command
            assert script.stat().st_mode & 0o111


def test_extras_and_links_of_the_pages_exist():
    for page in ("CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)|`((?:tests|docs)/[\w./]+)`", text):
            assert (ROOT / "".join(link)).exists(), link
