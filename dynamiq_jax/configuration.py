"""Files: the choice of a method and a topology, and the shapes of a model.

```json
{"method": {"name": "DynamiQ", "bits": 4.0}, "topology": {"name": "Direct"}}
```

A file has the names of classes and the fields that are not at their defaults. What is left out is
`None`: the library's default. The same in TOML, by the file's suffix::

    [method]
    name = "DynamiQ"
    bits = 4.0

    [topology]
    name = "Hierarchical"
    outer = {name = "Ring"}
"""

import dataclasses
import json
import math
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dynamiq_jax.arguments import AnyTopology, check_kinds
from dynamiq_jax.buckets import describe_leaves, holds_numbers
from dynamiq_jax.methods import (
    BF16,
    CLTK,
    F32,
    MXFP4,
    MXFP6,
    MXFP8,
    THC,
    ARCTopK,
    DynamiQ,
    ErrorFeedback,
    GlobalQSGD,
    Marsit,
    Method,
    MinMax,
    OmniReduce,
    PermK,
    PowerSGD,
    SIDCo,
)
from dynamiq_jax.topologies import Butterfly, Direct, Hierarchical, Ring

_ALONE = (
    DynamiQ, BF16, F32, MXFP8, MXFP6, MXFP4, MinMax, GlobalQSGD, THC, OmniReduce, Marsit,
    PowerSGD, ARCTopK, CLTK, SIDCo, PermK,
)  # fmt: skip
METHODS = {c.__name__: c for c in (*_ALONE, ErrorFeedback)}
TOPOLOGIES = {c.__name__: c for c in (Direct, Ring, Butterfly, Hierarchical)}
LEVELS = ("inner", "outer")
"""Fields of `Hierarchical` that are topologies themselves."""
WITHIN = "method"
"""The field of `ErrorFeedback` that is a method itself."""
SUFFIXES = (".json", ".toml")


class Configuration(NamedTuple):
    """What the reducing functions take as ``method=`` and ``topology=``."""

    method: Method | None = None
    topology: AnyTopology | None = None


def load_config(file: str | Path) -> Configuration:
    """Reads a method and a topology from a JSON or TOML file, as `save_config` writes them.

    ::

        method, topology = dq.load_config("dynamiq.json")
        grads = dq.pmean(grads, "data", method=method, topology=topology)

    Args:
      file: its suffix, .json or .toml, says which of the two it is.

    Returns:
      (method, topology), either `None` where the file has none.

    Raises:
      ValueError: the file is neither JSON nor TOML, or has names, fields or values that do not
        exist.
    """
    file = Path(file)
    parse = json.loads if _suffix(file) == ".json" else tomllib.loads
    try:
        return parse_config(parse(file.read_text()))
    except RecursionError:
        raise ValueError(
            f"{file} is nested too deeply; expected the tables method and topology, as "
            "dq.save_config writes them"
        ) from None
    except ValueError as error:  # also what the two parsers raise
        raise ValueError(f"{file}: {error}") from error


def save_config(
    file: str | Path, method: Method | None = None, topology: AnyTopology | None = None
) -> None:
    """Writes a method and a topology for `load_config`.

    Args:
      file: JSON or TOML, by its suffix.
      method: as for `psum`; one of this library's.
      topology: as for `psum`; one of this library's.

    Raises:
      ValueError: another suffix, a method or topology that the file could not name, or a field
        that is `None` and could not be said in TOML.
    """
    file = Path(file)
    values = describe_config(method, topology)
    if _suffix(file) == ".json":
        file.write_text(json.dumps(values, indent=1) + "\n")
    else:
        tables = (f"[{name}]\n" + _toml_lines(value) for name, value in values.items())
        file.write_text("\n".join(tables))


def parse_config(values: Any) -> Configuration:
    """The same from what a file holds: ``{"method": {...}, "topology": {...}}``.

    Raises:
      ValueError: there is no such method, topology or field, or a value does not fit.
    """
    _check_keys("the configuration", values, Configuration._fields)
    method, topology = values.get("method"), values.get("topology")
    return Configuration(
        None if method is None else _method("method", method),
        None if topology is None else _topology("topology", topology),
    )


def describe_config(
    method: Method | None = None, topology: AnyTopology | None = None
) -> dict[str, Any]:
    """What `parse_config` makes the two of: JSON's types alone.

    Raises:
      ValueError: one of them is not this library's.
    """
    check_kinds(method, topology)
    found = {"method": _describe("method", method, METHODS)}
    found["topology"] = _describe("topology", topology, TOPOLOGIES)
    return {name: value for name, value in found.items() if value is not None}


def save_model_tree(file: str | Path, params: Any) -> None:
    """Writes names, shapes and dtypes of all leaves, for ``dynamiq-jax advise --model-tree``.

    Gradients have the shapes and dtypes of parameters. The file is JSON, in the tree's order:
    ``{"['wte']": [[50304, 768], "float32"], ...}``.

    Args:
      file: where to.
      params: arrays or `jax.ShapeDtypeStruct`s.
    """
    leaves = describe_leaves(params)
    lines = [f"{json.dumps(x.name)}: {json.dumps([x.shape, x.dtype.name])}" for x in leaves]
    Path(file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load_model_tree(file: str | Path) -> "OrderedDict[str, jax.ShapeDtypeStruct]":
    """Reads what `save_model_tree` wrote: leaves by name, in the order of the file.

    Raises:
      ValueError: it holds something else.
    """
    file = Path(file)
    wanted = "expected {name: [shape, dtype]}, as dq.save_model_tree writes it"
    try:
        held = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; {wanted}") from error
    if not isinstance(held, dict) or not held:
        raise ValueError(f"{file} holds no leaves; {wanted}")
    tree = OrderedDict()
    for name, entry in held.items():
        try:
            tree[name] = _leaf(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: leaf {name!r} is {entry!r}: {error}; {wanted}") from error
    return tree


def _leaf(entry: Any) -> jax.ShapeDtypeStruct:
    """The leaf of a model tree; refuses what no array of numbers can be."""
    shape, dtype = entry
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape has to be a list of integers from 0 on")
    if not isinstance(dtype, str) or not holds_numbers(jnp.dtype(dtype)):
        raise ValueError("the dtype has to be one of numbers, such as 'float32'")
    if math.prod(max(n, 1) for n in shape) * jnp.dtype(dtype).itemsize > sys.maxsize:
        raise ValueError(f"it has more than {sys.maxsize} bytes")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _suffix(file: Path) -> str:
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} must end in {' or '.join(SUFFIXES)}, and ends in {file.suffix!r}")
    return file.suffix


def _method(where: str, values: Any) -> Method:
    """The method, with the one within it."""
    within = {}
    if isinstance(values, Mapping) and values.get("name") == ErrorFeedback.__name__:
        if WITHIN not in values:
            raise ValueError(
                f"{where} {ErrorFeedback.__name__} has no {WITHIN!r}; say which it is around, as "
                f'{WITHIN} = {{name = "{DynamiQ.__name__}"}}'
            )
        alone = {c.__name__: c for c in _ALONE}
        within[WITHIN] = _build(f"{where}.{WITHIN}", values[WITHIN], alone)
    return _build(where, values, METHODS, within)


def _topology(where: str, values: Any) -> AnyTopology:
    """The topology, of a hierarchy with both levels."""
    levels = {}
    if isinstance(values, Mapping):
        given = {name: values[name] for name in LEVELS if values.get(name) is not None}
        one_level = {name: c for name, c in TOPOLOGIES.items() if c is not Hierarchical}
        if values.get("name") == Hierarchical.__name__:
            levels = {n: _build(f"{where}.{n}", v, one_level) for n, v in given.items()}
    return _build(where, values, TOPOLOGIES, levels)


def _build(
    where: str,
    values: Any,
    classes: Mapping[str, Any],
    built: Mapping[str, Any] | None = None,
) -> Any:
    """The object of the class that is named, with the fields that are given."""
    names = ", ".join(classes)
    if not isinstance(values, Mapping) or "name" not in values:
        raise ValueError(f"{where} is {values!r}; expected a table whose name is one of {names}")
    name = values["name"]
    if name not in [*classes]:
        raise ValueError(f"{where} {name!r} is not known; expected one of {names}")
    fields = [field.name for field in dataclasses.fields(classes[name])]
    _check_keys(f"{where} {name}", values, ["name", *fields])
    given = {key: value for key, value in values.items() if key != "name"}
    try:
        return classes[name](**{**given, **(built or {})})
    except ValueError as error:
        raise ValueError(f"{where} {name}: {error}") from error


def _check_keys(what: str, values: Any, allowed: Any) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {values!r}; expected a table with {', '.join(allowed)}")
    unknown = [key for key in values if key not in allowed]
    if unknown:
        raise ValueError(f"{what} has no {unknown[0]!r}; expected some of {', '.join(allowed)}")


def _describe(where: str, value: Any, classes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name and fields that are not at their defaults."""
    if value is None:
        return None
    name = type(value).__name__
    if classes.get(name) is not type(value):
        raise ValueError(
            f"{where}={value!r} cannot be saved; pass one of this library's: {', '.join(classes)}"
        )
    found: dict[str, Any] = {"name": name}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if held == field.default:
            continue
        if field.name in (*LEVELS, WITHIN):
            held = _describe(f"{where}.{field.name}", held, classes)
        found[field.name] = list(held) if isinstance(held, tuple) else held
    return found


def _toml_lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: Any) -> str:
    """Numbers, strings, booleans and lists are written as in JSON; tables inline."""
    if value is None:
        raise ValueError("TOML has no None, which a field is set to; save a .json")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)
