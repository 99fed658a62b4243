"""Files of a model's shapes, for ``dynamiq-jax advise`` and ``dynamiq-jax explain``."""

import json
import math
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dynamiq_jax.tree.leaves import describe_leaves, holds_numbers


def save_model_tree(file: str | Path, params: Any) -> None:
    """Writes paths, shapes and dtypes of all leaves, for ``dynamiq-jax advise`` and ``explain``.

    The file describes gradients, which have the shapes and dtypes of parameters. It is JSON in the
    tree's order, ``{"layers/0/kernel": [[768, 3072], "float32"], ...}``, with the paths that
    ``Compression(exclude=...)`` searches.

    Args:
      file: where to write.
      params: a tree of arrays or of `jax.ShapeDtypeStruct`s.

    Returns:
      Nothing.

    Raises:
      OSError: the file cannot be written.
    """
    leaves = describe_leaves(params)
    names = [leaf.path for leaf in leaves]
    if len({*names}) < len(names):  # as those of {"a/b": x, "a": {"b": y}}
        names = [leaf.name for leaf in leaves]
    pairs = zip(names, leaves, strict=True)
    lines = [f"{json.dumps(name)}: {json.dumps([x.shape, x.dtype.name])}" for name, x in pairs]
    Path(file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load_model_tree(file: str | Path) -> "OrderedDict[str, jax.ShapeDtypeStruct]":
    """Reads a file of `save_model_tree`.

    Args:
      file: what `save_model_tree` has written.

    Returns:
      The leaves by name, in the order of the file.

    Raises:
      ValueError: the file is not one of `save_model_tree`.
    """
    file = Path(file)
    wanted = "expected {name: [shape, dtype]}, as save_model_tree writes it"
    try:
        held = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; {wanted}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{file} holds a JSON {type(held).__name__}, not an object; {wanted}")
    if not held:
        raise ValueError(f"{file} holds no leaves; {wanted}")
    tree = OrderedDict()
    for name, entry in held.items():
        try:
            shape, dtype = entry
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError("the shape has to be a list of integers from 0 on")
            if not isinstance(dtype, str) or not holds_numbers(jnp.dtype(dtype)):
                raise ValueError("the dtype has to be one of numbers, such as 'float32'")
            if math.prod(max(n, 1) for n in shape) * jnp.dtype(dtype).itemsize > sys.maxsize:
                raise ValueError(f"it has more than {sys.maxsize} bytes")
            tree[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: leaf {name!r} is {entry!r}: {error}; {wanted}") from error
    return tree
