"""Sums over workers of leaves that may be sharded: data parallelism, FSDP, HSDP and ZeRO-1.

If some of the data axes split a leaf, its terms are scattered over these axes, and the results are
all-reduced over the other axes. `Reduction.gather` gathers the shards.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.agreement import compare_first
from dynamiq_jax.compression.compression import Compression, first_states
from dynamiq_jax.compression.shards import Dimensions, Shards
from dynamiq_jax.core.axis import Axis, Varying, check_key, fold_seed, key_words, knows_devices
from dynamiq_jax.core.checks import Op, axis_sizes, check_groups
from dynamiq_jax.core.compat import varying_axes
from dynamiq_jax.core.warned import warn
from dynamiq_jax.methods import BF16, F32, State
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.buckets import (
    AllReduce,
    check_state,
    check_varying,
    exact_of,
    fixed_leaves,
    over_open_axes,
    reduce_leaves,
    warn_of_equal,
    weighted,
)
from dynamiq_jax.reduction.scatter_gather import gather_over, natively, scatter_over
from dynamiq_jax.tree.leaves import Leaf, describe_leaves
from dynamiq_jax.tree.placement import (
    Padding,
    Placement,
    Split,
    bucket_axes,
    flat_specs,
    n_parts,
    names_of,
    padding_of,
    part,
    surroundings,
    told_specs,
    whole_shape,
)


def _first(at: Dimensions) -> int:
    return min(at) if isinstance(at, tuple) else at


LARGE_GATHER = 1 << 30
"""Bytes of whole parameters on one device above which a gather before the loss is warned of."""


def warn_of_gather(gathered: list[Leaf], remedy: str, what: str = "parameters") -> None:
    """Warns of a large gather before the loss; the leaves are what one device holds afterwards."""
    nbytes = sum(leaf.nbytes for leaf in gathered)
    if nbytes > LARGE_GATHER:
        warn(
            f"{len(gathered)} sharded {what} are gathered before the loss, "
            f"{nbytes:,} bytes on every device; to hold one layer at a time {remedy}",
        )


GATHERS = 1 << 31
"""Added to a dimension's number for the seed of a gather, whose noise is not the scatter's."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum or mean over workers: the leaves, the axes, and how leaves travel."""

    axis: Axis
    compression: Compression
    op: Op
    placement: Placement = Placement()
    """How leaves lie on the mesh; by default they are whole on every worker."""
    gathers: Compression | None = None
    """How shards travel; `None`: nothing is gathered."""
    copied: bool = False
    """Whether all workers hold copies of sharded leaves, so that no loss gathers these (FSDP)."""
    to: Varying = "varying"
    """JAX's type of whole leaves after a gather, as for `all_gather`."""
    overlaps: bool = False
    """Whether reductions run beside a forward or backward pass."""

    def __post_init__(self):
        """Refuses other operations."""
        check_choice("op", self.op, get_args(Op))

    def with_specs(self, specs: Any) -> "Reduction":
        """This reduction with what the user tells of open axes."""
        placement = dataclasses.replace(self.placement, specs=specs)
        return dataclasses.replace(self, placement=placement)

    def placed(self, specs: Sequence[P], **told: Any) -> "Reduction":
        """The sum of leaves that ``specs`` split; ``told`` is as for `Placement.of`."""
        placement = self.placement.of(specs, self.axis.names, **told)
        return dataclasses.replace(self, placement=placement)

    def of_shards(self, params: Any, specs: Any, copies: Any = None) -> tuple["Reduction", Any]:
        """The sum of gradients of ``params``, and the shapes and dtypes of whole leaves.

        Leaves whose ``specs`` name the axis are one worker's shards. If all workers have ``copies``
        of the whole leaves, shards may be padded.
        """
        axis, around = self.axis, surroundings(self.axis)
        known = {*around.sizes, *axis.names}
        told = flat_specs(specs, params, known)
        total = self.with_specs(specs).placed(told)
        splits = total.placement.splits
        opened = (around.specs(params, specs) if any(splits) else None) or [P()] * len(told)
        sizes = dict(zip(axis.names, axis_sizes(axis), strict=True))
        within = {name: around.sizes[name] if name in around.open else 1 for name in known}
        leaves, treedef = jax.tree.flatten(params)
        leaves = zip(describe_leaves(params), leaves, told, splits, strict=True)
        shapes, padding = [], []
        of_copies: list[Any] = [None] * len(told)
        if copies is not None and jax.tree.structure(copies) == treedef:
            of_copies = [jnp.shape(x) for x in jax.tree.leaves(copies)]
        for (leaf, x, spec, split), copy in zip(leaves, of_copies, strict=True):
            part(leaf, spec, within)  # refuses specs that do not fit
            _check_shard(leaf, x, spec, split, axis, around.open)
            whole, zeros = whole_shape(leaf.shape, split, sizes), Padding()
            if copy is not None and len(copy) == len(whole):
                zeros = padding_of(copy, spec, sizes)
                if whole == zeros.padded_shape(copy):
                    whole = copy
                else:  # another leaf's copy
                    zeros = Padding()
            padding.append(zeros)
            shapes.append(jax.ShapeDtypeStruct(whole, leaf.dtype))
        total = total.placed(told, opened=opened, padding=padding)
        return total, treedef.unflatten(shapes)

    def check_scatter(self, state: State | None, metrics: bool) -> None:
        """Refuses a state and metrics, which scattered sums cannot have."""
        if metrics or state is not None:
            raise NotImplementedError(
                f"parameters are sharded over the data axes {self.axis.names}, and scattering "
                "their gradients keeps no state and has no metrics; pass metrics=False, no state, "
                "and a method without memory, or replicate the parameters over these axes"
            )

    def some(self, places: Collection[int]) -> "Reduction":
        """A reduction of only some of these leaves, by their numbers."""
        return dataclasses.replace(self, placement=self.placement.some(places))

    # --- Where axes may be open -------------------------------------------------------------------

    def reduce(
        self,
        tree: Any,
        key: Array | None = None,
        state: State | None = None,
        *,
        metrics: bool = False,
        weight: Array | float | None = None,
    ) -> Reduced:
        """`dynamiq_jax.reduce` inside of a map; of a leaf that workers split each gets its shard.

        Shards come without states, metrics and weights. Workers may be groups.
        """
        axis, op, compression = self.axis, self.op, self.compression
        if self.placement.is_split:
            return Reduced(self._per_part(self.scatter, tree)(tree, key), None, None)
        sizes = axis_sizes(axis)
        check_key(key, axis)
        values, treedef = jax.tree.flatten(tree)
        around = surroundings(axis)
        specs = self.placement.specs
        leaves = around.leaves(tree, specs)
        told = {"op": op, "specs": specs, "metrics": metrics, "key": key, "state": state}
        told["weight"] = weight
        facts = functools.partial(compression.facts, axis, sizes, leaves, **told)
        compare_first("all-reduce", axis, leaves, facts)
        # A leaf travels in a bucket or exactly; a ``fixed`` one does not, or only JAX sums it.
        fixed = fixed_leaves(leaves, values, axis)
        without, overlaps = (fixed, self.overlaps) if state is None else ((), True)
        plan = compression.plan(
            leaves, sizes, without=without, overlaps=overlaps, keyed=key is not None
        )
        if len(fixed) < len(leaves):
            check_groups(axis, all_reduce=True)
        if op == "sum" or state is not None:
            check_varying(plan, fixed, axis)
        warn_of_equal(plan, fixed, axis)
        # The state of every bucket; parts of it over open axes have a leading axis.
        split_over = [bucket_axes(bucket, around.open) for bucket in plan.buckets]
        counts = [n_parts(axes, around.sizes) for axes in split_over]
        expected = jax.eval_shape(functools.partial(first_states, plan, counts))
        states = check_state(state, expected, plan)
        if weight is not None:
            values = weighted(values, leaves, fixed, op, weight, axis)
        # A mean needs no traffic for leaves that are in no bucket and that JAX knows to be equal.
        compressed = {leaf.index for bucket in plan.buckets for leaf in bucket.leaves}
        for i in fixed.keys() - compressed:
            moves = op == "sum" or fixed[i] == "native"
            if moves or not jnp.issubdtype(leaves[i].dtype, jnp.inexact):
                values[i] = exact_of(axis, op)(values[i])
        moving = {i: x for i, x in enumerate(values) if i in compressed or i not in fixed}
        rule = AllReduce(axis, op, metrics, knows_devices())
        run = functools.partial(reduce_leaves, plan=plan, rule=rule)
        if plan.buckets and around.open:
            opened = told_specs(tree, self.placement.specs, around, plan.buckets)
            run = over_open_axes(run, around, {i: opened[i] for i in moving}, split_over)
        moved, states, found = run(moving, key, states)
        total = treedef.unflatten(moved.get(i, value) for i, value in enumerate(values))
        return Reduced(total, None if state is None else tuple(states), found)

    def whole(self, shards: Any, key: Array | None = None) -> Any:
        """Whole leaves, from every worker's shards of them."""
        if not self.placement.is_split:
            return shards
        return self._per_part(self.gather, shards)(shards, key)

    def _per_part(self, run: Callable[[Any, Array | None], Any], tree: Any) -> Callable[..., Any]:
        if self.placement.opened is None:
            return run
        specs = jax.tree.structure(tree).unflatten(self.placement.opened)
        return surroundings(self.axis).per_part(run, (specs, P()), specs)

    # --- What one device holds --------------------------------------------------------------------

    @property
    def shards(self) -> Shards:
        """Which leaves are scattered and gathered together, and how."""
        sizes = dict(zip(self.axis.names, axis_sizes(self.axis), strict=True))
        told = self.placement, self.compression, self.gathers, self.copied, self.overlaps
        return Shards(sizes, *told)

    def scatter(self, terms: Any, key: Array | None) -> Any:
        """Sums terms of whole leaves; every device gets its shards of the sums."""
        found, treedef = _named(terms)
        names, words = [*found], key_words(key)
        pairs = zip(self.placement.padding, found.values(), strict=True)
        padded = [padding.padded(x) for padding, x in pairs]
        for alike in self.shards.scattered(describe_leaves(terms)):
            some = {names[i]: padded[i] for i in alike.numbers}
            for exchange in alike.exchanges:
                axis, compression, at = Axis(exchange.axes), exchange.compression, exchange.at
                if exchange.kind == "all-reduce":
                    rest = Reduction(axis, compression, self.op, overlaps=self.overlaps)
                    some = rest.reduce(some, key).tree
                    continue
                if exchange.native is not None:
                    some = natively(exchange, some, op=self.op, to=self.to)
                    continue
                seed = None if words is None else fold_seed(words, _first(at))
                last = alike.exchanges[-1]
                if seed is not None and last.kind == "all-reduce":
                    # Other groups scatter with other noise.
                    seed = fold_seed(seed, lax.axis_index(last.axes))
                some = scatter_over(axis, some, compression, at, op=self.op, key=seed)
            found |= some
        return treedef.unflatten(found.values())

    def gather(self, shards: Any, key: Array | None) -> Any:
        """Gathers every device's shards; all devices get the same bits of whole leaves.

        Leaves that are not split are returned unchanged, and the zeros of padded ones are removed.
        """
        found, treedef = _named(shards)
        names, words = [*found], key_words(key)
        for alike in self.shards.gathered(describe_leaves(shards)):
            some = {names[i]: found[names[i]] for i in alike.numbers}
            for exchange in alike.exchanges:
                axis, at = Axis(exchange.axes), exchange.at
                if exchange.native is not None:
                    some = natively(exchange, some, op=self.op, to=self.to)
                    continue
                seed = None if words is None else fold_seed(words, GATHERS + _first(at))
                some = gather_over(axis, some, exchange.compression, at, key=seed, to=self.to)
            found |= some
        pairs = zip(self.placement.padding, found.values(), strict=True)
        return treedef.unflatten(padding.cut(x) for padding, x in pairs)

    def gathers_exactly(self, leaves: list[Leaf]) -> list[bool]:
        """Whether the wire's numbers have the dtype of a leaf, so that its shards keep all bits."""
        methods = self.shards.of_gathers.methods_of(leaves)
        return [
            isinstance(method, BF16 | F32)
            and method.native_dtype(leaf.dtype).itemsize >= leaf.dtype.itemsize
            for method, leaf in zip(methods, leaves, strict=True)
        ]


def _named(tree: Any) -> tuple[dict[str, Array], Any]:
    """The leaves by name, and the structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}, treedef


def _check_shard(
    leaf: Leaf, x: Array, spec: P, split: Split, axis: Axis, opened: Collection[str]
) -> None:
    varying = varying_axes(x)
    for dimension, names in split:
        if axis.tracked and not varying.issuperset(names):
            raise ValueError(
                f"specs: leaf {leaf.name} is sharded over {names}, as {spec} says, and all "
                f"workers hold the same {leaf.shape}; pass jax.shard_map the same specs as "
                "in_specs, or leave the axis out of this leaf's spec"
            )
        entry = names_of(spec[dimension])
        within = [name for name in entry if name not in names]
        if entry != (*within, *names) or {*within} & {*opened}:
            raise ValueError(
                f"specs: dimension {dimension} of leaf {leaf.name} is split over {entry}, and "
                f"what a gather over {names} gives would be out of order; split another "
                f"dimension over {tuple(within)}"
            )
