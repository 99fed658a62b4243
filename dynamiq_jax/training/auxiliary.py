"""Auxiliary results of losses on Auto axes: one word for each leaf says how workers combine it."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.constraints import reduced_from_nothing
from dynamiq_jax.reduction.reduction import weigh
from dynamiq_jax.tree.leaves import misfit_of


def words_of(aux_tree: Any, told: Any, op: Op, rows: Collection[int]) -> list[str]:
    """The word of every leaf of one worker's aux, which has these numbers of ``rows``.

    Without a word, scalars of floating-point numbers are reduced like the loss. Integers are
    summed and arrays of rows are joined, with a warning.
    """
    paths = jax.tree_util.tree_leaves_with_path(aux_tree)
    try:
        given = _spread(told, aux_tree)
    except ValueError:
        raise ValueError(
            f"aux={told!r} does not fit the loss's aux: {misfit_of(told, aux_tree)}; pass a word "
            "for every leaf, one for all, or a dict of some keys"
        ) from None
    words, guessed = [], {}
    for (path, x), word in zip(paths, given, strict=True):
        kind = jax.typeof(x)
        if word is None and kind.shape[:1] and kind.shape[0] in rows:
            guessed[jax.tree_util.keystr(path)] = word = "rows"
        elif word is None and kind.shape == () and jnp.issubdtype(kind.dtype, jnp.integer):
            guessed[jax.tree_util.keystr(path)] = word = "sum"
        elif word is None and kind.shape == () and jnp.issubdtype(kind.dtype, jnp.inexact):
            word = op
        if word not in ("mean", "sum", "rows", "same"):
            raise ValueError(
                f"aux leaf {jax.tree_util.keystr(path)} is {kind} on every worker, and aux="
                f"{word!r} does not say what it is for all: pass value_and_grad(aux=...), a tree "
                "like it of 'mean', 'sum', 'rows' (every worker's, one after the other), or 'same' "
                "(on all workers)"
            )
        words.append(word)
    if guessed:
        warn(
            f"aux has no words for leaves that are no scalars of floating-point numbers: {guessed} "
            "is what they are taken for. Pass value_and_grad(aux=...) with these words, or 'same' "
            "for what all workers have"
        )
    return words


def _spread(told: Any, tree: Any) -> list[Any]:
    """The word of every leaf of ``tree``; `None` where ``told``, a prefix of it, has none."""
    if told is None or isinstance(told, str):
        return [told] * len(jax.tree.leaves(tree))
    if isinstance(told, Mapping) and isinstance(tree, Mapping):
        if unknown := [key for key in told if key not in tree]:
            raise ValueError(f"{unknown[0]!r} is not a key of aux")
        told = {key: told.get(key) for key in tree}
    is_branch = lambda x: x is not told and x is not tree
    words, parts = (jax.tree.flatten(x, is_leaf=is_branch) for x in (told, tree))
    if words[1] != parts[1]:
        raise ValueError(f"{words[1]} is not {parts[1]}")
    pairs = zip(words[0], parts[0], strict=True)
    return [word for own, part in pairs for word in _spread(own, part)]


def reduce_aux(aux: Any, words: list[str], share: Array | None, axis: Axis) -> tuple[Any, Any]:
    """Leaves of aux that are the same on all workers, and rows; `None` where the other has one."""
    leaves, treedef = jax.tree.flatten(aux)
    pairs = [(x, word, word == "rows") for x, word in zip(leaves, words, strict=True)]
    alike = (None if row else reduce_value(x, word, share, axis) for x, word, row in pairs)
    rows = (axis.to_varying(x) if row else None for x, _, row in pairs)
    return treedef.unflatten(alike), treedef.unflatten(rows)


def reduce_value(x: Any, word: str, share: Array | None, axis: Axis) -> Array:
    """One value of all workers; sums and means of low precision are taken in f32."""
    x = axis.to_varying(jnp.asarray(x))
    if word == "same":
        return axis.assume_invarying(x)
    low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    wide = x.astype(jnp.float32) if low else x
    if word == "sum":
        return axis.psum(wide).astype(x.dtype)
    return axis.pmean(weigh(wide, share)).astype(x.dtype)


def warn_of_nothing(program: Any, shapes: tuple[Any, tuple[Any, Any], Any], axis: Axis) -> None:
    """Warns of aux that is reduced from arrays without entries, if the loss is not.

    ``program`` returns the value, aux as from `reduce_aux`, and more; ``shapes`` is a tree like its
    results.
    """
    empty = reduced_from_nothing(program)
    value, aux, _ = jax.tree.structure(shapes).unflatten(empty)
    paths = [path for part in aux for path, own in jax.tree_util.tree_leaves_with_path(part) if own]
    if not paths or value:
        return
    names = [jax.tree_util.keystr(path) for path in paths]
    warn(
        f"aux leaves {names[:4]} are sums or means over no entries on every worker of axis "
        f"{axis.name!r}, and such a mean is NaN: a worker has its own examples alone, of which a "
        "slice by the size of the whole batch leaves none. Return all rows with the word 'rows', "
        "and slice them after the call",
    )
