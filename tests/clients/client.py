"""Clients: trainers of others with our patches, and what their steps give."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Change(NamedTuple):
    """Other lines of the trainer's file; METHOD in the new ones becomes the method of a run."""

    old: str
    new: str


IMPORT = Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n")


class Trained(NamedTuple):
    """The loss of every step, and the state after the last one: a tree."""

    losses: list[float]
    state: Any


@dataclass(frozen=True)
class Client:
    """A trainer of others.

    Attributes:
      file: the file of the checkout that changes; the folder has its modules.
      mesh: the mesh, in words.
      step: the name of the step's program, as XLA has it.
      patch: how it trains with us.
      setting: lines that all runs have changed, for another mesh than the trainer's own.
      options: arguments of the module's ``train``.
      exclude: leaves whose gradients JAX sums: `Compression.exclude` of all runs with us.
      repository: its name on GitHub.
      commit: the commit that the patch is for.
    """

    file: str
    mesh: str
    step: str
    patch: tuple[Change, ...]
    setting: tuple[Change, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    exclude: str | None = None
    repository: str = "google/flax"
    commit: str = "18f8f311c275d57f46d95e41b15aa97b454754c0"


def apply(changes: tuple[Change, ...], path: Path, method: str = "") -> int:
    """Changes a file; the number of lines that are new or gone, where a changed one counts once.

    Raises:
      ValueError: the file does not have the lines, or has them twice.
    """
    before = text = path.read_text()
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{path.name} has {text.count(old)} times {old!r}")
        text = text.replace(old, new.replace("METHOD", method))
    path.write_text(text)
    lines = difflib.SequenceMatcher(None, before.splitlines(), text.splitlines(), autojunk=False)
    differing = (pair for pair in lines.get_opcodes() if pair[0] != "equal")
    return sum(max(b - a, d - c) for _, a, b, c, d in differing)
