"""A method for every leaf: leaves of one method are reduced together, and apart from all others."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_jax.arguments import ByPath, check_kinds, chooses_by_path
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.metrics import Metrics, Reduced

EXACT = DynamiQ(min_leaf_size=sys.maxsize)
"""What sums every leaf by `jax.lax.psum`."""

P = ParamSpec("P")
R = TypeVar("R")
Tree = TypeVar("Tree")


def methods_of(tree: Any, choose: ByPath) -> list[tuple[str, Method | None]]:
    """The path and the method of every leaf.

    Raises:
      ValueError: ``choose`` returns neither a method nor `None`.
    """
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x))
        method = choose(name, shape)
        check_kinds(method, None)
        found.append((name, method))
    return found


def parts_of(tree: Tree, choose: ByPath) -> list[tuple[Method | None, Tree]]:
    """Every method and the tree with its leaves alone, `None` where the others were."""
    chosen = [method for _, method in methods_of(tree, choose)]
    leaves, treedef = jax.tree.flatten(tree)

    def only(method):
        pairs = zip(leaves, chosen, strict=True)
        return treedef.unflatten([leaf if own == method else None for leaf, own in pairs])

    return [(method, only(method)) for method in dict.fromkeys(chosen)]


def joined(parts: list[Tree]) -> Tree:
    """The tree of which `parts_of` made the parts."""

    def whole(*leaves):
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(whole, *parts, is_leaf=lambda x: x is None)


def by_path(join: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function of ``(tree, axis or workers, *, method, topology, ...)`` take a `ByPath`.

    It is then called for every method, on a tree of that method's leaves, and ``join(calls, tree,
    options)`` makes one result of all: ``calls`` are pairs of a method and a function that runs it,
    with options of its own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs)
            choose = given.arguments.get("method")
            if not chooses_by_path(choose):
                return function(*args, **kwargs)
            given.apply_defaults()
            tree, *rest = given.args
            options = dict(given.kwargs)

            def call(method, part, **own):
                chosen = EXACT if method is None else method
                return function(part, *rest, **options | {"method": chosen} | own)  # type: ignore

            parts = parts_of(tree, cast(ByPath, choose)) or [(None, tree)]
            calls = [(method, functools.partial(call, method, part)) for method, part in parts]
            return join(calls, tree, options)

        return wrapped

    return decorate


def join_trees(calls, tree, options) -> Any:
    """Of functions that return a tree like theirs."""
    return joined([call() for _, call in calls])


def join_states(calls, tree, options) -> tuple:
    """Of `init_state`: the states of all methods, in the order in which leaves have them."""
    return tuple(call() for _, call in calls)


def join_reductions(calls, tree, options) -> Reduced:
    """Of `reduce`."""
    states = options["state"]
    if states is None:
        states = [None] * len(calls)
    elif not isinstance(states, tuple | list) or len(states) != len(calls):
        given = len(states) if isinstance(states, tuple | list) else f"a {type(states).__name__}"
        raise ValueError(
            f"state is of {given} method(s), and the tree has leaves of {len(calls)}; pass what "
            "dq.init_state gave for the same tree and the same function of paths"
        )
    found = [call(state=state) for (_, call), state in zip(calls, states, strict=True)]
    after = None if options["state"] is None else tuple(part.state for part in found)
    whole = joined([part.tree for part in found])
    if not options["metrics"]:
        return Reduced(whole, after, None)
    sizes = [sum(map(np.size, jax.tree.leaves(part.tree))) for part in found]
    return Reduced(whole, after, _all_metrics([part.metrics for part in found], sizes))


def _all_metrics(parts: list[Metrics], sizes: list[int]) -> Metrics:
    """Those of the whole tree; shares of widths weigh as the coordinates of the methods' leaves."""
    norm = sum((part.norm for part in parts), start=jnp.float32(0))
    error = sum((part.vnmse * part.norm for part in parts), start=jnp.float32(0))
    widths = sum(
        (size * part.widths for size, part in zip(sizes, parts, strict=True)), start=jnp.zeros(17)
    )
    bits = sum(size * part.bits_per_coord for size, part in zip(sizes, parts, strict=True))
    sums = {
        name: sum((getattr(part, name) for part in parts), start=jnp.float32(0))
        for name in ("nonfinite", "saturated", "wire_bytes")
    }
    return Metrics(
        vnmse=jnp.where(norm == 0, 0.0, error / norm),
        norm=norm,
        widths=widths / jnp.maximum(jnp.sum(widths), 1.0),
        bits_per_coord=jnp.asarray(bits / max(sum(sizes), 1), jnp.float32),
        **sums,
    )
