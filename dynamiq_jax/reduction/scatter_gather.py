"""`psum_scatter` and `all_gather`, for training with shards."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.compression.agreement import compare_first
from dynamiq_jax.compression.compression import AnyPolicy, Compression, as_compression, as_topology
from dynamiq_jax.compression.shards import Dimensions, Exchange
from dynamiq_jax.core.axis import Axis, AxisName, Seed, Varying, check_key, key_words
from dynamiq_jax.core.checks import Op, axis_sizes, check_axis, check_groups
from dynamiq_jax.engine.run import (
    Fixed,
    Values,
    check_varying,
    fixed_leaves,
    no_buckets,
    run,
    with_tangent,
)
from dynamiq_jax.former import formerly
from dynamiq_jax.methods import Method, State
from dynamiq_jax.methods.base import Call, check_choice
from dynamiq_jax.plan.plan import Native, Plan
from dynamiq_jax.reduction.packed import Packed
from dynamiq_jax.tree.leaves import (
    Bucket,
    Leaf,
    check_whole,
    concatenate,
    describe_leaves,
    from_flat,
    joined,
    to_flat,
)

Tree = TypeVar("Tree")


@formerly(topology=as_topology)
def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree:
    """Sums every leaf over the mapped axis; worker i gets slice i of the sum.

    This is the reduce-scatter half of `psum`, with the semantics and the derivative of
    `jax.lax.psum_scatter`. The owner of a slice does not encode the sum again. Widths are chosen
    separately for every slice, at ``method.bits`` bits per coordinate, including the statistics of
    the whole leaf.

    Args:
      x: any pytree; the same leaves are compressed as in `psum`. Slices along a dimension other
        than 0, slices whose size is not a multiple of 256 coordinates, and a ``scale_axis`` other
        than the last axis cost a copy.
      axis_name: the mapped axis; a tuple counts as one axis.
      scatter_dimension: the dimension of every leaf that is sliced; negative values count from the
        last.
      tiled: if true, the dimension is a multiple of n, the number of workers, and shrinks to 1/n of
        it; otherwise it is n and is removed.
      compression: as for `psum`.
      key: as for `psum`.
      axis_index_groups: as for `psum`; they also work with ``check_vma=True``.

    Returns:
      A tree like ``x`` with this worker's slice of every sum, in the leaf's dtype.

    Raises:
      ValueError: a leaf's dimension is not a multiple of n, a leaf that would be compressed does
        not vary over the axis, or an argument is malformed.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: ``axis_index_groups`` under `jax.vmap`, positional axes, or leaves to be
        compressed where `jax.shard_map` left axes of the mesh automatic or explicit.
    """
    axis, compression = (
        check_axis(axis_name, axis_index_groups),
        as_compression(compression),
    )
    if not axis.names:
        return x
    return scatter_over(axis, x, compression, scatter_dimension, tiled=tiled, key=key)


def scatter_over(
    axis: Axis,
    tree: Tree,
    compression: Compression,
    dimension: Dimensions,
    *,
    tiled: bool = True,
    op: Op = "sum",
    key: Array | None = None,
) -> Tree:
    """`psum_scatter`, or the mean, with its arguments in one compression."""
    told = {"scatter_dimension": dimension, "tiled": tiled}
    sizes, leaves, fixed = check_and_describe("psum_scatter", axis, tree, compression, key, told)
    values, treedef = jax.tree.flatten(tree)
    plan = compression.plan(leaves, sizes, "reduce-scatter", without=fixed, keyed=key is not None)
    cut = Cut(dimension, tiled, plan.n_workers)
    for leaf in leaves:
        cut.check(leaf, "scatter_dimension", "pad it, or reduce it with dq.psum")
    check_varying(plan, fixed, axis)
    check_whole(plan.buckets, axis)
    found, _, _ = run(plan, Scatter(axis, cut, op), dict(enumerate(values)), key)
    return treedef.unflatten(found.values())


class Scatter(NamedTuple):
    """The rule of reduce-scatters."""

    axis: Axis
    cut: "Cut"
    op: Op

    @property
    def _divisor(self) -> int:
        return self.cut.n_workers if self.op == "mean" else 1

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """See `Rule`."""
        found = {}
        for leaf, _, _ in leaves:
            total = self.axis.psum_scatter(self.cut.rows(values[leaf.index], leaf))
            total = divide(total, self._divisor, total.dtype)
            found[leaf.index] = from_flat(total, self.cut.of(leaf))
        return found

    def joined(self, bucket: Bucket, values: Values) -> Array:
        """Rows, one worker's slices each, [n, s]: a bucket joins rows of its leaves."""
        return joined([self.cut.rows(values[leaf.index], leaf) for leaf in bucket.leaves])

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """See `Rule`."""
        exact = self.axis.psum_scatter
        if self.cut.n_workers == 1:
            total = exact(x)
        else:
            method, topology = plan.buckets[number].route.sharded()
            way = {"axis": self.axis, "method": method, "topology": topology}
            total = self.axis.program(_scatter_bucket)(*lax.stop_gradient((x, seed)), **way)
            total = with_tangent(exact, x, total)
        return divide(total, self._divisor, total.dtype), (state, None)

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """See `Rule`."""
        slices = [self.cut.of(leaf) for leaf in bucket.leaves]
        sums = pieces(result, [own.size for own in slices])
        pairs = zip(slices, sums, strict=True)
        return {own.index: from_flat(total, own) for own, total in pairs}


def divide(total: Array, divisor: int, dtype: Any) -> Array:
    """The sum divided by the divisor, as ``dtype``; narrow numbers are divided in f32."""
    if divisor > 1:
        # In f32, so that a bf16 mean is rounded once.
        narrow = jnp.issubdtype(total.dtype, jnp.floating) and total.dtype.itemsize < 4
        total = (total.astype(jnp.float32) if narrow else total) / divisor
    return total.astype(dtype)


def pieces(x: Array, sizes: Sequence[int]) -> list[Array]:
    """The last axis, cut into parts of these sizes."""
    return [x[..., start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def put_together(blocks: Array, at: int, *, tiled: bool = True) -> Array:
    """Blocks [n, *shape] along an axis: one after another (tiled), or as a new axis."""
    # Counted in the result, which has one dimension more than a shard if shards are stacked.
    at %= blocks.ndim - tiled
    # [n, ..., s, ...] becomes [..., n, s, ...], and tiled blocks join to n * s.
    whole = jnp.moveaxis(blocks, 0, at)
    if not tiled:
        return whole
    shape = blocks.shape[1:]  # may be that of an empty array, where -1 has no meaning
    return whole.reshape(*shape[:at], len(blocks) * shape[at], *shape[at + 1 :])


class Cut(NamedTuple):
    """How each leaf is cut into a slice for every worker: along a dimension, as `psum_scatter`."""

    dimensions: Dimensions
    tiled: bool
    n_workers: int

    def dimension(self, leaf: Leaf) -> int:
        """The dimension along which this leaf is cut."""
        told = self.dimensions
        return told[leaf.index] if isinstance(told, tuple) else told

    def check(self, leaf: Leaf, name: str, remedy: str) -> None:
        """Refuses a leaf that cannot be cut like this; ``name`` is the dimension's argument."""
        dimension = self.dimension(leaf)
        check_axis_of(leaf, name, dimension)
        length, n = leaf.shape[dimension], self.n_workers
        said = f"leaf {leaf.name} has {length} entries along {name}={dimension}"
        if self.tiled and length % n:
            raise ValueError(f"{said}, which is not a multiple of the {n} workers; {remedy}")
        if not self.tiled and length != n:
            raise ValueError(
                f"{said} and tiled=False needs one for each of the {n} workers; pass tiled=True"
            )

    def rows(self, x: Array, leaf: Leaf) -> Array:
        """Slices of a leaf as rows: [n, coordinates of a slice]."""
        # The dimension is cut into [n, length / n], tiled, or is the n; then the n comes first.
        at, shape, n = self.dimension(leaf) % len(leaf.shape), list(leaf.shape), self.n_workers
        shape[at : at + 1] = [n, shape[at] // n] if self.tiled else [n]
        # Without its identity, so that leaves of equal shapes share a compiled function.
        own = replace(self.of(leaf), index=0, name="", path="", whole=())
        return _rows(x, tuple(shape), at, own)

    def of(self, leaf: Leaf) -> Leaf:
        """One worker's slice of a leaf; the last axis stands for a scale axis that is gone."""
        shape, axis, dimension = list(leaf.shape), leaf.scale_axis, self.dimension(leaf)
        dimension %= len(shape)
        if self.tiled:
            shape[dimension] //= self.n_workers
        else:
            del shape[dimension]
            if axis is not None:  # axes behind the removed one move up by one
                axis = None if axis == dimension else axis - (axis > dimension)
        return replace(leaf, shape=tuple(shape), scale_axis=axis)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rows(x: Array, shape: tuple[int, ...], at: int, own: Leaf) -> Array:
    """Slices along one axis as rows. Equal leaves share this function, since it has no names."""
    return to_flat(jnp.moveaxis(x.reshape(shape), at, 0), own)


# Buckets of the same size are traced and lowered once, as in `buckets`.
@functools.partial(jax.jit, static_argnames=("axis", "method", "topology"))
def _scatter_bucket(x: Array, seed: Seed, *, axis: Axis, method: Method, topology: Any) -> Array:
    return method.reduce_scatter(x, Call(axis, topology, seed))


def all_gather(
    x: Tree | Packed,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: Varying = "varying",
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> Tree | Any:
    """Gathers every worker's leaves, quantised; all workers get the same bits.

    The semantics and the derivative are those of `jax.lax.all_gather`: cotangents are summed
    exactly, in their dtype. The result is the exact result plus unbiased noise: every worker
    encodes its shard once, at ``method.bits`` bits per coordinate, with widths from the statistics
    of this shard. Unlike gradients, parameters have even energy: ``DynamiQ(bits=8)`` suits them.

    Frozen shards need not be encoded in each step: `dynamiq_jax.optax.pack` encodes them once. For
    packed shards the result has the same bits as for the shards under the key of `pack`, and no
    derivative.

    Args:
      x: any pytree of shards, of equal shapes on all workers; the rules of `psum` say, by the size
        of the gathered leaf, which leaves are compressed. Or a result of `dynamiq_jax.optax.pack`,
        which has its own compression and key.
      axis_name: the mapped axis; a tuple counts as one axis.
      axis: the dimension along which shards are joined.
      tiled: whether shards are concatenated along this dimension, or stacked along a new one.
      to: the type of the result over the axis, as for `jax.lax.all_gather`: "varying", "invarying"
        (replicated) or "reduced". It has no effect if JAX does not track types.
      compression: as for `psum`. Its topology has an effect only if it is `Hierarchical`, over
        several axes.
      key: as for `psum`.
      axis_index_groups: as for `psum_scatter`; then ``to`` is "varying".

    Returns:
      A tree like ``x`` of gathered leaves in their dtypes, with the same bits on all workers.

    Raises:
      ValueError: a leaf does not have the axis, an argument is malformed, or packed shards are for
        another axis, or are passed with a compression or a key.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: ``axis_index_groups`` under `jax.vmap` or with ``to``, positional axes,
        or leaves to be compressed where `jax.shard_map` left axes of the mesh automatic or
        explicit.
    """
    workers = check_axis(axis_name, axis_index_groups)
    check_choice("to", to, get_args(Varying))
    if isinstance(x, Packed):
        told = {"compression": compression, "key": key}
        _check_packed(x, workers, [name for name, value in told.items() if value is not None])
        return _gather_packed(x, Cut(axis, tiled, x.n_workers), to)
    return gather_over(
        workers, x, as_compression(compression, "parameters"), axis, tiled=tiled, to=to, key=key
    )


def gather_over(
    axis: Axis,
    tree: Tree,
    compression: Compression,
    dimension: Dimensions,
    *,
    tiled: bool = True,
    to: Varying = "varying",
    key: Array | None = None,
) -> Tree:
    """`all_gather` with its arguments in one compression."""
    if not axis.names:
        return tree
    told = {"axis": dimension, "tiled": tiled, "to": to}
    plan, leaves = _plan_of_shards("all_gather", axis, tree, compression, key, told)
    values, treedef = jax.tree.flatten(tree)
    if to != "varying" and axis.groups is not None:
        raise NotImplementedError(
            f"to={to!r}: what is gathered within axis_index_groups={axis.groups} varies "
            "between them; pass to='varying', or give each group an axis of its own"
        )
    cut = Cut(dimension, tiled, axis.size)
    for leaf in leaves:
        check_axis_of(leaf, "axis", cut.dimension(leaf), more=not tiled)
    rule = Gather(axis, cut, to)
    found, _, _ = run(plan, rule, dict(enumerate(values)), key)
    return treedef.unflatten(found.values())


def _plan_of_shards(
    collective: str,
    axis: Axis,
    tree: Any,
    compression: Compression,
    key: Array | None,
    told: dict[str, Any],
) -> tuple[Plan, list[Leaf]]:
    """The plan of a gather of the shards, after all checks of the arguments ``told``."""
    if len(axis.names) == 1 or axis.groups is not None:
        compression = replace(compression, topology=None)  # only hierarchies gather otherwise
    sizes, leaves, fixed = check_and_describe(collective, axis, tree, compression, key, told)
    plan = compression.plan(leaves, sizes, "all-gather", without=fixed, keyed=key is not None)
    check_whole(plan.buckets, axis)
    return plan, leaves


class NativeScatter(NamedTuple):
    """The rule of reduce-scatters of trees that XLA moves along the leaves' own dimensions."""

    axis: Axis
    cut: Cut
    op: Op

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """See `Rule`."""
        found, divisor = {}, self.cut.n_workers if self.op == "mean" else 1
        for leaf, _, wire in leaves:
            x, at = values[leaf.index], {"scatter_dimension": self.cut.dimension(leaf)}
            total = lax.psum_scatter(x.astype(wire), self.axis.names, tiled=True, **at)
            found[leaf.index] = divide(total, divisor, x.dtype)
        return found

    joined = moved = taken_apart = cast(Any, no_buckets)


class NativeGather(NamedTuple):
    """The rule of all-gathers of trees that XLA moves."""

    axis: Axis
    cut: Cut
    to: Varying

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """See `Rule`."""
        found = {}
        for leaf, _, wire in leaves:
            x, bits = values[leaf.index], jnp.uint16
            if narrow := wire != x.dtype:  # no compiler widens integers
                x = lax.bitcast_convert_type(x.astype(wire), bits)
            whole = put_together(self.axis.all_gather(x, self.to), self.cut.dimension(leaf))
            if narrow:
                whole = lax.bitcast_convert_type(whole, wire).astype(leaf.dtype)
            found[leaf.index] = whole
        return found

    joined = moved = taken_apart = cast(Any, no_buckets)


def natively(exchange: Exchange, tree: Any, *, op: Op, to: Varying) -> Any:
    """Scatters or gathers a tree by XLA's collectives."""
    axis = Axis(exchange.axes)
    cut, gathers = Cut(exchange.at, True, axis.size), exchange.kind == "all-gather"
    plan = exchange.plan(describe_leaves(tree), axis_sizes(axis))
    rule = NativeGather(axis, cut, to) if gathers else NativeScatter(axis, cut, op)
    found, _, _ = run(plan, rule, dict(enumerate(jax.tree.leaves(tree))))
    return jax.tree.structure(tree).unflatten(found.values())


class Gather(NamedTuple):
    """The rule of all-gathers, of shards or of their payloads (``packed``)."""

    axis: Axis
    cut: Cut
    to: Varying
    packed: bool = False

    def _whole(self, blocks: Array, leaf: Leaf) -> Array:
        return put_together(blocks, self.cut.dimension(leaf), tiled=self.cut.tiled)

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """See `Rule`."""
        gather = functools.partial(self.axis.all_gather, to=self.to)
        shards = [(leaf, jnp.asarray(values[leaf.index])) for leaf, _, _ in leaves]
        return {leaf.index: self._whole(gather(x), leaf) for leaf, x in shards}

    def joined(self, bucket: Bucket, values: Values) -> Any:
        """The flat bucket of this worker's shards; a payload stands for its first leaf."""
        return values[bucket.leaves[0].index] if self.packed else concatenate(bucket, values)

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """See `Rule`: every worker's bucket, [n, s]."""
        axis, to, bucket = self.axis, self.to, plan.buckets[number]
        exact, (method, _) = functools.partial(axis.all_gather, to=to), bucket.route.sharded()
        if self.cut.n_workers == 1:
            # One worker encodes nothing, so its numbers keep all bits.
            gathered = exact(x)
        elif self.packed:
            sizes = {"size": bucket.size, "dtype": bucket.dtype}
            run = axis.program(_unpack_bucket)
            gathered = run(x, seed, axis=axis, method=method, to=to, **sizes)
        else:
            run = axis.program(_gather_bucket)
            gathered = run(*lax.stop_gradient((x, seed)), axis=axis, method=method, to=to)
            gathered = with_tangent(exact, x, gathered)
        return gathered, (state, None)

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """See `Rule`; a worker's row has its shards in the order of the bucket's leaves."""
        shards = pieces(result, [leaf.size for leaf in bucket.leaves])
        pairs = zip(bucket.leaves, shards, strict=True)
        return {leaf.index: self._whole(from_flat(own, leaf), leaf) for leaf, own in pairs}


@functools.partial(jax.jit, static_argnames=("axis", "method", "to"))
def _gather_bucket(x: Array, seed: Seed, *, axis: Axis, method: Method, to: Varying) -> Array:
    whole = method.all_gather(x, Call(axis, None, seed), invarying=to != "varying")
    return _as_reduced(whole, axis, to)


def _as_reduced(whole: Array, axis: Axis, to: Varying) -> Array:
    reduced = to == "reduced" and axis.tracked  # the method's result counts as replicated
    return lax.pcast(whole, axis.names, to="reduced") if reduced else whole


def pack(
    shards: Any,
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
) -> Packed:
    """Encodes frozen shards once, for an `all_gather` of their payloads in each step.

    A frozen base of LoRA under FSDP then takes 1 byte per coordinate, divided by the number of
    workers, and no step encodes it. Call `pack` inside of the map, before training:

        pack = jax.shard_map(
            lambda base: dq.optax.pack(base, "data", compression=dq.DynamiQ(bits=8)),
            mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        )
        packed = jax.jit(pack)(base)

    In the step, with ``P("data")`` as the spec of ``packed``, ``dq.all_gather(packed, "data",
    tiled=True)`` has the same bits as ``dq.all_gather(base, "data", tiled=True, ...)`` with the
    same compression and key. For the layers of a scan, call it in `jax.lax.map` over stacked
    shards; `jax.lax.scan` takes the stacked payloads layer by layer.

    Args:
      shards: any pytree of this worker's shards, of equal shapes on all workers.
      axis_name: the mapped axis; a tuple counts as one axis.
      compression: as for `all_gather`; the same leaves are compressed.
      key: as for `all_gather`: the key of the rounding, the same on all workers. The result keeps
        it.

    Returns:
      A pytree node of arrays, each with a leading axis of 1 inside of the map.

    Raises:
      ValueError: an argument is malformed.
      NameError: ``axis_name`` is not mapped.
      NotImplementedError: the method does not support packing, or as for `all_gather`.
    """
    axis, compression = check_axis(axis_name), as_compression(compression, "parameters")
    plan, _ = _plan_of_shards("pack", axis, shards, compression, key, {})
    values, treedef = jax.tree.flatten(shards)
    words, n, payloads = key_words(key), axis.size, []
    for bucket, seed in zip(plan.buckets, plan.seeds(words), strict=True):
        x, (method, _) = concatenate(bucket, dict(enumerate(values))), bucket.route.sharded()
        # One worker's gather encodes nothing.
        call = Call(axis, None, seed)
        payloads.append(x if n == 1 else method.pack(lax.stop_gradient(x), call))
    exact = tuple(jnp.asarray(values[leaf.index]) for leaf, _, _ in plan.exact)
    kept = axis.to_varying(jax.tree.map(lambda x: x[None], (tuple(payloads), exact, words)))
    return Packed(*kept, axis=axis, n_workers=n, plan=plan, treedef=treedef)


def _check_packed(packed: Packed, axis: Axis, told: list[str]) -> None:
    """Refuses packed shards of other workers, and arguments that the shards already determine."""
    if axis != packed.axis:
        raise ValueError(
            f"axis_name={axis.name!r}, and the shards were packed over {packed.axis.name!r}; "
            "gather them over the axis that dq.optax.pack got, without groups"
        )
    if (n := math.prod(axis_sizes(axis, "all_gather"))) != packed.n_workers:
        raise ValueError(
            f"axis {axis.name!r} has {n} workers, and the shards were packed by "
            f"{packed.n_workers}; pack them anew from the weights"
        )
    for leaf in jax.tree.leaves(packed)[:1]:
        if leaf.shape[0] != 1:
            raise ValueError(
                f"an array of the packed shards is {leaf.shape}, and inside of a map this worker's "
                f"has a leading axis of 1; pass P({axis.name!r}) as its spec in in_specs"
            )
    if told:
        raise ValueError(
            f"{' and '.join(told)} came with packed shards, which are encoded already; pass this "
            "to dq.optax.pack, and leave it out here"
        )


def _gather_packed(packed: Packed, cut: "Cut", to: Varying) -> Any:
    """The shards of all workers, decoded from their payloads."""
    axis, plan = packed.axis, packed.plan
    own = jax.tree.map(lambda x: x[0], (packed.payloads, packed.exact, packed.words))
    payloads, exact, words = own
    # The key was the same on all workers when they packed; the spec of the node says otherwise.
    words = None if words is None else axis.assume_invarying(words)
    values: Values = {}
    for (leaf, _, _), x in zip(plan.exact, exact, strict=True):
        check_axis_of(leaf, "axis", cut.dimension(leaf), more=not cut.tiled)
        values[leaf.index] = x
    for bucket, payload in zip(plan.buckets, payloads, strict=True):
        for leaf in bucket.leaves:
            check_axis_of(leaf, "axis", cut.dimension(leaf), more=not cut.tiled)
        # The payload stands in the place of its bucket's first leaf; see `Gather.joined`.
        values[bucket.leaves[0].index] = payload
    found, _, _ = run(plan, Gather(axis, cut, to, packed=True), values, words)
    return packed.treedef.unflatten(x for _, x in sorted(found.items()))


@functools.partial(jax.jit, static_argnames=("axis", "method", "to", "size", "dtype"))
def _unpack_bucket(
    payload: Any, seed: Seed, *, axis: Axis, method: Method, to: Varying, size: int, dtype: Any
) -> Array:
    call = Call(axis, None, seed)
    whole = method.unpack(payload, size, dtype, call, invarying=to != "varying")
    return _as_reduced(whole, axis, to)


def check_and_describe(
    collective: str,
    axis: Axis,
    tree: Any,
    compression: Compression,
    key: Array | None,
    told: dict[str, Any],
) -> tuple[tuple[int, ...], list[Leaf], Fixed]:
    """The axes' sizes, the leaves, and the fixed ones; compares the first call of all processes."""
    sizes, leaves = axis_sizes(axis, collective), describe_leaves(tree)
    told = {"key": key, **told}
    compare_first(collective, axis, leaves, lambda: compression.facts(axis, sizes, leaves, **told))
    check_groups(axis, all_reduce=False)
    check_key(key, axis)
    return sizes, leaves, fixed_leaves(leaves, jax.tree.leaves(tree), axis)


def check_axis_of(leaf: Leaf, name: str, axis: int, *, more: int = 0) -> None:
    """Refuses an axis that a leaf does not have; the result has ``more`` axes than the leaf."""
    count = len(leaf.shape) + more
    if not hasattr(axis, "__index__"):
        raise ValueError(f"{name}={axis!r} is not an integer; pass the number of an axis, as 0")
    if not -count <= axis < count:
        raise ValueError(
            f"{name}={axis}: leaf {leaf.name} has shape {leaf.shape}; pass an axis that every leaf "
            "has, or call it for such leaves alone"
        )
