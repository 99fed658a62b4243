"""Former names of modules: for one version they lead to the new ones, with a warning."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dynamiq_jax.core.warned import warn

PACKAGE = "dynamiq_jax"
FORMER = {
    "commands.copies": "hosts.copies",
    "commands.model_tree": "plan.model_tree",
    "commands.writers": "metrics",
    "comparators": "contrib",
    "optax.liec": "contrib.liec",
    "request": "compression",
}
"""Names of version 0.4, without the package, and the names of now."""


def name_of_now(name: str) -> str | None:
    """The module that a former module, or one in a former package, is now; `None` for others."""
    for former, now in FORMER.items():
        before, after = f"{PACKAGE}.{former}", f"{PACKAGE}.{now}"
        if name == before or name.startswith(f"{before}."):
            return after + name.removeprefix(before)
    return None


class Former(MetaPathFinder, Loader):
    """Finds modules under their former names."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None):
        """A spec for former names alone; called by Python."""
        return ModuleSpec(fullname, self) if name_of_now(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module of now in the place of the one that Python made."""
        name, now = module.__name__, str(name_of_now(module.__name__))
        if name.removeprefix(f"{PACKAGE}.") in FORMER:
            warn(f"{name} is now {now}; the former name goes with 0.6", DeprecationWarning)
        sys.modules[name] = import_module(now)


sys.meta_path.insert(0, Former())  # before the finder of files, which knows the new packages
