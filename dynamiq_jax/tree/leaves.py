"""Leaves of a pytree: which travel together, which exactly, and how they lie on a mesh.

**Buckets.** A *bucket* is one flat array that is reduced as a whole. A leaf larger than
``bucket_bytes`` is a bucket by itself (a reshape, no copy); smaller ones of one dtype are
concatenated in tree order. Independent buckets let XLA overlap the reduction of one with the
computation of another. On a mesh of several axes only leaves that differ over the same axes share a
bucket: copies of a bucket then have the same widths and noise, and stay copies.

**Placement** on mesh axes that leaves are not reduced over, such as tensor-parallel axes. Every
device reduces its own part of a leaf, with the devices that hold the same part of it. This needs
the shape of a part, and the axes over which parts differ. For manual axes JAX knows both (except
with ``check_vma=False``). For explicit axes the leaf's type says both. For automatic axes a trace
shows neither, and the caller passes PartitionSpecs.

The last section has nodes of trees that `flax.serialization` saves.
"""

import collections
import dataclasses
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from dynamiq_jax.core.axis import Axis, axis_names
from dynamiq_jax.core.compat import varying_axes

# --- Leaves and buckets ---------------------------------------------------------------------------


COMPRESSED_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Static description of the part of a leaf that one device holds."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: frozenset[str] = frozenset()
    """Mesh axes over which devices hold different parts."""
    alone: bool = False
    """Whether it shares a bucket with no other leaf."""
    scale_axis: int | None = None
    """The axis along which its coordinates follow each other in a bucket; `None`: the last one."""
    path: str = ""
    """The path by which users choose methods, such as "layers/0/kernel"."""
    whole: tuple[int, ...] = ()
    """The shape of the whole leaf, of which this may be a part."""

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.size * self.dtype.itemsize

    @property
    def label(self) -> str:
        """The name for messages: scatters and gathers key a flat dict by the names of leaves."""
        inner = re.fullmatch(r"""\[(["'])([.\[].*)\1\]""", self.name)
        return inner[2] if inner else self.name


class Bucket(NamedTuple):
    """Leaves that are reduced as one flat array of one dtype."""

    leaves: tuple[Leaf, ...]
    route: Any = None
    """How it is reduced: a `compression.compression.Route`."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of every leaf."""
        return self.leaves[0].dtype

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes of every leaf."""
        return self.leaves[0].axes

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def tag(self) -> int:
        """32 bits from the leaves' names, which tell buckets apart in any order."""
        return zlib.crc32("\n".join(leaf.name for leaf in self.leaves).encode())


def describe_leaves(tree) -> list[Leaf]:
    """The leaves of a tree of arrays, Python numbers or `ShapeDtypeStruct`s."""
    return [
        _described(i, path, x)
        for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
    ]


def _described(index: int, keys: tuple, x) -> Leaf:
    name, path = keystr(keys) or "<root>", keystr(keys, simple=True, separator="/")
    kind = getattr(x, "dtype", type(x))
    if not holds_numbers(kind):
        raise ValueError(
            f"leaf {name} is of type {getattr(kind, '__name__', kind)}, which is not one of "
            "numbers; leave PRNG keys and the like out: pass gradients alone, or of a Flax model "
            "nnx.state(model, nnx.Param)"
        )
    dtype = np.dtype(kind if hasattr(x, "dtype") else jax.dtypes.result_type(x))
    shape = tuple(np.shape(x))
    return Leaf(index, name, shape, dtype, varying_axes(x), path=path, whole=shape)


def name_of(path: tuple) -> tuple[str, ...]:
    """The words of a leaf's name, the same for all kinds of nodes; a key with slashes is one."""
    return tuple(keystr((key,), simple=True) for key in path)


def shown(name: Sequence[str]) -> str:
    """A name of `name_of` for messages."""
    return "/".join(repr(word) if "/" in word or not word else word for word in name)


def holds_numbers(dtype) -> bool:
    """Whether `jax.lax.psum` takes leaves of this dtype, or Python type, as numbers."""
    return jnp.issubdtype(dtype, np.number) or dtype in (bool, jax.dtypes.float0)


def group_leaves(
    leaves: list[Leaf],
    *,
    min_leaf_size: int,
    min_bucket_size: int,
    min_bucket_bytes: int = 0,
    bucket_bytes: int,
    declined: Mapping[int, str | None],
) -> tuple[tuple[Bucket, ...], tuple[tuple[Leaf, str], ...]]:
    """Sorts leaves into buckets, and exact ones with their reasons; see `methods.base.Limits`.

    ``declined`` has a method's reasons to decline leaves, by the leaf's index.
    """
    exact: list[tuple[Leaf, str]] = []
    open_buckets: dict[tuple[np.dtype, frozenset[str]], list[Leaf]] = {}
    nbytes: collections.Counter[tuple[np.dtype, frozenset[str]]] = collections.Counter()
    buckets: list[Bucket] = []
    for leaf in leaves:
        if leaf.dtype.name not in COMPRESSED_DTYPES:
            exact.append((leaf, f"dtype {leaf.dtype.name}"))
        elif not isinstance(leaf.size, int | np.integer):
            raise ValueError(
                f"leaf {leaf.name} has shape {leaf.shape}, which jax.export leaves open, and "
                "whether and how a leaf is compressed depends on its size; export the program for "
                "shapes of numbers, or call jax.lax's collective for this leaf"
            )
        elif leaf.size < max(min_leaf_size, 1):
            exact.append((leaf, f"size {leaf.size} < min_leaf_size {min_leaf_size}"))
        elif (reason := declined.get(leaf.index)) is not None:
            exact.append((leaf, reason))
        elif leaf.alone or leaf.nbytes >= bucket_bytes:
            buckets.append(Bucket((leaf,)))
        else:
            kind = leaf.dtype, leaf.axes
            group = open_buckets.setdefault(kind, [])
            if group and nbytes[kind] + leaf.nbytes > bucket_bytes:
                buckets.append(Bucket(tuple(group)))
                group.clear()
                nbytes[kind] = 0
            group.append(leaf)
            nbytes[kind] += leaf.nbytes
    buckets.extend(Bucket(tuple(group)) for group in open_buckets.values() if group)
    large = []
    for bucket in buckets:
        if bucket.size < min_bucket_size:
            reason = f"bucket of {bucket.size} coordinates < min_bucket_size {min_bucket_size}"
        elif bucket.nbytes < min_bucket_bytes:
            reason = f"bucket of {bucket.nbytes} bytes < min_bucket_bytes {min_bucket_bytes}"
        else:
            large.append(bucket)
            continue
        exact.extend((leaf, reason) for leaf in bucket.leaves)
    exact.sort(key=lambda entry: entry[0].index)
    return tuple(large), tuple(exact)


ScaleAxis = int | Literal["auto"] | None
"""An axis of every leaf that has it; "auto": the axis of the size that most matrices have."""

SMALLEST_COMMON = 64
"""Shorter axes count layers and heads; "auto" does not choose them."""


def with_scale_axes(leaves: list[Leaf], scale_axis: ScaleAxis) -> list[Leaf]:
    """The leaves with their `Leaf.scale_axis`."""
    if scale_axis is None:
        return leaves
    sizes = collections.Counter(
        size for leaf in leaves if len(leaf.shape) > 1 for size in set(leaf.shape)
    )

    def axis_of(shape: tuple[int, ...]) -> int | None:
        n_axes = len(shape)
        if scale_axis == "auto":
            candidates = [i for i in range(n_axes) if shape[i] >= SMALLEST_COMMON]
            chosen = max(candidates, key=lambda i: (sizes[shape[i]], i), default=n_axes - 1)
        elif -n_axes <= scale_axis < n_axes:
            chosen = scale_axis % n_axes
        else:
            chosen = n_axes - 1
        return None if chosen == n_axes - 1 else chosen

    return [dataclasses.replace(leaf, scale_axis=axis_of(leaf.shape)) for leaf in leaves]


def concatenate(bucket: Bucket, values: Mapping[int, Array]) -> Array:
    """The bucket's flat array, from leaves by index."""
    return joined([to_flat(jnp.asarray(values[leaf.index]), leaf) for leaf in bucket.leaves])


def joined(parts: Sequence[Array]) -> Array:
    """Joins parts [..., k] in their order to one array [..., sum of k]."""
    if len(parts) == 1:
        return parts[0]
    if jax.default_backend() == "gpu":
        return _written(list(parts))
    return jnp.concatenate(parts, axis=-1)


@jax.custom_batching.custom_vmap
def _copied(parts: list[Array]) -> Array:
    """`joined` part by part, in the time of one copy.

    XLA's concatenation of more than eight arrays takes four times as long on GPUs. `jax.vmap` would
    make scatters of these copies, which take longer than that. XLA:GPU compiles one kernel for all
    parts of a shape as long as it does not know where they begin. It knows the unit, a divisor of
    up to 16 coordinates, so that it copies whole words.
    """
    first, *others = parts
    begins = np.cumsum([part.shape[-1] for part in parts])
    units = [math.gcd(int(begin), 16) for begin in begins[:-1]]
    counts = lax.optimization_barrier(
        [np.uint32(begin // unit) for begin, unit in zip(begins, units, strict=False)]
    )
    # `lax.empty` would write less, but waits for nothing: XLA takes the memory of all buckets of a
    # program at its start.
    rest = [(0, 0, 0)] * (first.ndim - 1) + [(0, int(begins[-1] - begins[0]), 0)]
    whole = lax.pad(first, jnp.zeros((), first.dtype), rest)
    for part, count, unit in zip(others, counts, units, strict=True):
        start = count * np.uint32(unit)
        whole = lax.dynamic_update_slice_in_dim(whole, part, start, axis=-1)
    return whole


@_copied.def_vmap
def _(size: int, batched: list, parts: list[Array]) -> tuple[Array, bool]:
    # The mapped axis comes first.
    whole = [
        part if own else jnp.broadcast_to(part, (size, *part.shape))
        for part, own in zip(parts, batched[0], strict=True)
    ]
    return jnp.concatenate(whole, axis=-1), True


_written = jax.custom_jvp(_copied)


@_written.defjvp
def _(primals, tangents) -> tuple[Array, Array]:
    return _written(*primals), jnp.concatenate(*tangents, axis=-1)


def split(bucket: Bucket, flat: Array) -> list[tuple[int, Array]]:
    """The inverse of `concatenate`: (leaf index, leaf) pairs."""
    ends = np.cumsum([leaf.size for leaf in bucket.leaves])
    return [
        (leaf.index, from_flat(flat[end - leaf.size : end], leaf))
        for leaf, end in zip(bucket.leaves, ends, strict=True)
    ]


def to_flat(x: Array, leaf: Leaf) -> Array:
    """Flattens [..., *shape of the leaf] to [..., size]: scale axis last, then row-major."""
    n_axes = len(leaf.shape)
    if leaf.scale_axis is not None:
        x = jnp.moveaxis(x, leaf.scale_axis - n_axes, -1)
    return x.reshape(*x.shape[: x.ndim - n_axes], leaf.size)


def from_flat(flat: Array, leaf: Leaf) -> Array:
    """The inverse of `to_flat`: [..., size] to [..., *shape]."""
    leading, shape = flat.shape[:-1], list(leaf.shape)
    if leaf.scale_axis is None:
        return flat.reshape(*leading, *shape)
    shape.append(shape.pop(leaf.scale_axis))
    return jnp.moveaxis(flat.reshape(*leading, *shape), -1, leaf.scale_axis - len(shape))


# --- Placement ------------------------------------------------------------------------------------


class Surroundings(NamedTuple):
    """The mesh around a reduction. Axes of size 1 count as manual, whatever their type."""

    names: tuple[str, ...]
    """The axes that are reduced over."""
    sizes: Mapping[str, int]
    """The sizes of all axes."""
    kinds: Mapping[str, AxisType]
    """The types of the axes that are not reduced over and have more than one device."""
    tracked: bool
    """Whether JAX knows over which manual axes a value varies."""

    def of_kind(self, *kinds: AxisType) -> tuple[str, ...]:
        """The axes of these types."""
        return tuple(name for name, kind in self.kinds.items() if kind in kinds)

    @property
    def open(self) -> tuple[str, ...]:
        """The axes over which arrays are still whole: automatic and explicit ones."""
        return self.of_kind(AxisType.Auto, AxisType.Explicit)

    def specs(self, tree: Any, specs: Any) -> list[P] | None:
        """The PartitionSpec of each leaf over the open axes.

        `None` if some axes are automatic and no specs were passed.
        """
        if self.of_kind(AxisType.Auto):
            told = None if specs is None else flat_specs(specs, tree, self.sizes)
            return None if told is None else [restrict_spec(spec, self.open) for spec in told]
        return [
            restrict_spec(jax.typeof(x).sharding.spec, self.open) for x in jax.tree.leaves(tree)
        ]

    def leaves(self, tree: Any, specs: Any) -> list[Leaf]:
        """The part of every leaf that one device holds, as far as it is known."""
        whole = describe_leaves(tree)
        told = flat_specs(specs, tree, self.sizes) if self.sizes else [P()] * len(whole)
        opened = self.specs(tree, specs) or [P()] * len(whole)
        # Where nothing is known leaves travel alone. A leaf whose copies should stay equal must not
        # share widths and noise with a leaf that differs between devices.
        alone = specs is None and not self.tracked and bool(self.of_kind(AxisType.Manual))
        return [
            dataclasses.replace(
                part(leaf, spec, self.sizes),
                axes=(leaf.axes | axes_of(own) & {*self.kinds} | axes_of(spec)) - {*self.names},
                alone=alone,
            )
            for leaf, own, spec in zip(whole, told, opened, strict=True)
        ]

    def as_typed(self, tree: Any, spec: P) -> Any:
        """``tree`` with the types that `per_part` expects for this spec."""
        explicit = self.of_kind(AxisType.Explicit)
        if not explicit:
            return tree
        return jax.tree.map(lambda x: jax.reshard(x, restrict_spec(spec, explicit)), tree)

    def per_part(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Maps ``function`` over the open axes, so that it gets each device's part."""
        if not self.open:
            return function
        left = set(self.sizes) - set(get_abstract_mesh().manual_axes)
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, axis_names=left, check_vma=self.tracked, **specs)


def surroundings(axis: Axis) -> Surroundings:
    """The mesh around a reduction over ``axis``; without other axes if no mesh has it."""
    names, mesh, tracked = axis.names, get_abstract_mesh(), axis.tracked
    if not set(names) & set(mesh.manual_axes):  # `jax.vmap`
        return Surroundings(names, {}, {}, tracked)
    kinds = {
        name: kind
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if name not in names and mesh.shape[name] > 1
    }
    return Surroundings(names, dict(mesh.shape), kinds, tracked)


def told_specs(tree: Any, specs: Any, around: Surroundings, buckets: Sequence[Bucket]) -> list[P]:
    """`Surroundings.specs` of a tree with buckets; raises if specs are missing."""
    opened = around.specs(tree, specs)
    if opened is not None:
        return opened
    leaf = buckets[0].leaves[0]
    sizes = {name: around.sizes[name] for name in around.of_kind(AxisType.Auto)}
    raise ValueError(
        f"leaf {leaf.name} ({leaf.dtype.name}{list(leaf.shape)}) is to be compressed, and how it "
        f"is sharded over the automatic axes {sizes} cannot be seen while a program is traced; "
        "without that every device would gather whole leaves over them. Pass specs=, a tree of "
        "PartitionSpecs as of the parameters, or specs=P() if all leaves are replicated there"
    )


def check_whole(buckets: Sequence[Bucket], axis: Axis) -> None:
    """Refuses buckets under a map that left axes open, for collectives that take no specs."""
    around = surroundings(axis)
    if not buckets or not around.open:
        return
    leaf = buckets[0].leaves[0]
    sizes = {name: around.sizes[name] for name in around.open}
    raise NotImplementedError(
        f"leaf {leaf.name} ({leaf.dtype.name}{list(leaf.shape)}) is to be compressed where "
        f"jax.shard_map left the axes {sizes} automatic or explicit: every device would gather "
        "whole leaves over them. Map over all axes, or differentiate with "
        "dq.value_and_grad(specs=...), which scatters the gradients of sharded parameters"
    )


def placed_leaves(
    tree: Any, mesh: Mesh | AbstractMesh | None, specs: Any
) -> tuple[list[Leaf], dict[str, int]]:
    """The part of every leaf that one device holds, and the sizes of axes that may be split.

    Inside `jax.shard_map`, leaves are whole except over its manual axes. Default: the mesh around.
    """
    leaves = describe_leaves(tree)
    if specs is None:
        return leaves, {}
    around = get_abstract_mesh() if mesh is None else mesh
    if around.empty:
        raise ValueError(f"specs={specs!r} are over the axes of a mesh; pass mesh=, too")
    manual = get_abstract_mesh().manual_axes if mesh is None else ()
    split = [name for name in around.axis_names if name not in manual]
    sizes = {name: around.shape[name] for name in split}
    return [
        dataclasses.replace(
            part(leaf, restrict_spec(spec, split), sizes),
            axes=leaf.axes | {*axes_above_one(axes_of(spec), around.shape)},
        )
        for leaf, spec in zip(leaves, flat_specs(specs, tree, around.axis_names), strict=True)
    ], sizes


def flat_specs(
    specs: Any, tree: Any, mesh_axes: Collection[str], untold: P | None = None
) -> list[P]:
    """The PartitionSpec of every leaf of ``tree``.

    ``specs`` is a prefix of it, of PartitionSpecs or NamedShardings; `None` is ``untold`` or P().
    """

    def is_spec(x) -> bool:
        return x is None or isinstance(x, P)

    specs = jax.tree.map(
        lambda x: x.spec if isinstance(x, NamedSharding) else x, specs, is_leaf=is_spec
    )

    wrong = [x for x in jax.tree.leaves(specs, is_leaf=is_spec) if not is_spec(x)]
    if wrong:
        raise ValueError(
            f"specs has a leaf {wrong[0]!r} of type {type(wrong[0]).__name__}; expected a tree of "
            "PartitionSpecs, as jax.tree.map(lambda x: x.sharding.spec, params) makes it"
        )
    specs = jax.tree.map(lambda x: untold or P() if x is None else x, specs, is_leaf=is_spec)

    def spread(spec: P, part: Any) -> list[P]:
        return [spec] * jax.tree.structure(part).num_leaves

    try:
        # Lists of specs, one for each part: a node may refuse children that are not arrays.
        lists = jax.tree.map(spread, specs, tree, is_leaf=lambda x: isinstance(x, P))
    except ValueError:
        misfit = misfit_of(specs, tree, is_leaf=lambda x: isinstance(x, P))
        raise ValueError(
            f"specs do not fit the tree: {misfit}; pass a PartitionSpec for every leaf, or one for "
            "all"
        ) from None
    flat = jax.tree.leaves(lists, is_leaf=lambda x: isinstance(x, P))
    unknown = sorted(frozenset().union(*map(axes_of, flat)) - {*mesh_axes})
    if unknown:
        raise ValueError(
            f"specs name the axis {unknown[0]!r}, which is not in the mesh; it has "
            f"{tuple(mesh_axes)}"
        )
    return flat


def check_nodes(tree: Any) -> None:
    """Refuses pytree nodes that accept only arrays as children: specs must fit in, too."""
    try:
        jax.tree.map(lambda _: P(), tree)
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = "" if frame is None else f" in {frame.tb_frame.f_code.co_qualname}"
        raise TypeError(
            f"a pytree node of the parameters refuses a child that is no array{place} "
            f"({type(error).__name__}: {error}). JAX asks that tree_unflatten takes any child; "
            "check arrays in a function that users call, not where JAX rebuilds the node"
        ) from error


def misfit_of(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> str:
    """Where ``prefix``, which is no prefix of ``tree``, first differs from it."""
    told, leaves = (
        [path for path, _ in jax.tree_util.tree_leaves_with_path(x, is_leaf=f)]
        for x, f in ((prefix, is_leaf), (tree, None))
    )
    for own in told:
        if not any(path[: len(own)] == own for path in leaves):
            return f"the entry {jax.tree_util.keystr(own)} is that of no leaf"
    for path in leaves:
        if not any(path[: len(own)] == own for own in told):
            return f"leaf {jax.tree_util.keystr(path)} has no entry"
    return f"it is {jax.tree.structure(prefix, is_leaf=is_leaf)} for {jax.tree.structure(tree)}"


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes that split one dimension."""
    return () if entry is None else axis_names(entry)


def axes_of(spec: P) -> frozenset[str]:
    """The axes that split any dimension."""
    return frozenset(name for entry in spec for name in names_of(entry))


def restrict_spec(spec: P, names: Collection[str]) -> P:
    """The spec over some axes; over others the leaf counts as whole."""
    kept = [tuple(name for name in names_of(entry) if name in names) for entry in spec]
    return P(*(entry or None for entry in kept))


def constrained(tree: Any, mesh: Mesh | AbstractMesh, specs: Sequence[P]) -> Any:
    """``tree``, sharded as its leaves' specs say, and not as the compiler would choose."""
    shardings = jax.tree.structure(tree).unflatten(NamedSharding(mesh, spec) for spec in specs)
    return jax.lax.with_sharding_constraint(tree, shardings)


def placement_of(x: Any, mesh: Mesh | AbstractMesh) -> P | None:
    """How an array is sharded over the mesh; `None` where it cannot be seen or is elsewhere."""
    traced = isinstance(x, Tracer)
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return None
    return sharding.spec


def axes_above_one(names: Collection[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes with more than one device, in their order; others have no effect."""
    return tuple(name for name in names if sizes[name] > 1)


def bucket_axes(bucket: Bucket, names: Collection[str]) -> tuple[str, ...]:
    """The axes among ``names`` over which the parts of a bucket differ, in that order."""
    return tuple(name for name in names if name in bucket.axes)


def n_parts(axes: Collection[str], sizes: Mapping[str, int]) -> int:
    """The number of parts into which these axes split a leaf."""
    return math.prod(sizes[name] for name in axes)


def part(leaf: Leaf, spec: P, sizes: Mapping[str, int]) -> Leaf:
    """The part of a leaf that one device holds; raises if the spec does not fit."""
    shape = list(leaf.shape)
    if len(spec) > len(shape):
        raise ValueError(
            f"specs: leaf {leaf.name} has shape {leaf.shape} and {spec} has {len(spec)} entries; "
            "pass one for each dimension at most"
        )
    for dimension, entry in enumerate(spec):
        count = n_parts(names_of(entry), sizes)
        if shape[dimension] % count:
            raise ValueError(
                f"specs: leaf {leaf.name} has {shape[dimension]} entries along dimension "
                f"{dimension}, which is not a multiple of the {count} devices on {entry!r}; pad "
                "it, or replicate it over them"
            )
        shape[dimension] //= count
    return dataclasses.replace(leaf, shape=tuple(shape))


Split = tuple[tuple[int, tuple[str, ...]], ...]
"""The dimensions of a leaf that data axes split, each with its axes."""


def split_of(spec: P, axes: tuple[str, ...]) -> Split:
    """How ``axes`` split a leaf."""
    own = (tuple(name for name in names_of(entry) if name in axes) for entry in spec)
    return tuple((dimension, names) for dimension, names in enumerate(own) if names)


def whole_shape(shape: tuple[int, ...], split: Split, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a leaf, from that of one shard."""
    counts = {dimension: math.prod(sizes[name] for name in names) for dimension, names in split}
    return tuple(length * counts.get(i, 1) for i, length in enumerate(shape))


# --- Padding: zeros at the end of one dimension, so that workers split it equally ----------------

LAYERS = 256
"""A leading dimension shorter than this may count layers, which `overlapped` handles one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """The number of zeros at the end of a dimension of a leaf; by default none.

    The *padded* leaf has these zeros, so its slices have equal lengths. The dimension is counted
    from the end, so that it is the same for stacked leaves.
    """

    dimension: int = -1
    zeros: int = 0

    def padded(self, x: Array) -> Array:
        """The leaf with its zeros."""
        if not self.zeros:
            return x
        own = x.ndim + self.dimension
        config = [(0, self.zeros if d == own else 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), config)

    def cut(self, x: Array) -> Array:
        """The leaf without its zeros, from the padded leaf."""
        if not self.zeros:
            return x
        own = x.ndim + self.dimension
        return lax.slice_in_dim(x, 0, x.shape[own] - self.zeros, axis=own)

    def padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The padded leaf's shape."""
        return self._longer(shape, self.zeros)

    def shape_of(self, padded: tuple[int, ...]) -> tuple[int, ...]:
        """The leaf's shape, from the shape of the padded leaf."""
        return self._longer(padded, -self.zeros)

    def _longer(self, shape: tuple[int, ...], by: int) -> tuple[int, ...]:
        own = len(shape) + self.dimension
        return tuple(x + by * (d == own) for d, x in enumerate(shape))

    def cleared(self, own: Array, axis: Axis) -> Array:
        """This worker's slice of the padded leaf, with zeros where the leaf has ended."""
        if not self.zeros:
            return own
        rows = own.shape[self.dimension]
        along = lax.broadcasted_iota(jnp.int32, own.shape, own.ndim + self.dimension)
        places = axis.index * rows + along
        return jnp.where(places < rows * axis.size - self.zeros, own, jnp.zeros_like(own))


def padding_of(shape: tuple[int, ...], spec: P, workers: Mapping[str, int]) -> Padding:
    """The padding of a leaf of this shape, which the workers split as ``spec`` says.

    ``workers`` has the size of every axis of the workers.
    """
    n = math.prod(workers.values())
    for dimension, entry in enumerate(spec):
        if {*names_of(entry)} & {*workers}:
            return Padding(dimension - len(shape), -shape[dimension] % n)
    return Padding()


def split_dimension(lengths: Sequence[int], n: int, taken: Collection[int] = ()) -> int | None:
    """The dimension along which ``n`` workers split a leaf; `None` if it has none.

    It is the first dimension that is a multiple of ``n``. If there is none, it is a dimension
    longer than ``n`` that no other axes have ``taken``: the one that needs the least padding for
    its length. A leading dimension below `LAYERS` is tried last.
    """
    late = lambda d: d == 0 and lengths[d] < LAYERS
    order = sorted(range(len(lengths)), key=late)
    divides = (d for d in order if lengths[d] and lengths[d] % n == 0)
    if (found := next(divides, None)) is not None:
        return found
    # A shorter one would get more zeros than coordinates, and zeros travel.
    longer = [d for d in order if lengths[d] > n and d not in taken]
    return min(longer, key=lambda d: (late(d), -lengths[d] % n / lengths[d]), default=None)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the leaves of a tree lie on the mesh around a collective: a row for every leaf.

    Without rows all leaves are whole on every worker.
    """

    specs: Any = None
    """How open axes (`Surroundings.open`) split leaves, as the user tells it; see `psum`."""
    splits: tuple[Split, ...] = ()
    """How the axes of the collective split every leaf."""
    padding: tuple[Padding, ...] = ()
    """The zeros that end every leaf while it is split."""
    others: tuple[frozenset[str], ...] = ()
    """The axes beside these that split every leaf. Leaves share a bucket if these are the same."""
    opened: tuple[P, ...] | None = None
    """The PartitionSpec of every leaf over the open axes; `None`: no axes are open."""

    def of(
        self,
        specs: Sequence[P],
        axes: tuple[str, ...],
        *,
        over: tuple[str, ...] | None = None,
        opened: Sequence[P] | None = None,
        padding: Sequence[Padding] = (),
    ) -> "Placement":
        """Leaves that ``specs`` split over ``axes``; with ``over`` only these count as splits."""
        splits = tuple(split_of(spec, axes if over is None else over) for spec in specs)
        pairs = zip(specs, opened or specs, strict=True)
        return Placement(
            self.specs,
            splits,
            tuple(padding) or (Padding(),) * len(splits),
            tuple((axes_of(a) | axes_of(b)) - {*axes} for a, b in pairs),
            None if opened is None else tuple(opened),
        )

    def some(self, places: Collection[int]) -> "Placement":
        """The placement of only some of these leaves, by their numbers."""
        opened = None if self.opened is None else tuple(self.opened[i] for i in places)
        return Placement(
            self.specs,
            tuple(self.splits[i] for i in places),
            tuple(self.padding[i] for i in places),
            tuple(self.others[i] for i in places),
            opened,
        )

    @property
    def is_split(self) -> bool:
        """Whether an axis of the collective splits a leaf."""
        return any(self.splits)


# --- Nodes that flax saves; the library itself does not need flax ---------------------------------


_known: set[type] = set()
"""The types that flax knows."""


class Serializable:
    """A dataclass and pytree node that `flax.serialization` takes: a dict of its data fields."""

    def __post_init__(self):
        """Tells flax of the type, once flax is imported: soon enough for a state to be saved."""
        kind, flax = type(self), sys.modules.get("flax.serialization")
        if flax is None or kind in _known:
            return
        _known.add(kind)

        def to_dict(node: Any) -> dict[str, Any]:
            return {name: flax.to_state_dict(x) for name, x in _children(node).items()}

        def from_dict(node: Any, saved: dict[str, Any]) -> Any:
            own = _children(node)
            if own.keys() != saved.keys():
                raise ValueError(
                    f"{kind.__name__} has the fields {sorted(own)}, and {sorted(saved)} were "
                    "saved; pass flax.serialization.msgpack_restore(saved) to "
                    "dq.optax.restore_state"
                )
            found = {name: flax.from_state_dict(x, saved[name], name) for name, x in own.items()}
            return dataclasses.replace(node, **found)

        flax.register_serialization_state(kind, to_dict, from_dict, override=True)


def _children(node: Any) -> dict[str, Any]:
    """The data fields of a node, which are those that JAX knows as its children."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {path[0].name: x for path, x in pairs}
