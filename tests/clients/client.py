"""Clients: trainers of others with our patches, and what their steps give."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Change(NamedTuple):
    """Other lines of the trainer's file; METHOD in the new ones becomes the method of a run."""

    old: str
    new: str
    file: str = ""
    """The file, if it is not the client's own."""


IMPORT = Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n")


class Trained(NamedTuple):
    """The loss of every step, and the state after the last one: a tree."""

    losses: list[float]
    state: Any
    params: Any = None
    """The parameters in the state, whose shardings must be those of the native run."""


@dataclass(frozen=True)
class Client:
    """A trainer of others.

    Attributes:
      file: the file of the checkout that changes.
      package: the folder of the checkout that has the trainer's modules, a package; default: that
        of the file, whose modules have no package.
      mesh: the mesh, in words.
      step: the name of the step's program, as XLA has it.
      patch: how it trains with us.
      setting: lines that all runs have changed, for another mesh than the trainer's own.
      options: arguments of the module's ``train``.
      exclude: leaves whose gradients JAX sums: `Compression.exclude` of all runs with us.
      repository: its name on GitHub, or of a package, whose checkout is a folder of packages.
      commit: the commit that the patch is for, or the version.
    """

    file: str
    mesh: str
    step: str
    patch: tuple[Change, ...]
    setting: tuple[Change, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    exclude: str | None = None
    package: str = ""
    repository: str = "google/flax"
    commit: str = "18f8f311c275d57f46d95e41b15aa97b454754c0"

    @property
    def folder(self) -> Path:
        """The folder of the checkout that is copied."""
        return Path(self.package or Path(self.file).parent)

    def apply(self, changes: tuple[Change, ...], root: Path, method: str = "") -> int:
        """Changes files under ``root``; the number of lines that are new, gone or changed.

        Raises:
          ValueError: a file does not have the lines, or has them twice.
        """
        count = 0
        for name in dict.fromkeys(change.file or self.file for change in changes):
            own = [change for change in changes if (change.file or self.file) == name]
            count += _changed(own, root / name, method)
        return count


def _changed(changes: list[Change], path: Path, method: str) -> int:
    before = text = path.read_text()
    for old, new, _ in changes:
        if text.count(old) != 1:
            raise ValueError(f"{path.name} has {text.count(old)} times {old!r}")
        text = text.replace(old, new.replace("METHOD", method))
    path.write_text(text)
    lines = difflib.SequenceMatcher(None, before.splitlines(), text.splitlines(), autojunk=False)
    differing = (pair for pair in lines.get_opcodes() if pair[0] != "equal")
    return sum(max(b - a, d - c) for _, a, b, c, d in differing)
