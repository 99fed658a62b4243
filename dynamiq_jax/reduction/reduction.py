"""Sums over workers of leaves that may be sharded: data parallelism, FSDP, HSDP and ZeRO-1.

If some of the data axes split a leaf, its terms are scattered over these axes, and the results are
all-reduced over the other axes. `Reduction.gather` gathers the shards.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.agreement import compare_first
from dynamiq_jax.compression.compression import ByPath, Compression, first_states
from dynamiq_jax.compression.policy import AnyPolicy, Policy, as_compression
from dynamiq_jax.compression.routes import Route
from dynamiq_jax.compression.ways import DIFFERENCES, Sharded, fsdp_methods
from dynamiq_jax.core.axis import Axis, Varying
from dynamiq_jax.core.checks import Op, axis_sizes, check_groups
from dynamiq_jax.core.compat import varying_axes
from dynamiq_jax.core.meshes import knows_devices
from dynamiq_jax.core.seeds import check_key, fold_seed, key_words
from dynamiq_jax.core.warned import warn
from dynamiq_jax.methods import BF16, F32, DynamiQ, Method, State, unless_plain
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
    warn_of_uncompressed,
    weighted,
)
from dynamiq_jax.reduction.scatter_gather import Dimensions, gather_over, natively, scatter_over
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.links import fast_links
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

Step = tuple[Dimensions, tuple[str, ...]]
"""Along which dimensions of the leaves a collective over some axes cuts or joins them."""


def names_only(split: Split) -> Any:
    """Equal for splits that one collective serves: a single one may be along any dimension."""
    return split[0][1] if len(split) == 1 else split


def steps_of(splits: Sequence[Split]) -> tuple[Step, ...]:
    """The collectives of leaves for which `names_only` is equal."""
    found = []
    for own in zip(*splits, strict=True):
        dimensions = tuple(dimension for dimension, _ in own)
        same = len({*dimensions}) == 1
        found.append((dimensions[0] if same else dimensions, own[0][1]))
    return tuple(found)


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
        limits = compression.min_bucket_size, compression.min_bucket_bytes
        warn_of_uncompressed(plan, fixed, axis, limited=limits != (None, None))
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

    def scatter(self, terms: Any, key: Array | None) -> Any:
        """Sums terms of whole leaves, by `_kinds`; every device gets its shards of the sums."""
        found, treedef = _named(terms)
        axes, words = self.axis.names, key_words(key)
        compression = _with_method(self.compression, _defaults(self.copied).gradients)
        for some, own, steps in self._kinds(terms, compression):
            route = self._told(own.route(axis_sizes(self.axis)), self.compression)
            # Scatter over the axes that split the leaf, by dimension; then sum over the rest.
            within = tuple(name for _, names in steps for name in names)
            rest = tuple(name for name in axes if name not in within)
            for at, names in steps:
                seed = None if words is None else fold_seed(words, _first(at))
                if seed is not None and rest:  # other groups scatter with other noise
                    seed = fold_seed(seed, lax.axis_index(rest))
                topology = route.topology and route.topology.over(names, axes)
                plain = isinstance(route.method, BF16 | F32) and not isinstance(topology, Topology)
                along: dict[str, Any] = {"op": self.op, "to": self.to}
                if plain or (topology is None and route.topology):
                    some = natively("reduce-scatter", Axis(names), some, route, at, **along)
                else:
                    routed = dataclasses.replace(own, topology=topology)
                    axis = Axis(names)
                    some = scatter_over(axis, some, routed, at, op=self.op, key=seed)
            if rest:
                topology = route.topology and route.topology.over(rest, axes)
                own = dataclasses.replace(own, topology=topology)
                rest_of = Reduction(Axis(rest), own, self.op, overlaps=self.overlaps)
                some = rest_of.reduce(some, key).tree
            found |= some
        return treedef.unflatten(found.values())

    def gather(self, shards: Any, key: Array | None) -> Any:
        """Gathers every device's shards; all devices get the same bits of whole leaves.

        Leaves that are not split are returned unchanged, and the zeros of padded ones are removed.
        `BF16` and `F32` are native all-gathers, in at most as many bits as the leaf has.
        """
        found, treedef = _named(shards)
        words = key_words(key)
        assert self.gathers is not None
        for some, own, steps in self._kinds(shards, self._of_gathers(), sharded=True):
            told = dataclasses.replace(own, topology=own.topology or self.compression.topology)
            route = self._told(told.route(axis_sizes(self.axis)), self.gathers)
            for at, names in steps:
                seed = None if words is None else fold_seed(words, GATHERS + _first(at))
                axis, along = Axis(names), dict[str, Any](op=self.op, to=self.to)
                if isinstance(own.method, BF16 | F32):
                    some = natively("all-gather", axis, some, route, at, **along)
                else:
                    topology = route.topology and route.topology.over(names, self.axis.names)
                    routed = dataclasses.replace(own, topology=topology)
                    some = gather_over(axis, some, routed, at, key=seed, to=self.to)
            found |= some
        pairs = zip(self.placement.padding, found.values(), strict=True)
        return treedef.unflatten(padding.cut(x) for padding, x in pairs)

    def gathers_exactly(self, leaves: list[Leaf]) -> list[bool]:
        """Whether the wire's numbers have the dtype of a leaf, so that its shards keep all bits."""
        methods = self._of_gathers().methods_of(leaves)
        return [
            isinstance(method, BF16 | F32)
            and method.native_dtype(leaf.dtype).itemsize >= leaf.dtype.itemsize
            for method, leaf in zip(methods, leaves, strict=True)
        ]

    def _told(self, route: Route, passed: Compression) -> Route:
        """The route, which tells what links decide of shards if no method was passed."""
        if self.copied or passed.method is not None or not fast_links():
            return route
        told = "shards and their gradients travel in bf16, which is faster over NVLink"
        return dataclasses.replace(route, defaults=(*route.defaults, told))

    def _of_gathers(self) -> Compression:
        assert self.gathers is not None
        return _with_method(self.gathers, _defaults(self.copied).gathers)

    def _kinds(
        self, tree: Any, compression: Compression, *, sharded: bool = False
    ) -> Iterator[tuple[dict[str, Array], Compression, tuple[Step, ...]]]:
        """Leaves that travel alike, by name; their compression; and over which axes they travel.

        These have the same method and are split over the same axes. Leaves of one split share
        buckets, whatever its dimension is: alone, small ones might not be worth compressing.

        Methods by path see whole leaves, without padding. With ``sharded`` the tree holds one
        device's shards; else it holds whole leaves, and those that travel are padded. Copied leaves
        have a plan only if the user passes one, or for gradients beside a backward pass, which
        hides the time of the statistics.
        """
        described, (named, _) = describe_leaves(tree), _named(tree)
        if sharded:
            sizes = dict(zip(self.axis.names, axis_sizes(self.axis), strict=True))
            triples = zip(described, self.placement.splits, self.placement.padding, strict=True)
            described = [
                dataclasses.replace(
                    leaf, whole=padding.shape_of(whole_shape(leaf.shape, split, sizes))
                )
                for leaf, split, padding in triples
            ]
        else:
            pairs = zip(named.items(), self.placement.padding, strict=True)
            named = {name: padding.padded(x) for (name, x), padding in pairs}
        methods = compression.methods_of(described)
        if self.copied and (sharded or not self.overlaps):
            methods = [None if x is None else x.without_plan() for x in methods]
        alike = [names_only(split) for split in self.placement.splits]
        kinds = list(zip(methods, alike, self.placement.others, strict=True))
        of_names = dict(zip(named, zip(kinds, self.placement.splits, strict=True), strict=True))
        for kind in dict.fromkeys(kinds):
            part = {name: x for name, x in named.items() if of_names[name][0] == kind}
            splits = [of_names[name][1] for name in sorted(part)]  # in the order of a dict's leaves
            exclude = "" if kind[0] is None else None
            own = dataclasses.replace(compression, method=kind[0], exclude=exclude)
            yield part, own, steps_of(splits)


def _defaults(copied: bool) -> Sharded:
    """The methods where none is passed: those of sharded updates, or of FSDP."""
    if copied:
        return Sharded(DynamiQ(), DIFFERENCES)
    return fsdp_methods(fast_links=fast_links())


def _with_method(compression: Compression, default: Method) -> Compression:
    if compression.method is not None:
        return compression
    return dataclasses.replace(compression, method=default)


def gathers_of(policy: AnyPolicy | None, *, copied: bool = False) -> Compression:
    """How shards travel. A bare method, or the default, has the limits of the gradients.

    Without a method of their own, shards of leaves whose gradients are in `BF16` or `F32` travel
    alike. ``copied`` is as for `Reduction`.
    """
    compression = as_compression(policy)
    gather = policy.parameters if isinstance(policy, Policy) else None
    own = isinstance(gather, Compression)
    told = gather if own else dataclasses.replace(compression, method=gather, topology=None)

    def method_of(path: str, leaf: jax.ShapeDtypeStruct) -> Method | None:
        method = cast(ByPath, compression.method)(path, leaf)
        if method is None and not own:
            return None
        if told.method is None:
            return unless_plain(method, _defaults(copied).gathers)
        if isinstance(told.method, Method):
            return told.method
        return told.method(path, leaf)

    if compression.by_path and (told.method is None or not own):
        return dataclasses.replace(told, method=method_of)
    if isinstance(compression.method, BF16 | F32) and told.method is None:
        return dataclasses.replace(told, method=compression.method)
    return told


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
