"""Files of a `Compression`: its method, its topology and what it excludes.

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
import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamiq_jax.methods import BF16, F32, DynamiQ, ErrorFeedback, Format, Method
from dynamiq_jax.methods.base import Limits
from dynamiq_jax.topologies import AnyTopology, Butterfly, Direct, Hierarchical, Ring

TOPOLOGIES = {c.__name__: c for c in (Direct, Ring, Butterfly, Hierarchical)}


@functools.cache
def methods() -> dict[str, Any]:
    """The library's methods by name."""
    from dynamiq_jax import comparators  # here: importing the library does not take them all in

    others = (getattr(comparators, name) for name in comparators.__all__)
    return {c.__name__: c for c in (DynamiQ, BF16, F32, *others, ErrorFeedback)}


LEVELS = ("inner", "outer")
"""Fields of `Hierarchical` that are topologies themselves."""
WITHIN = "method"
"""The field of `ErrorFeedback` that is a method itself."""
FORMAT = "format"
"""The field of `DynamiQ` that is a `Format`."""
SUFFIXES = (".json", ".toml")


PLAIN = ("transport", "exclude", *Limits._fields)
FIELDS = ("method", "topology", *PLAIN)
"""The fields of a `Compression` that a file may have."""


def read(file: str | Path) -> dict[str, Any]:
    """The fields of a `Compression`, from a file that `write` wrote.

    Raises:
      ValueError: the file is neither JSON nor TOML, or has names, fields or values that do not
        exist.
    """
    file = Path(file)
    load = json.loads if _suffix(file) == ".json" else tomllib.loads
    try:
        return parse(load(file.read_text()))
    except RecursionError:
        raise ValueError(
            f"{file} is nested too deeply; expected the tables method and topology, as "
            "dq.Compression.save writes them"
        ) from None
    except ValueError as error:  # also what the two parsers raise
        raise ValueError(f"{file}: {error}") from error


def write(file: str | Path, compression: Any) -> None:
    """Writes a `Compression` as JSON or TOML, by the file's suffix; see `describe`."""
    file = Path(file)
    values = describe(compression)
    if _suffix(file) == ".json":
        file.write_text(json.dumps(values, indent=1) + "\n")
        return
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    tables = [
        f"[{name}]\n" + _toml_lines(value)
        for name, value in values.items()
        if isinstance(value, Mapping)
    ]
    file.write_text("\n".join([*([_toml_lines(plain)] if plain else []), *tables]))


def parse(values: Any) -> dict[str, Any]:
    """The fields of a `Compression`, from what a file holds: ``{"method": {...}, ...}``.

    Raises:
      ValueError: there is no such method, topology or field, or a value does not fit.
    """
    _check_keys("the configuration", values, FIELDS)
    found = dict(values)
    builders = {"method": _method, "topology": _topology}
    for name, build in builders.items():
        if found.get(name) is not None:
            found[name] = build(name, found[name])
    return found


def describe(compression: Any) -> dict[str, Any]:
    """The fields that are not at their defaults, as JSON's types.

    Raises:
      ValueError: the method or the topology is not this library's.
    """
    found = {
        "method": _describe("method", compression.method, methods()),
        "topology": _describe("topology", compression.topology, TOPOLOGIES),
    } | {name: getattr(compression, name) for name in PLAIN}
    return {name: value for name, value in found.items() if value is not None}


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
        alone = {name: c for name, c in methods().items() if c is not ErrorFeedback}
        within[WITHIN] = _build(f"{where}.{WITHIN}", values[WITHIN], alone)
    return _build(where, values, methods(), within)


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
    given = {key: value for key, value in values.items() if key != "name"} | dict(built or {})
    if FORMAT in given:
        within = f"{where}.{FORMAT}"
        _check_keys(within, given[FORMAT], [field.name for field in dataclasses.fields(Format)])
        given[FORMAT] = _made(within, Format, given[FORMAT])
    return _made(f"{where} {name}", classes[name], given)


def _made(where: str, kind: Any, fields: Mapping[str, Any]) -> Any:
    """The dataclass with these fields."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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
    return {"name": name} | _changed(where, value, classes)


def _changed(where: str, value: Any, classes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not at their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if held == field.default:
            continue
        if field.name in (*LEVELS, WITHIN):
            held = _describe(f"{where}.{field.name}", held, classes)
        elif field.name == FORMAT:
            held = _changed(where, held, classes)
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
