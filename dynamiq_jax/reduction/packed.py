"""Shards that never change, such as frozen weights: encoded once, and gathered as payloads."""

import dataclasses
import functools
from typing import Any

import jax
from jax import Array

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.plan.plan import Plan


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("payloads", "exact", "words"),
    meta_fields=("axis", "n_workers", "plan", "treedef"),
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """The result of `dynamiq_jax.optax.pack`: every worker's encoded shards, for `all_gather`.

    All arrays have a leading axis: of all workers outside of maps, and of 1 inside. So
    ``P(axis_name)`` is the spec of the whole node, for `jax.shard_map` and for its placement.

    Attributes:
      payloads: the encoded shard of every bucket, a tree of arrays in the method's own dtypes;
        about ``bits`` bits for each coordinate.
      exact: shards of the leaves that are not compressed, in their shapes and dtypes.
      words: the words of the key of the rounding, uint32[n, 2], or `None` without a key.
      axis: the workers.
      n_workers: the number of workers.
      plan: the leaves of each bucket, and the routes of buckets.
      treedef: the structure of the shards.
    """

    payloads: tuple[Any, ...]
    exact: tuple[Array, ...]
    words: Array | None
    axis: Axis
    n_workers: int
    plan: Plan
    treedef: Any
