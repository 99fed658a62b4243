"""Arrays that a loss closes over: found by their variables, and exchanged in copies of the loss.

Trainers write a loss in the step, where it closes over the batch, keys, or an object that draws
keys. Under a map each worker needs its own part of these. So the loss is copied, with other arrays
in its cells, and in the dicts, lists and objects there. Nothing of the user's is changed while
JAX traces. `Copy.changes` says what the loss has changed in its copy.
"""

import collections
import copy
import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

FOREIGN = "jax", "jaxlib", "numpy", "builtins", "flax", "optax", "dynamiq_jax"
"""Packages whose objects are looked into only as pytrees and as functions."""
LONGEST = 10_000
"""Lists and dicts with more entries hold data of another kind."""


class Variable(NamedTuple):
    """Where an array was found."""

    name: str
    """The variable of a function that holds it, or what does."""
    path: str
    """The variable, and the path in it."""


class Slot(NamedTuple):
    """A place of the user's with the value that the loss gave it in a copy."""

    owner: Any
    """A cell, an object, a dict, a list or a deque."""
    key: Any
    """The attribute's name or the dict's key; `None` of a cell and of a whole list."""
    value: Any
    """`GONE`: the key was removed."""
    path: str


GONE = object()
LISTS = list, collections.deque


def closed_arrays(*functions: Any) -> dict[int, tuple[Variable, Array]]:
    """The arrays that functions close over, by their ids."""
    return dict(_Walk().all(functions, Variable("", "")))


def closed_variables(*functions: Any) -> dict[str, Any]:
    """The values of the variables in which arrays were found, by name."""
    walk = _Walk()
    names = {variable.name for _, (variable, _) in walk.all(functions, Variable("", ""))}
    return {name: value for name, value in walk.variables.items() if name in names}


class _Walk:
    """A walk over everything that functions reach."""

    def __init__(self):
        self.seen: dict[int, Any] = {}
        self.variables: dict[str, Any] = {}

    def all(self, x: Any, at: Variable) -> Iterator[tuple[int, tuple[Variable, Array]]]:
        """The arrays in ``x``, with their places."""
        # Also an array of several variables is one array: the first one names it.
        if isinstance(x, Array):
            if id(x) not in self.seen:
                self.seen[id(x)] = x
                yield id(x), (at, x)
            return
        if id(x) in self.seen or _is_plain(x):
            return
        self.seen[id(x)] = x  # keeps it alive, so that its id stays its own
        for name, path, child in _children(x):
            if name:
                self.variables.setdefault(name, child)
            yield from self.all(child, Variable(name or at.name, name or at.path + path))


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, type | types.ModuleType | str | bytes | int | float | complex)


def _children(x: Any) -> list[tuple[str, str, Any]]:
    """The parts of ``x``: (the name of a variable or "", the path from ``x``, the value)."""
    if inspect.isfunction(x):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        variables = [(name, "", cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        names = x.__code__.co_varnames[: x.__code__.co_argcount]
        # Defaults belong to the last positional parameters.
        defaults = x.__defaults__ or ()
        variables += [(n, "", v) for n, v in zip(names[-len(defaults) :], defaults, strict=False)]
        return variables + [(name, "", v) for name, v in (x.__kwdefaults__ or {}).items()]
    if isinstance(x, types.MethodType):
        return [("", "", x.__func__), ("", "", x.__self__)]
    if isinstance(x, functools.partial):
        return [("", "", x.func), ("", "", x.args), *((k, "", v) for k, v in x.keywords.items())]
    if hasattr(x, "__wrapped__"):  # as a function of `jax.jit`
        return [("", "", inspect.unwrap(x))]
    if isinstance(x, Mapping | list | tuple | collections.deque):
        # A data set, say: to walk it in each call would take long.
        if len(x) > LONGEST:
            return []
        items = x.items() if isinstance(x, Mapping) else enumerate(x)
        return [("", f"[{key!r}]", value) for key, value in items]
    if (parts := _node(x)) is not None:
        return [("", jax.tree_util.keystr(path), value) for path, value in parts]
    return [("", f".{name}", value) for name, value in (_attributes(x) or {}).items()]


def _node(x: Any) -> list[tuple[Any, Any]] | None:
    """The children of a pytree node, with their paths; `None` of a leaf."""
    # All but ``x`` counts as a leaf, so these are its children.
    found = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda y: y is not x)
    return None if len(found) == 1 and found[0][1] is x else found


def _attributes(x: Any) -> dict[str, Any] | None:
    """The attributes of a user's object that is no pytree."""
    package = type(x).__module__.partition(".")[0]
    own = getattr(x, "__dict__", None)
    return own if package not in FOREIGN and isinstance(own, dict) else None


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a variable that is assigned after the function is made
        return False
    return True


class Copy:
    """Copies of functions in which other values replace arrays, by the ids of these.

    What holds none of these arrays is not copied, except dicts and lists of copied objects.
    """

    def __init__(self, functions: tuple[Any, ...], arrays: Mapping[int, Any], values: Sequence):
        self.arrays = arrays
        self.values = dict(zip(arrays, values, strict=True))
        self.made: dict[int, tuple[Any, Any]] = {}
        """Originals, which stay alive, and their copies, by the originals' ids."""
        self.before: list[tuple[Any, Any, Any, str]] = []
        """Originals, their copies, and the first content of these."""
        self.nodes: list[tuple[str, Any, list[Any]]] = []
        """Copied pytree nodes of other kinds, with their first children."""
        self.functions = tuple(self.of(x, "") for x in functions)

    def of(self, x: Any, path: str) -> Any:
        """``x``, or a copy of it if it holds such an array."""
        if id(x) in self.values:
            return self.values[id(x)]
        if isinstance(x, Array) or _is_plain(x):
            return x
        if id(x) not in self.made:
            # Before the walk into it: an object may refer to itself.
            self.made[id(x)] = x, x  # as long as it is not known to hold one
            self.made[id(x)] = x, self._copied(x, path)
        return self.made[id(x)][1]

    def _copied(self, x: Any, path: str) -> Any:
        if inspect.isfunction(x):
            return self._function(x)
        if isinstance(x, types.MethodType):
            own = self.of(x.__func__, path), self.of(x.__self__, path)
            same = own[0] is x.__func__ and own[1] is x.__self__
            return x if same else types.MethodType(*own)
        if isinstance(x, functools.partial):
            own = self.of(x.func, path), self.of(x.args, path), self.of(x.keywords, path)
            same = own[0] is x.func and own[1] is x.args and own[2] is x.keywords
            return x if same else type(x)(own[0], *own[1], **own[2])
        if hasattr(x, "__wrapped__"):
            return x
        # Exact types: a subclass may hold more than its entries.
        if type(x) in (dict, *LISTS):
            return x if len(x) > LONGEST else self._container(x, path)
        if (parts := _node(x)) is not None:
            return self._rebuilt(x, parts, path)
        return self._object(x, path)

    def _function(self, x: Any) -> Any:
        """A function whose cells and defaults hold copies; functions share cells as before."""
        cells = x.__closure__ or ()
        own = [self._cell(*pair) for pair in zip(x.__code__.co_freevars, cells, strict=True)]
        defaults, named = self.of(x.__defaults__, ""), self.of(x.__kwdefaults__, "")
        same = all(new is old for new, old in zip(own, cells, strict=True))
        if same and defaults is x.__defaults__ and named is x.__kwdefaults__:
            return x
        new = types.FunctionType(x.__code__, x.__globals__, x.__name__, defaults, tuple(own))
        # Attributes, as `functools.wraps` sets them, and names for messages.
        new.__kwdefaults__, new.__dict__ = named, dict(x.__dict__)
        new.__qualname__, new.__module__ = x.__qualname__, x.__module__
        return new

    def _cell(self, name: str, cell: Any) -> Any:
        if id(cell) not in self.made:
            own = _content(cell)
            value = self.of(own, name)
            self.made[id(cell)] = cell, cell if value is own else types.CellType(value)
            self._note(cell, name)
        return self.made[id(cell)][1]

    def _note(self, x: Any, path: str) -> None:
        """Remembers the content of the copy of ``x``, if it has one."""
        new = self.made[id(x)][1]
        if new is not x:
            self.before.append((x, new, _content(new), path))

    def _container(self, x: Any, path: str) -> Any:
        """A dict, a list or a deque of copies."""
        items = [*(x.items() if isinstance(x, dict) else enumerate(x))]
        own = [self.of(value, f"{path}[{key!r}]") for key, value in items]
        if all(value is old for value, (_, old) in zip(own, items, strict=True)):
            return x
        return self._kept(x, dict(zip(x, own, strict=True)) if type(x) is dict else own, path)

    def _kept(self, x: Any, content: Any, path: str) -> Any:
        """A copy of a container, with this content."""
        new = copy.copy(x)
        new.clear()
        (new.update if isinstance(new, dict) else new.extend)(content)
        self.made[id(x)] = x, new
        self._note(x, path)
        return new

    def _rebuilt(self, x: Any, parts: list[tuple[Any, Any]], path: str) -> Any:
        """A pytree node of copies."""
        own = [self.of(value, path + jax.tree_util.keystr(key)) for key, value in parts]
        if all(value is old for value, (_, old) in zip(own, parts, strict=True)):
            return x
        treedef = jax.tree.structure(x, is_leaf=lambda y: y is not x)
        new = treedef.unflatten(own)
        # A tuple cannot change.
        if not isinstance(x, tuple):
            self.nodes.append((path, new, [value for _, value in _node(new) or []]))
        return new

    def _object(self, x: Any, path: str) -> Any:
        """An object whose attributes are copies."""
        attributes = _attributes(x) or {}
        own = {name: self.of(value, f"{path}.{name}") for name, value in attributes.items()}
        if all(own[name] is value for name, value in attributes.items()):
            return x
        for name, value in attributes.items():  # they may get arrays
            if own[name] is value and type(value) in (dict, *LISTS):
                own[name] = self._kept(value, value, f"{path}.{name}")
        new = copy.copy(x)
        vars(new).update(own)
        self.made[id(x)] = x, new
        self._note(x, path)
        return new

    def changes(self) -> list[Slot]:
        """The places that the functions have changed, with their new values.

        Raises:
          ValueError: they have changed a pytree node that is neither a dict nor a list.
        """
        for path, node, first in self.nodes:
            now = [value for _, value in _node(node) or []]
            if not _alike(now, first):
                raise ValueError(
                    f"the loss changes {path}, a {type(node).__name__} that it closes over; pass "
                    "it as an argument of the loss, and return what changes as aux"
                )
        return [slot for row in self.before for slot in self._changes_of(*row)]

    def _changes_of(self, x: Any, new: Any, first: Any, path: str) -> Iterator[Slot]:
        now = _content(new)
        if not isinstance(now, dict):
            if not (_alike(now, first) if isinstance(now, list) else now is first):
                yield Slot(x, None, self._original(now), path)
            return
        for key in {**first, **now}:
            value = now.get(key, GONE)
            if value is not first.get(key, GONE):
                yield Slot(x, key, self._original(value), f"{path}[{key!r}]")

    def _original(self, value: Any) -> Any:
        """A value in which the user's own objects and arrays replace those of the copies."""
        # A copy must not get into the user's objects, which outlive the trace.
        owners = {id(new): old for old, new in self.made.values()}
        owners |= {id(new): self.arrays[key] for key, new in self.values.items()}
        is_leaf = lambda x: id(x) in owners
        return jax.tree.map(lambda x: owners.get(id(x), x), value, is_leaf=is_leaf)


def _content(x: Any) -> Any:
    """The content of a cell, an object, a dict or a list; of a dict or a list a copy."""
    if isinstance(x, types.CellType):
        return x.cell_contents if _is_filled(x) else None
    if isinstance(x, LISTS):
        return list(x)
    return dict(x if isinstance(x, dict) else vars(x))


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def write(slot: Slot, value: Any) -> None:
    """Gives a place of the user's its new value."""
    owner, key = slot.owner, slot.key
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, LISTS):
        # In place: others may hold the same list.
        owner.clear()
        owner.extend(value)
    else:
        own = owner if isinstance(owner, dict) else vars(owner)
        if value is GONE:
            own.pop(key, None)
        else:
            own[key] = value
