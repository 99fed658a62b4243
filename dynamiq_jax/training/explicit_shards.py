"""Shards on Explicit meshes, outside of maps: gathered where the loss uses them.

A gathered parameter is typed as reduced over the data axes, so that its gradient comes back
unreduced and one compressed collective sums and scatters it.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.explicit_sums import (
    large_leaves,
    mesh_of,
    reduce_unreduced,
    resharded,
    scattered_spec,
)
from dynamiq_jax.collectives.sum import Sum
from dynamiq_jax.core.compat import inner_jaxprs, name_of, traced_for, with_constants
from dynamiq_jax.core.seeds import check_key, key_words
from dynamiq_jax.tree.placement import only

_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("dynamiq_jax_whole", default=False)
BACKWARD = 1
"""`traced_for`'s number of the backward passes that begin with `value_and_grad`'s seed."""

SCOPE = "gathered_by_dynamiq_jax"
"""The scope of every gather in a program, by which `gathers` finds it."""

DATA = -1
"""The number of all values in a program that are not its inputs."""


def inputs_of(
    jaxpr: Any,
    takes: Callable[[JaxprEqn], Sequence[Any]],
    *,
    alone: bool = False,
    ends: str = "",
) -> set[int]:
    """The numbers of a program's inputs of which those operands are made that ``takes`` returns.

    If ``alone``, operands count that are made of one input, and of nothing else in the program. The
    results of the primitive ``ends`` count as data.
    """
    found: set[int] = set()

    def walk(jaxpr: Any, known: dict[Any, frozenset[int]]) -> None:
        for equation in with_constants(jaxpr)[0].eqns:
            atoms = [a for a in equation.invars if not isinstance(a, Literal)]
            for atom in takes(equation):
                sources = known.get(atom, frozenset())
                found.update(sources if not alone or len(sources) == 1 else ())
            for inner in inner_jaxprs(equation):
                own = with_constants(inner)[0].invars  # the last inputs, of loops and branches
                pairs = zip(reversed(own), reversed(equation.invars), strict=False)
                given = [(a, b) for a, b in pairs if not isinstance(b, Literal)]
                walk(inner, {a: known.get(b, frozenset()) for a, b in given})
            sources = frozenset().union(*(known.get(a, frozenset()) for a in atoms))
            if name_of(equation) == ends:
                sources = frozenset({DATA})
            known.update(dict.fromkeys(equation.outvars, sources))

    own, _ = with_constants(jaxpr)
    inputs = {x: frozenset({i}) for i, x in enumerate(own.invars)}
    walk(jaxpr, inputs | dict.fromkeys(own.constvars, frozenset({DATA})))
    return found - {DATA}


def gathers(equation: JaxprEqn) -> Sequence[Any]:
    """The operands of which `gather_outside` makes whole leaves."""
    scoped = SCOPE in str(equation.source_info.name_stack)
    return [a for a in equation.invars if scoped and not isinstance(a, Literal)]


@contextlib.contextmanager
def gathered_before(whole: bool) -> Iterator[None]:
    """While it lasts, a loss is traced whose shards were gathered before it, if ``whole``."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def gather_outside(total: Sum, params: Any, *, key: Array | None) -> Any:
    """`reduce_in_backward` outside of maps: types say which leaves are shards; others pass."""
    axis = total.axis
    if _whole.get():
        raise ValueError(
            "reduce_in_backward is called in a loss whose sharded parameters value_and_grad has "
            f"gathered: pass value_and_grad(loss, axis_name={axis.name!r}, gather=False)"
        )
    check_key(key)
    mesh = mesh_of(params)
    leaves, treedef = jax.tree.flatten(params)
    placed = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    total = total.placed(placed)
    kept = [name for name in mesh.axis_names if name not in axis.names]
    whole = [only(spec, kept) for spec in placed]
    large = large_leaves(total, params, placed, mesh)
    numbers = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    chosen = [i for i in numbers if total.splits[i]]

    def some(values: list[Any]) -> Any:
        """A tree like the parameters, of the shards that have gradients."""
        return treedef.unflatten([values[i] if i in chosen else None for i in range(len(leaves))])

    before = [scattered_spec(spec, axis) for spec in placed]
    reduced = frozenset(axis.names)
    after = [P(*spec, reduced=reduced) if i in large else spec for i, spec in enumerate(whole)]
    maps = {"in_specs": (some(before), P()), "out_specs": some(whole)}
    mapped = jax.shard_map(total.some(chosen).gather, mesh=mesh, check_vma=False, **maps)

    def put(tree: Any, specs: list[P]) -> Any:
        pairs = zip(jax.tree.leaves(tree), chosen, strict=True)
        moved = [resharded(x, mesh, specs[i]) for x, i in pairs]
        return jax.tree.structure(tree).unflatten(moved)

    def forward(tree: Any, words: Array | None) -> tuple[Any, Array | None]:
        return put(mapped(put(tree, before), words), after), words

    def backward(words: Array | None, gradients: Any) -> tuple[Any, None]:
        if traced_for.value != BACKWARD:
            raise ValueError(
                "reduce_in_backward outside of maps found a derivative that is not "
                "dq.value_and_grad's: JAX's seed is a constant, of which every device would add "
                f"all to the terms that are summed over {axis.names}; pass the loss to "
                f"dq.value_and_grad(loss, axis_name={axis.name!r})"
            )
        back = dataclasses.replace(total, specs=some(placed))
        return reduce_unreduced(back, gradients, words).tree, None

    gathered = jax.custom_vjp(lambda tree, words: forward(tree, words)[0])
    gathered.defvjp(forward, backward)
    with jax.named_scope(SCOPE):
        found = iter(jax.tree.leaves(gathered(some(leaves), key_words(key))) if chosen else ())
    exact = [resharded(x, mesh, whole[i]) if total.splits[i] else x for i, x in enumerate(leaves)]
    return treedef.unflatten(next(found) if i in chosen else x for i, x in enumerate(exact))
