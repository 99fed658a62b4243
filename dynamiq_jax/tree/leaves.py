"""Which leaves of a pytree travel together, and which travel exactly.

A *bucket* is one flat array that is reduced as a whole. A leaf larger than ``bucket_bytes`` is a
bucket by itself (a reshape, no copy); smaller ones of one dtype are concatenated in tree order.
Independent buckets let XLA overlap the reduction of one with the computation of another. On a mesh
of several axes only leaves that differ over the same axes share a bucket: copies of a bucket then
have the same widths and noise, and stay copies.
"""

import collections
import dataclasses
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr
from jaxtyping import Array

from dynamiq_jax.core.compat import varying_axes

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
    """How it is reduced: a `compression.routes.Route`."""

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
