"""Models that commands read: files of shapes, or numbers of parameters."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from dynamiq_jax.commands.bench.contenders import MAX_COORDS, parse_params
from dynamiq_jax.plan.model_tree import load_model_tree


def model_file(model: str) -> Path | None:
    """The file that a command's MODEL names, or `None` if it names none."""
    return Path(model) if os.path.isfile(model) else None  # noqa: PTH113  # also of long names


def read_model(model: str) -> tuple[str, Mapping[str, jax.ShapeDtypeStruct]]:
    """The name and leaves of a model: of a file, or of a number such as ``125M``, one bf16 leaf."""
    if file := model_file(model):
        return file.name, load_model_tree(file)
    count = parse_params(model)
    return f"{model} bf16 parameters", {"model": jax.ShapeDtypeStruct((count,), jnp.bfloat16)}


def floating_leaves(tree: Mapping[str, jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Floating-point leaves that are not empty, at least one; refuses leaves too large to draw."""
    found = {k: x for k, x in tree.items() if jnp.issubdtype(x.dtype, jnp.floating) and x.size}
    if not found:
        raise ValueError(
            f"none of {len(tree)} leaves has floating-point numbers; pass a model's gradients"
        )
    for name, leaf in found.items():
        if leaf.size > MAX_COORDS:
            raise ValueError(
                f"leaf {name!r} has {leaf.size:,} coordinates, and test data of at most "
                f"{MAX_COORDS:,} are made on each device: pass what one device holds of it"
            )
    return list(found.values())
