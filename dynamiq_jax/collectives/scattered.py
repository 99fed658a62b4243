"""Parameters that are sharded over data axes (FSDP, HSDP): gathered on use, gradients scattered.

A leaf that is split over some of the data axes is gathered over these before the loss takes it. Its
gradient is scattered over these, and what each device is left with all-reduced over the others.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import UInt

from dynamiq_jax.collectives.halves import all_gather, psum_scatter
from dynamiq_jax.collectives.in_maps import reduce_over
from dynamiq_jax.core.axis import Axis, Varying
from dynamiq_jax.core.checks import Op, axis_sizes
from dynamiq_jax.core.compat import varying_axes
from dynamiq_jax.core.seeds import fold_seed, key_words
from dynamiq_jax.methods import BF16, F32, Method
from dynamiq_jax.request.compression import ByPath, Compression
from dynamiq_jax.request.ways import PARAMETERS
from dynamiq_jax.topologies import AnyTopology
from dynamiq_jax.tree.leaves import COMPRESSED_DTYPES, Leaf, describe_leaves
from dynamiq_jax.tree.placement import axes_of, flat_specs, names_of, part, surroundings

Split = tuple[tuple[int, tuple[str, ...]], ...]
"""The dimensions of a leaf that data axes split, each with its axes."""


def split_of(spec: P, axes: tuple[str, ...]) -> Split:
    """How ``axes`` split a leaf."""
    own = (tuple(name for name in names_of(entry) if name in axes) for entry in spec)
    return tuple((dimension, names) for dimension, names in enumerate(own) if names)


def gather(params: Any, splits: list[Split]) -> Any:
    """Whole parameters from every device's shards of them, exactly."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(map(_whole, leaves, splits))


LARGE_GATHER = 1 << 30
"""Bytes of whole parameters on one device above which a gather before the loss is warned of."""


def warn_of_gather(gathered: list[Leaf], remedy: str, what: str = "parameters") -> None:
    """Warns of a large gather before the loss; the leaves are what one device holds afterwards."""
    nbytes = sum(leaf.nbytes for leaf in gathered)
    if nbytes > LARGE_GATHER:
        warnings.warn(
            f"{len(gathered)} sharded {what} are gathered before the loss, "
            f"{nbytes:,} bytes on every device; to hold one layer at a time {remedy}",
            stacklevel=3,
        )


def _whole(x: Array, split: Split) -> Array:
    for dimension, names in split:
        x = lax.all_gather(x, names, axis=dimension, tiled=True)
    return x


def whole_shape(shape: tuple[int, ...], split: Split, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a leaf, from that of one shard."""
    counts = {dimension: math.prod(sizes[name] for name in names) for dimension, names in split}
    return tuple(length * counts.get(i, 1) for i, length in enumerate(shape))


class Shards:
    """Which leaves of a tree are one worker's shards inside of a map, as PartitionSpecs say.

    Attributes:
      whole: the shapes and dtypes of the tree's leaves, gathered.
    """

    def __init__(self, params: Any, axis: Axis, specs: Any):
        """``specs`` are over the data axes of ``axis``, and over others as for `psum`.

        Raises:
          ValueError: a spec does not fit its leaf, the leaf is known to be the same on all workers,
            or a dimension is split over other axes within the data axes' parts.
        """
        self._around = around = surroundings(axis)
        leaves, treedef = jax.tree.flatten(params)
        known = {*around.sizes, *axis.names}
        told = flat_specs(specs, params, known)
        self._splits = [split_of(spec, axis.names) for spec in told]
        opened = around.specs(params, specs) if any(self._splits) else None
        self._opened = opened or [P()] * len(leaves)
        pairs = zip(told, self._opened, strict=True)
        self._others = [(axes_of(own) | axes_of(typed)) - {*axis.names} for own, typed in pairs]
        sizes = dict(zip(axis.names, axis_sizes(axis), strict=True))
        within = {name: around.sizes[name] if name in around.open else 1 for name in known}
        shapes = []
        for leaf, x, spec, split in zip(
            describe_leaves(params), leaves, told, self._splits, strict=True
        ):
            part(leaf, spec, within)  # refuses specs that do not fit
            self._check(leaf, x, spec, split, axis)
            shapes.append(jax.ShapeDtypeStruct(whole_shape(leaf.shape, split, sizes), leaf.dtype))
        self.whole = treedef.unflatten(shapes)
        self._moving = [i for i, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def __bool__(self) -> bool:
        """Whether any leaf is a shard."""
        return any(self._splits)

    def gather(self, gather: "Gather", params: Any, key: Array | None) -> Any:
        """The tree with whole leaves."""
        return self._per_part(gather, params, key, range(len(self._splits)))

    def reduce(self, reduction: "Reduction", gradients: Any, key: Array | None) -> Any:
        """Reduces gradients of whole leaves, those of shards to shards; integers have none."""
        return self._per_part(reduction, gradients, key, self._moving)

    def _per_part(self, run: Any, tree: Any, key: Array | None, places: Sequence[int]) -> Any:
        splits, others = ([own[i] for i in places] for own in (self._splits, self._others))
        specs = jax.tree.structure(tree).unflatten(self._opened[i] for i in places)
        own = functools.partial(run, splits=splits, others=others)
        return self._around.per_part(own, (specs, P()), specs)(tree, key)

    def _check(self, leaf: Leaf, x: Array, spec: P, split: Split, axis: Axis) -> None:
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
            if entry != (*within, *names) or {*within} & {*self._around.open}:
                raise ValueError(
                    f"specs: dimension {dimension} of leaf {leaf.name} is split over {entry}, and "
                    f"what a gather over {names} gives would be out of order; split another "
                    f"dimension over {tuple(within)}"
                )


class Gather(NamedTuple):
    """How shards become whole parameters, compressed; `Reduction` is the way back."""

    compression: Compression
    to: Varying = "varying"
    """See `all_gather`."""

    @classmethod
    def of(cls, gather: Compression | Method | ByPath | None, reduction: Compression) -> "Gather":
        """The gather of a request; a bare method, by default 8 bits, joins that of the gradients.

        It has the limits of the latter, and leaves that the latter excludes are gathered exactly.
        """
        if isinstance(gather, Compression):
            return cls(gather)
        chosen = PARAMETERS if gather is None else gather

        def method_of(path: str, leaf: jax.ShapeDtypeStruct) -> Method | None:
            if reduction.by_path and cast(ByPath, reduction.method)(path, leaf) is None:
                return None
            return chosen if isinstance(chosen, Method) else chosen(path, leaf)

        method = method_of if reduction.by_path else chosen
        return cls(dataclasses.replace(reduction, method=method, topology=None))

    def __call__(
        self, params: Any, key: Array | None, splits: list[Split], others: list[frozenset[str]]
    ) -> Any:
        """Gathers every device's shards; all devices get the same bits of whole parameters.

        Leaves are gathered together as `Reduction` reduces them together; leaves that are not
        split pass. `BF16` and `F32` are native all-gathers in no more bits than the leaf has.
        """

        def gathered(part: dict[str, Array], own: Compression, split: Split) -> dict[str, Array]:
            words = key_words(key)
            for dimension, names in split:
                seed = None if words is None else fold_seed(words, GATHERS + dimension)
                part = _gather_along(part, own, names, dimension, seed, self.to)
            return part

        return _by_kind(params, self.compression, splits, others, gathered, sharded=True)


GATHERS = 1 << 31
"""Added to a dimension's number for the seed of a gather, whose noise is not the scatter's."""


def _gather_along(
    part: dict[str, Array],
    compression: Compression,
    names: tuple[str, ...],
    dimension: int,
    seed: UInt[Array, " 2"] | None,
    to: Varying,
) -> dict[str, Array]:
    """Leaves that are whole along a dimension, which some axes split."""
    method = compression.method
    if not isinstance(method, BF16 | F32):
        options = {"method": compression, "key": seed, "axis": dimension, "tiled": True, "to": to}
        return all_gather(part, names, **options)
    n = math.prod(map(lax.axis_size, names))
    least = compression.route((n,), hierarchies=False).limits.min_leaf_size

    def exact(x: Array) -> Array:
        stacked = jnp.moveaxis(Axis(names).all_gather(x, to), 0, dimension)
        return stacked.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])

    def native(x: Array) -> Array:
        wire = method.native_dtype(x.dtype)
        narrow = x.dtype.name in COMPRESSED_DTYPES and wire.itemsize < x.dtype.itemsize
        if not narrow or n * x.size < least:
            return exact(x)
        words = lax.bitcast_convert_type(x.astype(wire), jnp.uint16)  # no compiler widens words
        return lax.bitcast_convert_type(exact(words), wire).astype(x.dtype)

    return jax.tree.map(native, part)


def _by_kind(
    tree: Any,
    compression: Compression,
    splits: list[Split],
    others: list[frozenset[str]],
    run: Callable[[dict[str, Array], Compression, Split], dict[str, Array]],
    *,
    sharded: bool = False,
) -> Any:
    """``run(part, own request, split)`` of leaves that are split alike and have the same method.

    The same holds of ``others``, the axes beside the data axes that split a leaf: copies of a leaf
    stay equal only if no part of another leaf shares their widths. Methods by path see whole
    leaves; with ``sharded`` the tree holds one device's shards.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    described = describe_leaves(tree)
    if sharded:
        sizes = {
            name: lax.axis_size(name) for split in splits for _, some in split for name in some
        }
        pairs = zip(described, splits, strict=True)
        described = [
            dataclasses.replace(leaf, whole=whole_shape(leaf.shape, split, sizes))
            for leaf, split in pairs
        ]
    kinds = list(zip(compression.methods_of(described), splits, others, strict=True))
    for kind in dict.fromkeys(kinds):
        method, split, _ = kind
        alike = [i for i, own in enumerate(kinds) if own == kind]
        part = {names[i]: leaves[i] for i in alike}
        own = dataclasses.replace(compression, method=method, exclude=None)
        own = own if method is not None else dataclasses.replace(own, exclude="")
        part = run(part, own, split)
        for i in alike:
            leaves[i] = part[names[i]]
    return treedef.unflatten(leaves)


class Reduction(NamedTuple):
    """How gradients become sums or means over all data axes."""

    axes: tuple[str, ...]
    """The outermost first."""
    sizes: tuple[int, ...]
    compression: Compression
    op: Op

    def __call__(
        self, grads: Any, key: Array | None, splits: list[Split], others: list[frozenset[str]]
    ) -> Any:
        """Reduces gradients of whole parameters; every device gets its shards of the result.

        Leaves that are split alike and have the same method are reduced together, see `_by_kind`.
        """

        def reduced(part: dict[str, Array], own: Compression, split: Split) -> dict[str, Array]:
            return self._replace(compression=own)._alike(part, key, split)

        return _by_kind(grads, self.compression, splits, others, reduced)

    def _alike(self, part: dict[str, Array], key: Array | None, split: Split) -> dict[str, Array]:
        """Reduces leaves that are split alike."""
        dtypes = {name: leaf.dtype for name, leaf in part.items()}
        words = key_words(key)
        within = tuple(name for _, some in split for name in some)
        rest = tuple(name for name in self.axes if name not in within)
        for dimension, some in split:
            seed = None if words is None else fold_seed(words, dimension)
            if seed is not None and rest:  # other groups scatter with other noise
                seed = fold_seed(seed, lax.axis_index(rest))
            part = self._scatter(part, some, dimension, seed)
        if rest:
            own = dataclasses.replace(self.compression, topology=self._topology(rest))
            part = reduce_over(Axis(rest), part, self.op, own, key=key).tree
        n = math.prod(lax.axis_size(name) for name in within) if self.op == "mean" else 1

        def over(total: Array, dtype: Any) -> Array:
            total = total.astype(jnp.float32) / n if n > 1 else total
            return total.astype(dtype)

        return {name: over(total, dtypes[name]) for name, total in part.items()}

    def _scatter(
        self, tree: Any, names: tuple[str, ...], dimension: int, seed: UInt[Array, " 2"] | None
    ) -> Any:
        """Sums over some axes and leaves every device its slice along a dimension."""
        route, topology = self.compression.route(self.sizes), self._topology(names)
        if topology is not None or not (route.topology or isinstance(route.method, BF16 | F32)):
            own = dataclasses.replace(self.compression, topology=topology and topology.sharded)
            options = {"method": own, "key": seed, "tiled": True}
            return psum_scatter(tree, names, scatter_dimension=dimension, **options)

        def native(x: Array) -> Array:
            if x.size >= route.limits.min_leaf_size and x.dtype.name in COMPRESSED_DTYPES:
                x = x.astype(route.method.native_dtype(x.dtype))
            return lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)

        return jax.tree.map(native, tree)

    def _topology(self, names: tuple[str, ...]) -> AnyTopology | None:
        """The topology for some of the axes; `None`: native collectives."""
        whole = self.compression.route(self.sizes).topology
        return whole and whole.over(names, self.axes)
