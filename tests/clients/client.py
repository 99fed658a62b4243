"""Clients: trainers of others with our patches, and what their steps give."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A change replaces lines of one file; METHOD in the new ones becomes the method of a run."""

    file: str
    old: str
    new: str


class Trained(NamedTuple):
    """The loss of every step, and the state after the last one: a tree."""

    losses: list[float]
    state: Any


@dataclass(frozen=True)
class Client:
    """A trainer of others.

    Attributes:
      repository: its name on GitHub.
      commit: the commit that the patch is for, if it is a repository's.
      folder: the folder of the checkout with its modules, or a file.
      mesh: the mesh, in words.
      step: the name of the step's program, as XLA has it.
      patch: how it trains with us.
      setting: lines that all runs have changed, for another mesh than the trainer's own.
      options: arguments of the module's ``train``.
      exclude: leaves whose gradients JAX sums: `Compression.exclude` of all runs with us.
    """

    repository: str
    commit: str
    folder: str
    mesh: str
    step: str
    patch: tuple[Change, ...]
    setting: tuple[Change, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    exclude: str | None = None


def apply(changes: tuple[Change, ...], root: Path, method: str = "") -> int:
    """Changes the files below a folder; the number of lines that are new or gone.

    A line that is changed counts once.

    Raises:
      ValueError: the file does not have the lines, or has them twice.
    """
    n_lines = 0
    for file in dict.fromkeys(change.file for change in changes):
        path = root / file
        before = text = path.read_text()
        for change in changes:
            if change.file != file:
                continue
            if text.count(change.old) != 1:
                raise ValueError(f"{file} has {text.count(change.old)} times {change.old!r}")
            text = text.replace(change.old, change.new.replace("METHOD", method))
        path.write_text(text)
        pairs = difflib.SequenceMatcher(
            None, before.splitlines(), text.splitlines(), autojunk=False
        )
        for kind, a, b, c, d in pairs.get_opcodes():
            n_lines += max(b - a, d - c) if kind != "equal" else 0
    return n_lines
