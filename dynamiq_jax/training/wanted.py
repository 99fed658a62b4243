"""The arguments that `value_and_grad` differentiates, and the results that it returns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import Compression
from dynamiq_jax.core.axis import is_explicit, key_words, resharded
from dynamiq_jax.reduction.explicit_sums import scattered_spec
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.leaves import axes_above_one, axes_of, restrict_spec


class Wanted(NamedTuple):
    """The parameters that are differentiated and the results, on axes of either type."""

    total: Reduction
    argnums: int | tuple[int, ...]
    has_aux: bool
    metrics: bool
    unreduced: bool
    ungathered: bool
    allow_int: bool = False
    gathers: Compression | None = None
    """How shards travel that are gathered before the loss; `None`: natively."""

    def whole(self, shards: Any, specs: Sequence[P], mesh: Any, key: Array | None) -> Any:
        """Whole leaves of shards, which `gathers` compresses; others pass.

        Shards are global arrays, as everywhere outside of maps, and have no derivatives.
        """
        total = dataclasses.replace(self.total, gathers=self.gathers)
        over = axes_above_one(total.axis.names, mesh.shape)
        total = total.placed(specs, over=over)
        tree = jax.tree.structure(shards)
        kept = [name for name in mesh.axis_names if name not in total.axis.names]
        before = [scattered_spec(spec, total.axis) for spec in specs]
        after = [restrict_spec(spec, kept) for spec in specs]
        own = jax.tree.map(lax.stop_gradient, shards)
        if is_explicit(mesh):
            pairs = zip(jax.tree.leaves(own), before, strict=True)
            own = tree.unflatten(resharded(x, mesh, spec) for x, spec in pairs)
        mapped = jax.shard_map(
            total.gather,
            mesh=mesh,
            in_specs=(tree.unflatten(before), P()),
            out_specs=tree.unflatten(after),
            check_vma=False,
        )
        return mapped(own, key_words(key))

    @property
    def positions(self) -> "_Positions":
        """Which positional arguments are parameters."""
        return _Positions(self.argnums)

    def joined(self, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """``function`` of parameters and of ``(other positional arguments, keywords)``.

        With ``allow_int`` these end with the parameters' integers.
        """
        if not self.allow_int:
            return self.positions.joined(function)
        whole = () if self.ungathered else self.total.axis.names
        return _with_integers(self.positions, whole, function)

    def check(self, weight: Callable[..., Any] | None) -> None:
        """Refuses what does not go together."""
        if self.total.op == "sum" and weight is not None:
            raise ValueError(
                "op='sum' and weight=: weights are for the mean of means; leave one of them out"
            )
        if self.allow_int and self.unreduced:
            raise ValueError(
                "unreduced=True and allow_int=True: gradients of integers have dtype float0, which "
                "no reduction takes; pass integers in an argument of the loss that argnums= does "
                "not name"
            )


class _Positions(NamedTuple):
    """The positional arguments that are parameters, by one index or several, also negative ones."""

    argnums: int | tuple[int, ...]

    def among(self, count: int) -> list[int]:
        """The indices of the parameters, for this number of arguments."""
        numbers = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        if len({i % count for i in numbers if -count <= i < count}) < len(numbers):
            raise ValueError(
                f"argnums={self.argnums!r}, and the loss got {count} positional arguments; pass "
                "each number once, and parameters by position"
            )
        return [i % count for i in numbers]

    def split(self, args: tuple) -> tuple[Any, tuple]:
        """The parameters, and the other arguments."""
        numbers = self.among(len(args))
        params = tuple(args[i] for i in numbers)
        others = tuple(x for i, x in enumerate(args) if i not in numbers)
        return params[0] if isinstance(self.argnums, int) else params, others

    def joined(self, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """``function`` of parameters and ``(other positional arguments, keywords)``."""

        def run(params: Any, data: tuple[tuple, dict[str, Any]]) -> Any:
            params = (params,) if isinstance(self.argnums, int) else params
            args = list(data[0])
            numbers = self.among(len(params) + len(args))
            for i in sorted(numbers):
                args.insert(i, params[numbers.index(i)])
            return function(*args, **data[1])

        return run


def apart(params: Any) -> tuple[Any, Any]:
    """The leaves with gradients, and the other leaves, in trees with `None` for the rest."""
    moves = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
    return (
        jax.tree.map(lambda x: x if moves(x) else None, params),
        jax.tree.map(lambda x: None if moves(x) else jnp.asarray(x), params),
    )


def together(tree: Any, rest: Any) -> Any:
    """The tree that `apart` split into these two."""
    return jax.tree.map(lambda x, y: y if x is None else x, tree, rest, is_leaf=lambda x: x is None)


def _with_integers(
    positions: _Positions, axes: tuple[str, ...], function: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    """A ``function`` of parameters and of data that end with the parameters' integers.

    Integers that are sharded over these axes, according to their types, are gathered.
    """
    run = positions.joined(function)

    def whole(x: Any) -> Any:
        found = jax.typeof(x).sharding
        if not axes_of(found.spec) & {*axes}:
            return x
        return jax.reshard(
            x, restrict_spec(found.spec, [n for n in found.mesh.axis_names if n not in axes])
        )

    return lambda params, data: run(together(params, jax.tree.map(whole, data[2])), data[:2])
