"""Files of a `Compression`: its method, its topology and what it excludes.

```json
{"method": {"name": "DynamiQ", "bits": 4.0}, "topology": {"name": "Direct"}}
```

A file has the names of classes and the fields that are not at their defaults. What is left out is
`None`: the library's default.
"""

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dynamiq_jax.methods import BF16, F32, DynamiQ, ErrorFeedback, Format
from dynamiq_jax.methods.base import Limits
from dynamiq_jax.topologies import Butterfly, Direct, Hierarchical, Ring

SUFFIX = ".json"
TOPOLOGIES = {c.__name__: c for c in (Direct, Ring, Butterfly, Hierarchical)}
PLAIN = ("transport", "exclude", *Limits._fields)
"""The fields of a `Compression` that are numbers or strings."""
NESTED = ("inner", "outer", "method")
"""The fields of methods and topologies that are methods and topologies of other classes."""


@functools.cache
def methods() -> dict[str, Any]:
    """The library's methods by name."""
    from dynamiq_jax import comparators  # here: importing the library does not take them all in

    others = (getattr(comparators, name) for name in comparators.__all__)
    return {c.__name__: c for c in (DynamiQ, BF16, F32, *others, ErrorFeedback)}


def read(file: str | Path) -> dict[str, Any]:
    """The fields of a `Compression`, from a file that `write` wrote."""
    try:
        return parse(json.loads(_checked(file).read_text()))
    except RecursionError:
        raise ValueError(
            f"{file} is nested too deeply; expected the tables method and topology, as "
            "dq.Compression.save writes them"
        ) from None
    except ValueError as error:  # also what JSON's parser raises
        raise ValueError(f"{file}: {error}") from error


def write(file: str | Path, compression: Any) -> None:
    """Writes a `Compression` as JSON; see `describe`."""
    _checked(file).write_text(json.dumps(describe(compression), indent=1) + "\n")


def _checked(file: str | Path) -> Path:
    file = Path(file)
    if file.suffix != SUFFIX:
        raise ValueError(f"{file} must end in {SUFFIX}, and ends in {file.suffix!r}")
    return file


def parse(values: Any) -> dict[str, Any]:
    """The fields of a `Compression`, from what a file holds: ``{"method": {...}, ...}``."""
    _check_keys("the configuration", values, ("method", "topology", *PLAIN))
    classes = {"method": methods(), "topology": TOPOLOGIES}
    built = {
        k: _build(k, v, classes[k]) for k, v in values.items() if k in classes and v is not None
    }
    return {**values, **built}


def describe(compression: Any) -> dict[str, Any]:
    """The fields that are not at their defaults, as JSON's types."""
    found = {
        "method": _describe("method", compression.method, methods()),
        "topology": _describe("topology", compression.topology, TOPOLOGIES),
    } | {name: getattr(compression, name) for name in PLAIN}
    return {name: value for name, value in found.items() if value is not None}


def _build(where: str, values: Any, classes: Mapping[str, Any]) -> Any:
    """The object of the class that is named, with the fields that are passed."""
    names = ", ".join(classes)
    if not isinstance(values, Mapping) or "name" not in values:
        raise ValueError(f"{where} is {values!r}; expected a table whose name is one of {names}")
    name, fields = values["name"], {key: x for key, x in values.items() if key != "name"}
    if name not in [*classes]:
        raise ValueError(f"{where} {name!r} is not known; expected one of {names}")
    kind = classes[name]
    if kind is ErrorFeedback and "method" not in fields:
        raise ValueError(
            f"{where} {name} has no 'method'; say which it is around, as "
            f'"method": {{"name": "{DynamiQ.__name__}"}}'
        )
    _check_keys(f"{where} {name}", values, ["name", *_fields(kind)])
    others = {key: c for key, c in classes.items() if c is not kind}
    for key in (key for key in NESTED if fields.get(key) is not None):
        fields[key] = _build(f"{where}.{key}", fields[key], others)
    if "format" in fields:
        _check_keys(f"{where}.format", fields["format"], _fields(Format))
        fields["format"] = _made(f"{where}.format", Format, fields["format"])
    return _made(f"{where} {name}", kind, fields)


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _made(where: str, kind: Any, fields: Mapping[str, Any]) -> Any:
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_keys(what: str, values: Any, allowed: Collection[str]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {values!r}; expected a table with {', '.join(allowed)}")
    unknown = [key for key in values if key not in allowed]
    if unknown:
        raise ValueError(f"{what} has no {unknown[0]!r}; expected some of {', '.join(allowed)}")


def _describe(where: str, value: Any, classes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The name, and the fields that are not at their defaults."""
    if value is None:
        return None
    name = type(value).__name__
    if classes.get(name) is not type(value):
        raise ValueError(
            f"{where}={value!r} cannot be saved; pass one of this library's: {', '.join(classes)}"
        )
    return {"name": name} | _changed(where, value, classes)


def _changed(where: str, value: Any, classes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if held == field.default:
            continue
        if field.name in NESTED:
            held = _describe(f"{where}.{field.name}", held, classes)
        elif field.name == "format":
            held = _changed(where, held, classes)
        found[field.name] = list(held) if isinstance(held, tuple) else held
    return found
