"""Parameters that are sharded over data axes (FSDP, HSDP): gathered on use, gradients scattered.

A leaf that is split over some of the data axes is gathered over these before the loss takes it. Its
gradient is scattered over these, and what each device is left with all-reduced over the others.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import UInt

from dynamiq_jax.collectives.halves import psum_scatter
from dynamiq_jax.collectives.in_maps import reduce_over
from dynamiq_jax.lax.axis import Axis
from dynamiq_jax.lax.checks import Op
from dynamiq_jax.lax.seeds import fold_seed, key_words
from dynamiq_jax.methods import BF16, F32
from dynamiq_jax.request.compression import Compression
from dynamiq_jax.topologies import AnyTopology
from dynamiq_jax.tree.leaves import COMPRESSED_DTYPES, describe_leaves
from dynamiq_jax.tree.placement import names_of

Split = tuple[tuple[int, tuple[str, ...]], ...]
"""The dimensions of a leaf that data axes split, each with its axes."""


def split_of(spec: P, axes: tuple[str, ...]) -> Split:
    """How ``axes`` split a leaf."""
    own = (tuple(name for name in names_of(entry) if name in axes) for entry in spec)
    return tuple((dimension, names) for dimension, names in enumerate(own) if names)


def gather(params: Any, splits: list[Split]) -> Any:
    """Whole parameters from every device's shards of them, exactly."""
    leaves, treedef = jax.tree.flatten(params)

    def whole(x: Array, split: Split) -> Array:
        for dimension, names in split:
            x = lax.all_gather(x, names, axis=dimension, tiled=True)
        return x

    return treedef.unflatten(map(whole, leaves, splits))


class Reduction(NamedTuple):
    """How gradients become sums or means over all data axes."""

    axes: tuple[str, ...]
    """The outermost first."""
    sizes: tuple[int, ...]
    compression: Compression
    op: Op

    def __call__(self, grads: Any, key: Array | None, splits: list[Split]) -> Any:
        """Reduces gradients of whole parameters; every device gets its shards of the result.

        Leaves that are split alike and have the same method are reduced together.
        """
        paths, treedef = jax.tree_util.tree_flatten_with_path(grads)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        methods = self.compression.methods_of(describe_leaves(grads))
        kinds = list(zip(methods, splits, strict=True))
        for method, split in dict.fromkeys(kinds):
            alike = [i for i, kind in enumerate(kinds) if kind == (method, split)]
            part = {names[i]: leaves[i] for i in alike}
            own = dataclasses.replace(self.compression, method=method, exclude=None)
            own = own if method is not None else dataclasses.replace(own, exclude="")
            part = self._replace(compression=own)._alike(part, key, split)
            for i in alike:
                leaves[i] = part[names[i]]
        return treedef.unflatten(leaves)

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
