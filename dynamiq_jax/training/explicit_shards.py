"""Shards on Explicit meshes, outside of maps: gathered where the loss uses them.

A gathered parameter is typed as reduced over the data axes, so that its gradient comes back
unreduced and one compressed collective sums and scatters it. `uses` needs a plain twin of it, too:
there the loss is traced with a mark in the place of the gather.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import check_key, key_words, mesh_of, resharded
from dynamiq_jax.core.compat import traced_for
from dynamiq_jax.jaxprs.uses import gathered_p
from dynamiq_jax.reduction.explicit_sums import (
    large_leaves,
    reduce_unreduced,
    scattered_spec,
)
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.leaves import restrict_spec

_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("dynamiq_jax_whole", default=False)
BACKWARD = 1
"""`traced_for`'s number of the backward passes that begin with `value_and_grad`'s seed."""
MARKS = 2
"""`traced_for`'s number of traces in which calls of `fsdp` leave marks."""

SCOPE = "gathered_by_dynamiq_jax"
"""The scope of every gather in a program, by which `gathers` finds it."""


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


def gather_outside(total: Reduction, params: Any, *, key: Array | None) -> Any:
    """`fsdp` outside of maps: types say which leaves are shards; others pass."""
    axis = total.axis
    if _whole.get():
        raise ValueError(
            "fsdp is called in a loss whose sharded parameters value_and_grad has "
            f"gathered: pass value_and_grad(loss, axis_name={axis.name!r}, ungathered=True)"
        )
    check_key(key)
    mesh = mesh_of(params)
    leaves, treedef = jax.tree.flatten(params)
    placed = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    total = total.placed(placed)
    kept = [name for name in mesh.axis_names if name not in axis.names]
    whole = [restrict_spec(spec, kept) for spec in placed]
    large = large_leaves(total, params, placed, mesh)
    numbers = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    chosen = [i for i in numbers if total.placement.splits[i]]
    gather = Gather(total, mesh, treedef, chosen, large, placed, whole)
    shards, words = [leaves[i] for i in chosen], key_words(key)
    with jax.named_scope(SCOPE):
        if traced_for.value == MARKS:
            more = [] if words is None else [words]
            found = iter(gathered_p.bind(*shards, *more, gather=gather))
        else:
            found = iter(gather.typed(shards, words) if chosen else ())
    splits = total.placement.splits
    exact = [resharded(x, mesh, whole[i]) if splits[i] else x for i, x in enumerate(leaves)]
    return treedef.unflatten(next(found) if i in chosen else x for i, x in enumerate(exact))


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """How one call of `fsdp` gathers shards, and scatters their gradients.

    Shards, values and gradients are lists of the chosen leaves, in their order.
    """

    total: Reduction
    mesh: AbstractMesh
    treedef: Any
    chosen: Sequence[int]
    """The numbers of leaves that are gathered."""
    large: Collection[int]
    """The numbers of leaves whose gradients stay unreduced."""
    placed: Sequence[P]
    """How leaves are sharded, and how whole ones are."""
    whole: Sequence[P]

    def values(self, shards: Sequence[Array], words: Array | None) -> list[Array]:
        """Whole leaves, without types and without derivatives."""
        before = [scattered_spec(spec, self.total.axis) for spec in self.placed]
        maps = {"in_specs": (self._tree(before), P()), "out_specs": self._tree(self.whole)}
        gather = self.total.some(self.chosen).gather
        mapped = jax.shard_map(gather, mesh=self.mesh, check_vma=False, **maps)
        own = self._put(map(lax.stop_gradient, shards), before)
        return self._put(jax.tree.leaves(mapped(self._joined(own), words)), self.whole)

    def typed(
        self, shards: Sequence[Array], words: Array | None, values: Sequence[Array] | None = None
    ) -> list[Array]:
        """Whole leaves; large ones are typed as reduced, and their terms summed, compressed.

        ``values`` are those of `values`, if they are known.
        """
        reduced = frozenset(self.total.axis.names)
        after = [
            P(*spec, reduced=reduced) if i in self.large else spec
            for i, spec in enumerate(self.whole)
        ]

        def forward(
            shards: Sequence[Array], words: Array | None, values: Sequence[Array] | None
        ) -> tuple[list[Array], Array | None]:
            found = self.values(shards, words) if values is None else values
            return self._put(found, after), words

        def backward(words: Array | None, gradients: list[Array]) -> tuple[Any, None, None]:
            if traced_for.value != BACKWARD:
                raise ValueError(
                    "fsdp outside of maps found a derivative that is not "
                    "dq.value_and_grad's: JAX's seed is a constant, of which every device would "
                    f"add all to the terms that are summed over {self.total.axis.names}; pass the "
                    f"loss to dq.value_and_grad(loss, axis_name={self.total.axis.name!r})"
                )
            back = self.total.with_specs(self._tree(self.placed))
            done = reduce_unreduced(back, self._joined(gradients), words)
            return jax.tree.leaves(done.tree), None, None

        gathered = jax.custom_vjp(lambda *args: forward(*args)[0])
        gathered.defvjp(forward, backward)
        return gathered(list(shards), words, values)

    def plain(self, place: int, shard: Array, value: Array) -> Array:
        """A whole leaf without a type: JAX sums its gradient, of which a slice is the shard's."""
        spec = self.placed[self.chosen[place]]
        gathered = jax.custom_vjp(lambda shard, value: value)
        gathered.defvjp(
            lambda shard, value: (value, None),
            lambda _, gradient: (resharded(gradient, self.mesh, spec), None),
        )
        return gathered(shard, value)

    def _tree(self, values: Sequence[Any]) -> Any:
        """A tree like the parameters, of the chosen ones of a value for each leaf."""
        return self._joined([values[i] for i in self.chosen])

    def _joined(self, values: Sequence[Any]) -> Any:
        """A tree like the parameters, of values of chosen leaves, and `None` for others."""
        known = dict(zip(self.chosen, values, strict=True))
        return self.treedef.unflatten(known.get(i) for i in range(self.treedef.num_leaves))

    def _put(self, arrays: Iterable[Array], specs: Sequence[P]) -> list[Array]:
        pairs = zip(arrays, self.chosen, strict=True)
        return [resharded(x, self.mesh, specs[i]) for x, i in pairs]
