"""Parameters that are sharded over data axes (FSDP, HSDP): gathered on use, gradients scattered.

A leaf that is split over some of the data axes is gathered over these before the loss takes it. Its
gradient is scattered over these, and what each device is left with all-reduced over the others.
"""

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import UInt

from dynamiq_jax.arguments import AnyMethod, AnyTopology, ByPath, Resolved, chooses_by_path, resolve
from dynamiq_jax.buckets import COMPRESSED_DTYPES
from dynamiq_jax.by_path import EXACT, joined, methods_of, parts_of
from dynamiq_jax.collectives import reduce
from dynamiq_jax.methods import BF16, F32
from dynamiq_jax.placement import names_of
from dynamiq_jax.seeds import fold_seed, key_words
from dynamiq_jax.sharded import psum_scatter
from dynamiq_jax.topologies import Hierarchical

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
    """How gradients become means over all data axes."""

    axes: tuple[str, ...]
    """The outermost first."""
    sizes: tuple[int, ...]
    method: AnyMethod | None
    topology: AnyTopology | None

    @property
    def resolved(self) -> Resolved:
        """With defaults filled in, for all axes."""
        return resolve(self.method, self.topology, self.sizes)

    def mean(self, grads: Any, key: Array | None, splits: list[Split]) -> Any:
        """Of gradients of whole parameters: every device gets its shards of it.

        Leaves that are split alike are reduced together.
        """
        if chooses_by_path(self.method):
            choose = cast(ByPath, self.method)
            chosen = [method for _, method in methods_of(grads, choose)]
            parts = []
            for method, part in parts_of(grads, choose):
                own = self._replace(method=EXACT if method is None else method)
                pairs = zip(splits, chosen, strict=True)
                parts.append(own.mean(part, key, [split for split, m in pairs if m == method]))
            return joined(parts)
        paths, treedef = jax.tree_util.tree_flatten_with_path(grads)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        words = key_words(key)
        for split in dict.fromkeys(splits):
            alike = [i for i, other in enumerate(splits) if other == split]
            part = {names[i]: leaves[i] for i in alike}
            within = tuple(name for _, some in split for name in some)
            rest = tuple(name for name in self.axes if name not in within)
            for dimension, some in split:
                seed = None if words is None else fold_seed(words, dimension)
                if seed is not None and rest:  # other groups scatter with other noise
                    seed = fold_seed(seed, lax.axis_index(rest))
                part = self._scatter(part, some, dimension, seed)
            if rest:
                options = {"method": self.method, "topology": self._route(rest), "key": key}
                part = reduce(part, rest, op="mean", **options).tree
            n = math.prod(lax.axis_size(name) for name in within)
            for i in alike:
                mean = part[names[i]]
                mean = mean.astype(jnp.float32) / n if n > 1 else mean
                leaves[i] = mean.astype(leaves[i].dtype)
        return treedef.unflatten(leaves)

    def _scatter(
        self, tree: Any, names: tuple[str, ...], dimension: int, seed: UInt[Array, " 2"] | None
    ) -> Any:
        """Sums over some axes and leaves every device its slice along a dimension."""
        resolved, route = self.resolved, self._route(names)
        plain = resolved.topology is None and isinstance(resolved.method, BF16 | F32)
        inner = isinstance(resolved.topology, Hierarchical) and names == self.axes[-1:]
        if not plain and not (inner and route is None):
            route = None if isinstance(route, Hierarchical) else route  # these have no halves
            options = {"method": self.method, "topology": route, "key": seed}
            return psum_scatter(tree, names, scatter_dimension=dimension, tiled=True, **options)
        smallest = resolved.limits().min_leaf_size

        def native(x: Array) -> Array:
            if x.size >= smallest and x.dtype.name in COMPRESSED_DTYPES:
                x = x.astype(resolved.method.native_dtype(x.dtype))
            return lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)

        return jax.tree.map(native, tree)

    def _route(self, names: tuple[str, ...]) -> AnyTopology | None:
        """What the topology of all axes means for some of them; `None` chooses anew."""
        whole = self.resolved.topology
        if names == self.axes or not isinstance(whole, Hierarchical):
            return self.topology
        if names == self.axes[-1:]:
            return whole.inner
        return whole if names[-1:] == self.axes[-1:] else whole.outer
