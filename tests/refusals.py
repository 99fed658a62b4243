"""The table of refusals in docs/errors.md, written from what the tests provoke.

    make errors     # pytest -p refusals --errors-md docs/errors.md

Every ValueError, NotImplementedError or RuntimeError of the library that a test expects, with the
message it got. The first test of a message gives its numbers, so all tests run in one process.
"""

import re
import traceback
from pathlib import Path

import pytest

PACKAGES = ("dynamiq_jax", "pallas_kernels")
found: dict[tuple[str, str], str] = {}


def pytest_addoption(parser):
    """Adds --errors-md."""
    parser.addoption("--errors-md", default=None, help="write the table of refusals to this file")


class _Recording:
    """The context manager of `pytest.raises`, which also notes what was raised."""

    def __init__(self, inner):
        self.inner = inner

    def __enter__(self):
        self.info = self.inner.__enter__()
        return self.info

    def __exit__(self, *raised):
        handled = self.inner.__exit__(*raised)
        if handled:
            _note(raised[1])
        return handled


def _note(error):
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).parent.name and _package(f.filename)]
    if isinstance(error, ValueError | NotImplementedError | RuntimeError) and ours:
        if _package(frames[-1].filename):
            home = frames[-1].filename
            place = home[home.rindex(_package(home)) :]
            # One row per place and wording: numbers and quoted values vary between tests.
            wording = re.sub(r"[\d.]+|'[^']*'", "", str(error))[:16]
            found.setdefault((f"{place}:{frames[-1].name}", wording), _row(error))


def _package(filename):
    parts = Path(filename).parts
    return next((p for p in PACKAGES if p in parts), "")


def _row(error):
    text = re.sub(r"(?<![\w.])/(tmp|[\w.-]+/[\w.-]+)/\S*/", "", str(error))  # folders of this run
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"| `{type(error).__name__}` | {text} |"


def pytest_configure(config):
    """Wraps pytest.raises for this run, of one process: another one's messages would be lost."""
    if config.getoption("--errors-md"):
        if config.getoption("dist", "no") != "no":
            raise pytest.UsageError("--errors-md takes the tests of one process; leave -n out")
        original = pytest.raises
        pytest.raises = lambda *args, **rest: (
            _Recording(original(*args, **rest)) if len(args) < 2 else original(*args, **rest)
        )


def pytest_sessionfinish(session):
    """Writes the table."""
    file = session.config.getoption("--errors-md")
    if not file:
        return
    lines = ["# Errors", ""]
    lines.append(
        "What the library refuses, at trace time unless said otherwise, with an example of"
    )
    lines.append("each message. Written by `make errors` from what the tests provoke.")
    places = sorted({place.split(":")[0] for place, _ in found})
    for file_name in places:
        lines += ["", f"## `{file_name}`", "", "| error | message |", "|---|---|"]
        lines += [row for (place, _), row in sorted(found.items()) if place.startswith(file_name)]
    Path(file).write_text("\n".join(lines) + "\n")
