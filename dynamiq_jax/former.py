"""Former names of modules, functions and keywords: for one version they work, with a warning."""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from dynamiq_jax.core.warned import warn

PACKAGE = "dynamiq_jax"
FORMER = {
    "commands.copies": "hosts.copies",
    "commands.model_tree": "plan.model_tree",
    "commands.writers": "metrics",
    "comparators": "contrib",
    "fields": "core.checks",
    "optax.liec": "contrib.liec",
    "methods.hops": "methods.base",
    "topologies.base": "topologies.schedules",
    "topologies.xla": "topologies.links",
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


FUNCTIONS = {"reduce_in_backward": "fsdp", "sequential": "overlapped"}
"""Functions of version 0.4, and their names of now."""


def function_of_now(name: str) -> str:
    """The name of now of a function of the package, with a warning."""
    now = FUNCTIONS[name]
    warn(f"dq.{name} is now dq.{now}; the former name goes with 0.6", DeprecationWarning)
    return now


F = TypeVar("F", bound=Callable[..., Any])

Keyword = Callable[[Any, Any], dict[str, Any]]
"""(value of a former keyword, ``compression``) -> the keywords that mean the same now."""


def formerly(**former: Keyword) -> Callable[[F], F]:
    """Lets a function take keywords of version 0.4, with a warning that says what to pass."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def takes_former(*args: Any, **kwargs: Any) -> Any:
            for name in former.keys() & kwargs.keys():
                now = former[name](kwargs.pop(name), kwargs.get("compression"))
                told = " and ".join(f"{key}={value!r}" for key, value in now.items())
                remedy = f"pass {told}" if now else "leave it out, since it says the default"
                warn(f"{name}= of {function.__name__} goes with 0.6: {remedy}", DeprecationWarning)
                kwargs |= now
            return function(*args, **kwargs)

        return takes_former  # type: ignore[return-value]

    return decorate


def unless(name: str, default: bool) -> Keyword:
    """The keyword ``name``, which is true where the former one is not ``default``."""
    return lambda value, _: {} if value == default else {name: True}
