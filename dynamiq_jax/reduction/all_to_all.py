"""`all_to_all`: exchanges compressed blocks between workers, such as tokens for experts.

A worker encodes the block of every receiver separately, at one width. Workers need no agreement, so
one collective sends everything: payloads, and after them one byte for every super-group of 256
coordinates, which says whether it had a NaN or an infinity.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.compression.compression import (
    AnyPolicy,
    Compression,
    Policy,
    as_compression,
    as_cotangents,
    check_exchanges,
)
from dynamiq_jax.core.axis import Axis, AxisName, Seed, fold_seed
from dynamiq_jax.core.checks import check_axis
from dynamiq_jax.engine.run import Values, run
from dynamiq_jax.former import formerly
from dynamiq_jax.methods import F32, DynamiQ, Method, State, unless_plain
from dynamiq_jax.methods.base import Call, HopMethod
from dynamiq_jax.plan.plan import Native, Plan, remember
from dynamiq_jax.reduction.scatter_gather import (
    Cut,
    check_and_describe,
    check_axis_of,
    pieces,
    put_together,
)
from dynamiq_jax.topologies import Direct
from dynamiq_jax.tree.leaves import Bucket, check_whole, from_flat, joined

Tree = TypeVar("Tree")

EIGHT_BITS = DynamiQ(bits=8.5)
"""The default: codes of 8 bits, and 0.34 bits of scales for each code."""


@formerly(backward=as_cotangents)
def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
) -> Tree:
    """Sends block i of every leaf to worker i, quantised; cotangents are also sent quantised.

    The arguments, the shapes and the derivative are those of `jax.lax.all_to_all`. The result is
    the exact result plus unbiased noise. JAX refuses forward mode (`jax.jvp`), as for any
    `jax.custom_vjp`.

    `DynamiQ` encodes every coordinate at the largest width that fits ``bits`` together with its
    metadata: 8 bits take 8.34 on the wire, 6 bits take 6.34. Zeros stay zeros, and so do padding
    and dropped tokens. A NaN or an infinity makes the 256 coordinates of its super-group NaN, and
    no others. You can also use other quantisers without memory (`dynamiq_jax.contrib`: `MXFP8`,
    `MinMax`, `GlobalQSGD`); their docstrings say how they handle zeros and NaN. `BF16` and `F32`
    cast.

    Outside of maps there is no such collective; use `jax.reshard` to change the sharding.

    Args:
      x: any pytree. Leaves of dtypes other than f32, bf16 and f16, small leaves (as in `psum`), and
        leaves that JAX knows to be equal on all workers travel exactly. With ``split_axis=0`` and
        blocks of a multiple of 256 coordinates nothing is copied before the encoding.
      axis_name: the mapped axis; a tuple counts as one axis.
      split_axis: the dimension of every leaf that is cut into blocks; negative values count from
        the last.
      concat_axis: the dimension of the result along which received blocks are joined.
      axis_index_groups: as for `psum_scatter`.
      tiled: if true, ``split_axis`` is a multiple of n, the number of workers, and shrinks to 1/n
        of it, and ``concat_axis`` becomes n times as long; otherwise ``split_axis`` is n, and moves
        to ``concat_axis``.
      compression: how blocks travel, as for `psum`, without a state; or a `Policy`, whose
        ``activations`` say this, and whose ``cotangents`` are the method for the cotangents of
        leaves that are compressed. Default of both: ``DynamiQ(bits=8.5)``, codes of 8 bits; if
        blocks travel in `BF16` or `F32`, the same for their cotangents.
      key: as for `psum`. The backward pass uses other noise from the same key. Without a key the
        noise of `DynamiQ` is a hash of each worker's data.

    Returns:
      A tree like ``x`` with the blocks that this worker received, in the leaf's dtype.

    Raises:
      ValueError: a leaf's dimension is not a multiple of n or does not exist, or an argument is
        malformed.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: a method keeps a state or sums natively; ``axis_index_groups`` under
        `jax.vmap`; positional axes; or leaves to be compressed if `jax.shard_map` left axes of the
        mesh automatic or explicit.
    """
    axis = check_axis(axis_name, axis_index_groups)
    if not axis.names:
        return lax.all_to_all(x, axis.names, split_axis, concat_axis, tiled=tiled)
    back = compression.cotangents if isinstance(compression, Policy) else None
    back = None if back is None else as_compression(back)
    # An exchange has one level.
    compression = replace(as_compression(compression, "activations", EIGHT_BITS), topology=None)
    told = {"split_axis": split_axis, "concat_axis": concat_axis, "tiled": tiled}
    told["cotangents"] = back
    sizes, leaves, fixed = check_and_describe("all_to_all", axis, x, compression, key, told)
    values, treedef = jax.tree.flatten(x)
    n = math.prod(sizes)
    cut = Cut(split_axis, tiled, n)
    for leaf in leaves:
        cut.check(leaf, "split_axis", "pad it with zeros, which stay zeros")
        check_axis_of(leaf, "concat_axis", concat_axis)
    for method in dict.fromkeys(back.methods_of(leaves) if back else ()):
        check_exchanges(method or F32(), n, "cotangents")
    plan = compression.plan(leaves, sizes, "all-to-all", without=fixed, keyed=key is not None)
    check_whole(plan.buckets, axis)
    backward = tuple(_backward(bucket, back, plan) for bucket in plan.buckets)
    rule = Exchange(axis, cut, concat_axis, backward)
    found, _, _ = run(plan, rule, dict(enumerate(values)), key)
    return treedef.unflatten(found.values())


class Exchange(NamedTuple):
    """The rule of all-to-alls."""

    axis: Axis
    cut: Cut
    concat_axis: int
    backward: tuple[Plan, ...]
    """The plan for the cotangents of each bucket."""

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """See `Rule`."""
        found = {}
        options = {"axis_index_groups": self.axis.groups, "tiled": self.cut.tiled}
        for leaf, _, _ in leaves:
            n_axes, own = len(leaf.shape), jnp.asarray(values[leaf.index])
            split, concat = (i % n_axes for i in (self.cut.dimension(leaf), self.concat_axis))
            found[leaf.index] = lax.all_to_all(own, self.axis.name, split, concat, **options)
        return found

    def joined(self, bucket: Bucket, values: Values) -> Array:
        """Rows: the blocks of all workers."""
        return joined([self.cut.rows(values[leaf.index], leaf) for leaf in bucket.leaves])

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """See `Rule`."""
        if self.cut.n_workers > 1:
            bucket = plan.buckets[number]
            forth = bucket.route.method.of_bucket(bucket)
            x = _exchange(x, seed, self.axis, forth, self.backward[number])
        return x, (state, None)

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """See `Rule`; a leaf has blocks of all workers."""
        slices = [self.cut.of(leaf) for leaf in bucket.leaves]
        pairs = zip(slices, pieces(result, [leaf.size for leaf in slices]), strict=True)
        return {
            leaf.index: put_together(from_flat(own, leaf), self.concat_axis, tiled=self.cut.tiled)
            for leaf, own in pairs
        }


def _backward(bucket: Bucket, told: Compression | None, plan: Plan) -> Plan:
    """The plan for the cotangents of a bucket; leaves that are excluded travel in f32."""
    if told is None:
        method = unless_plain(bucket.route.method, EIGHT_BITS)
    else:
        leaves = list(bucket.leaves)
        found = dict(zip(told.methods_of(leaves), leaves, strict=True))
        if len(found) > 1:
            raise ValueError(
                f"cotangents: leaves {' and '.join(leaf.name for leaf in found.values())} share a "
                "bucket of activations, and the methods of their cotangents are "
                f"{' and '.join(map(repr, found))}; choose one for all, or let their activations "
                "differ"
            )
        method = next(iter(found)) or F32()
    alone = bucket._replace(route=bucket.route.by(method))
    return Plan("all-to-all", plan.sizes, (alone,), keyed=plan.keyed, backward=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _exchange(x: Array, seed: Seed, axis: Axis, method: Method, backward: Plan) -> Array:
    """Sends row j of ``x`` to worker j; row i of the result is from worker i."""
    return exchange_rows(x, seed, axis=axis, method=method)


def _exchange_backward(axis, method, backward, seed, cotangent):
    # An exchange of rows is its own transpose.
    # Other noise than forwards, from the same key.
    seed, (bucket,) = fold_seed(jnp.asarray(seed), 1), backward.buckets
    with jax.named_scope(remember(backward)):
        own = bucket.route.method.of_bucket(bucket)
        return _exchange(cotangent, seed, axis, own, backward), None


_exchange.defvjp(lambda x, seed, *rest: (_exchange(x, seed, *rest), seed), _exchange_backward)


@functools.partial(jax.jit, static_argnames=("axis", "method"))
def exchange_rows(x: Array, seed: Seed, *, axis: Axis, method: HopMethod) -> Array:
    """Exchanges [n, s] to [n, s]; buckets of the same size share one function of the program."""
    method.warn(Call(axis, Direct(), seed), "all_gather")
    with jax.named_scope(f"{type(method).__name__.lower()}_all_to_all"):
        return method.exchange(x, Call(axis, None, seed))
