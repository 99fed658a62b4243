"""The workers of a collective, and JAX's collectives among them."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.core.compat import (
    assume_invarying,
    half_reduced_axes,
    is_constant,
    varying_axes,
    vmapped,
)

AxisName = str | tuple[str, ...]
"""One mapped axis, or several that count as one; worker indices are in row-major order."""

Varying = Literal["varying", "invarying", "reduced"]
"""JAX's type of a gathered array over the axis; `jax.lax.all_gather` takes it as ``to``."""


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """The workers that reduce together: all of the named axes, or one group of them.

    Worker indices are row-major over several axes; in a group they follow the group's list.

    Attributes:
      names: the mapped axes, the outermost first.
      groups: ``axis_index_groups`` of `jax.lax`: groups of equal size, which cover all workers.
      levels: whether `all_gather` gathers over the outer axes first, then over the inner axis. Then
        each outer link carries the array of one inner worker.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None
    levels: bool = False

    @property
    def name(self) -> AxisName:
        """The names in `jax.lax`'s form: a str for one axis, else a tuple."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def size(self) -> int:
        """The number of workers that reduce together."""
        if self.groups is not None:
            return len(self.groups[0])
        return math.prod(map(lax.axis_size, self.names))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name, as push kernels take them."""
        if self.groups is not None:
            raise NotImplementedError(
                f'transport="push" has no axis_index_groups, and got {self.groups}; '
                'pass transport="permutes" or "collectives"'
            )
        return {name: lax.axis_size(name) for name in self.names}

    @property
    def index(self) -> Array:
        """This worker's index, int32."""
        if self.groups is None:
            return lax.axis_index(self.name)
        place = np.empty(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            place[list(group)] = np.arange(len(group))
        return jnp.asarray(place)[lax.axis_index(self.name)]

    @property
    def inner(self) -> "Axis":
        """The last of several axes."""
        return Axis(self.names[-1:])

    @property
    def outer(self) -> "Axis":
        """All axes but the last."""
        return Axis(self.names[:-1])

    # --- JAX's types ------------------------------------------------------------------------------

    @property
    def tracked(self) -> bool:
        """Whether the surrounding map checks varying axes (shard_map's ``check_vma=True``)."""
        found = [False]
        if self.names:  # Traced, so that nothing runs where the caller is not in jit.
            jax.eval_shape(lambda: found.append(self.varies(lax.axis_index(self.names))))
        return found[-1]

    @property
    def mapped(self) -> bool:
        """Whether the caller runs under a map over all of the axes."""
        try:
            if 1 in [lax.axis_size(name) for name in self.names]:  # of all names
                # Outside of maps JAX tells the size 1, too, where its types leave out such axes.
                jax.eval_shape(lambda: lax.axis_index(self.names))
        except NameError:
            return False
        return True

    @property
    def vmapped(self) -> bool:
        """Whether one of the axes is `jax.vmap`'s, outside of `jax.jit`."""
        return any(map(vmapped, self.names))

    @property
    def several_vmapped(self) -> bool:
        """Whether there are several axes, some `jax.vmap`'s: most batching rules take one only."""
        return len(self.names) > 1 and self.vmapped

    def program(self, compiled: Any) -> Any:
        """A function of `jax.jit`; for several axes of `jax.vmap`, the function that it wraps."""
        return compiled.__wrapped__ if self.several_vmapped else compiled

    def varies(self, x: Any) -> bool:
        """Whether JAX knows that ``x`` varies over every one of the axes."""
        return varying_axes(x).issuperset(self.names)

    def replicates(self, x: Any) -> bool:
        """Whether JAX knows that all workers hold the same ``x``."""
        return (varying_axes(x) | half_reduced_axes(x)).isdisjoint(self.names)

    def to_varying(self, tree: Any) -> Any:
        """``tree`` with every leaf cast to varying over all axes, where JAX tracks that."""

        def cast(x: Any) -> Any:
            missing = tuple(name for name in self.names if name not in varying_axes(x))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree) if self.tracked else tree

    def inexact_to_varying(self, tree: Any) -> Any:
        """`to_varying` of the leaves of floating-point dtypes."""
        moves = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        return jax.tree.map(lambda x: self.to_varying(x) if moves(x) else x, tree)

    def like(self, tree: Any, other: Any) -> Any:
        """``tree``, whose leaves are cast to varying where those of the ``other`` tree vary."""

        def cast(x: Any, y: Any) -> Any:
            missing = tuple(sorted(varying_axes(y) - varying_axes(x)))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree, other)

    def assume_invarying(self, x: Array) -> Array:
        """``x``, which has the same bits on all workers; from here JAX types it as replicated."""
        return x if self.groups is not None else assume_invarying(x, self.names)

    # --- Collectives ------------------------------------------------------------------------------

    def psum(self, tree: Any) -> Any:
        """`lax.psum`; with groups it also runs if JAX tracks varying axes, and sums still vary."""
        if self.groups is None or not self.tracked:
            return lax.psum(tree, **self._grouped)

        def total(x: Any) -> Any:
            if is_constant(x):
                return lax.psum(x, **self._grouped)
            parts = jnp.pad(x.reshape(-1), (0, -x.size % self.size)).reshape(self.size, -1)
            whole = self.all_gather(self.psum_scatter(parts))
            return whole.reshape(-1)[: x.size].reshape(x.shape)

        return jax.tree.map(total, tree)

    def pmean(self, tree: Any) -> Any:
        """`lax.pmean`."""
        return lax.pmean(tree, **self._grouped)

    def pmax(self, tree: Any) -> Any:
        """`lax.pmax`; with groups the result still varies if JAX tracks that."""
        if self.groups is None:
            return lax.pmax(tree, self.name)
        return jax.tree.map(lambda x: jnp.max(self.all_gather(x), axis=0), tree)

    def psum_scatter(self, x: Array) -> Array:
        """The sum of ``x[index]`` over workers."""
        if self.groups is not None or not self.several_vmapped:
            return lax.psum_scatter(x, **self._grouped)
        return lax.psum(x, self.name)[lax.axis_index(self.name)]

    def all_gather(self, x: Array, to: Varying = "varying") -> Array:
        """`lax.all_gather` to a new leading axis; ``to`` has an effect if JAX tracks types."""
        if self.groups is not None:
            return lax.all_gather(x, **self._grouped)
        if self.levels:
            gathered = self.inner.all_gather(self.outer.all_gather(x, to), to)
            return gathered.swapaxes(0, 1).reshape(-1, *x.shape)
        if self.several_vmapped:
            gathered = functools.reduce(lax.all_gather, reversed(self.names), x)
            return gathered.reshape(-1, *x.shape)
        if to != "varying" and (self.varies(x) or self.tracked):
            return lax.all_gather(x, self.name, to=to)
        return lax.all_gather(x, self.name)

    def all_to_all(self, tree: Any) -> Any:
        """Sends ``x[j]`` of every leaf to worker j; ``result[i]`` is from worker i."""
        return lax.all_to_all(tree, **self._grouped, split_axis=0, concat_axis=0, tiled=True)

    def ppermute(self, tree: Any, permutation: list[tuple[int, int]]) -> Any:
        """`lax.ppermute` by (source, destination) pairs of all workers."""
        if self.groups is not None:
            pairs = [(group[s], group[d]) for group in self.groups for s, d in permutation]
            return lax.ppermute(tree, self.name, pairs)
        if not self.several_vmapped:
            return lax.ppermute(tree, self.name, permutation)
        source = jnp.array([s for s, _ in sorted(permutation, key=lambda pair: pair[1])])
        mine = source[lax.axis_index(self.name)]
        return jax.tree.map(lambda x: self.all_gather(x)[mine], tree)

    @property
    def _grouped(self) -> dict[str, Any]:
        """Arguments of `jax.lax`'s collectives that name the workers."""
        return {"axis_name": self.name, "axis_index_groups": self.groups}


def together(*trees: Any) -> tuple[Any, ...]:
    """Passes trees through a barrier: users of one of their arrays wait for all of them.

    JAX lets what passes a barrier vary over all axes over which one of the arrays does.
    """

    def as_before(held: Array, x: Array) -> Array:
        return assume_invarying(held, tuple(sorted(varying_axes(held) - varying_axes(x))))

    def passes(x: Array) -> bool:
        return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    leaves, treedef = jax.tree.flatten(trees)
    moving = list(filter(passes, leaves))
    held = iter(map(as_before, lax.optimization_barrier(moving), moving))
    return treedef.unflatten(next(held) if passes(x) else x for x in leaves)
