"""`all_to_all`: exchanges compressed blocks between workers, such as tokens for experts.

A worker encodes the block of every receiver separately, at one width. Workers need no agreement, so
one collective sends everything: payloads, and after them one byte for every super-group of 256
coordinates, which says whether it had a NaN or an infinity.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

import pallas_kernels as pk
from dynamiq_jax.compression.compression import ByPath, Compression, as_compression, check_method
from dynamiq_jax.compression.routes import Route
from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.checks import check_axis
from dynamiq_jax.core.compat import inlined
from dynamiq_jax.core.seeds import Seed, fold_seed, key_words, seed_of
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.methods.base import Call
from dynamiq_jax.methods.hops import HopMethod
from dynamiq_jax.reduction import scatter_gather
from dynamiq_jax.topologies import Direct
from dynamiq_jax.tree.leaves import Bucket, Grouping, from_flat, joined
from dynamiq_jax.tree.placement import check_whole
from pallas_kernels.format import TILE_ROWS, WireFormat

Tree = TypeVar("Tree")

EIGHT_BITS = DynamiQ(bits=8.5)
"""The default: codes of 8 bits, and 0.34 bits of scales for each code."""
FLAGS = 16
"""Flags of super-groups come in multiples of this: payloads are whole quads of words."""


def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    compression: Compression | Method | ByPath | None = None,
    backward: Method | None = EIGHT_BITS,
    key: Array | None = None,
    method: Compression | Method | ByPath | None = None,
) -> Tree:
    """Sends block i of every leaf to worker i, quantised; cotangents are also sent quantised.

    The arguments, the shapes and the derivative are those of `jax.lax.all_to_all`. The result is
    the exact result plus unbiased noise. JAX refuses forward mode (`jax.jvp`), as for any
    `jax.custom_vjp`.

    `DynamiQ` encodes every coordinate at the largest width that fits ``bits`` together with its
    metadata: 8 bits take 8.34 on the wire, 6 bits take 6.34. Zeros stay zeros, and so do padding
    and dropped tokens. A NaN or an infinity makes the 256 coordinates of its super-group NaN, and
    no others. You can also use other quantisers without memory (`dynamiq_jax.comparators`: `MXFP8`,
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
      compression: as for `psum`, without a state. Default: ``DynamiQ(bits=8.5)``, codes of 8 bits.
      backward: the method for the cotangents of all leaves that are compressed; `None`: the leaf's
        method.
      key: as for `psum`. The backward pass uses other noise from the same key. Without a key the
        noise of `DynamiQ` is a hash of each worker's data.
      method: the former name of ``compression``. It warns; the next version removes it.

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
    compression = replace(
        as_compression(compression, method=method, default=EIGHT_BITS), topology=None
    )
    told = {"split_axis": split_axis, "concat_axis": concat_axis, "tiled": tiled}
    told["backward"] = backward
    sizes, leaves, fixed = scatter_gather.check_and_describe(
        "all_to_all", axis, x, compression, key, told
    )
    values, treedef = jax.tree.flatten(x)
    n = math.prod(sizes)
    cut = scatter_gather.Cut(split_axis, tiled, n)
    for leaf in leaves:
        cut.check(leaf, "split_axis", "pad it with zeros, which stay zeros")
        scatter_gather.check_axis_of(leaf, "concat_axis", concat_axis)
    if backward is not None:
        check_method(backward, "backward")
        _check_serves(backward, n, "backward")
    check = lambda route: _check_serves(route.method, n)
    grouping = scatter_gather.group_parts(
        compression, leaves, sizes, _exchanged_bits, fixed=fixed, check=check
    )
    check_whole(grouping, axis)
    options = {"backward": backward, "cut": cut, "concat_axis": concat_axis}
    values = _exchange_leaves(values, key, grouping=grouping, axis=axis, **options)
    return jax.tree.unflatten(treedef, values)


@functools.partial(inlined, static_argnames=("grouping", "axis", "backward", "cut", "concat_axis"))
def _exchange_leaves(
    values: list[Array],
    key: Array | None,
    *,
    grouping: Grouping,
    axis: Axis,
    backward: Method | None,
    cut: scatter_gather.Cut,
    concat_axis: int,
) -> list[Array]:
    words, values = key_words(key), list(values)
    for leaf, _ in grouping.exact:
        split, concat = (i % len(leaf.shape) for i in (cut.dimension, concat_axis))
        options = {"axis_index_groups": axis.groups, "tiled": cut.tiled}
        own = jnp.asarray(values[leaf.index])
        values[leaf.index] = lax.all_to_all(own, axis.name, split, concat, **options)
    seeds = grouping.seeds(words)
    for bucket, seed in zip(grouping.buckets, seeds, strict=True):
        parts = [cut.rows(values[leaf.index], leaf) for leaf in bucket.leaves]
        blocks: Any = joined(parts)
        if cut.n_workers > 1:
            forth = bucket.route.method.of_bucket(bucket)  # an exchange has one level
            blocks = _exchange(blocks, seed, axis, forth, backward or forth)
        found = scatter_gather.pieces(blocks, [part.shape[1] for part in parts])
        for leaf, own in zip(bucket.leaves, found, strict=True):
            own = from_flat(own, cut.of(leaf))  # blocks of all workers
            values[leaf.index] = scatter_gather.put_together(own, concat_axis, tiled=cut.tiled)
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _exchange(x: Array, seed: Seed, axis: Axis, method: Method, backward: Method) -> Array:
    """Sends row j of ``x`` to worker j; row i of the result is from worker i."""
    return exchange_rows(x, seed, axis=axis, method=method)


def _exchange_backward(axis, method, backward, seed, cotangent):
    # An exchange of rows is its own transpose.
    seed = fold_seed(jnp.asarray(seed), 1)
    return _exchange(cotangent, seed, axis, backward, backward), None


_exchange.defvjp(lambda x, seed, *rest: (_exchange(x, seed, *rest), seed), _exchange_backward)


@functools.partial(jax.jit, static_argnames=("axis", "method"))
def exchange_rows(x: Array, seed: Seed, *, axis: Axis, method: HopMethod) -> Array:
    """Exchanges [n, s] to [n, s]; buckets of the same size share one function of the program."""
    method.warn(Call(axis, Direct(), seed), "all_gather")
    with jax.named_scope(f"{type(method).__name__.lower()}_all_to_all"):
        if isinstance(method, DynamiQ):
            return _exchange_dynamiq(x, seed, axis, method)
        return method.exchange(x, Call(axis, None, seed))


def _exchange_dynamiq(
    x: Float[Array, "n s"], seed: Seed, axis: Axis, method: DynamiQ
) -> Float[Array, "n s"]:
    """Encodes all super-groups at one width and in their order; each block is one chunk."""
    n, size = x.shape
    fmt = _format(method, n)
    group_size, width = fmt.super_group_size, fmt.widths[0]
    rows = -(-size // group_size)  # super-groups of a block, and those of its tiles
    whole = -(-rows // TILE_ROWS) * TILE_ROWS
    pad = rows * group_size - size
    flat = (jnp.pad(x, ((0, 0), (0, pad))) if pad else x).reshape(-1)
    # Padding of tiles has the last numbers; kernels read zeros there.
    everyone, place = jnp.arange(n, dtype=jnp.int32), jnp.arange(whole, dtype=jnp.int32)[None]
    spare = n * rows + everyone[:, None] * (whole - rows) + place - rows
    order = jnp.where(place < rows, everyone[:, None] * rows + place, spare)
    offsets = fmt.tile_words(width) * jnp.arange(whole // TILE_ROWS, dtype=jnp.int32)
    tiles = jnp.broadcast_to(pk.pack_tiles(offsets, width), (n, whole // TILE_ROWS))
    options = {"fmt": fmt, "backend": method.backend}

    mean, sqnorm = pk.statistics(flat, super_group_size=group_size, backend=method.backend)
    bad = ~jnp.isfinite(mean).reshape(n, rows)
    noise = pk.slot_noise(seed_of(seed, sqnorm), n, fmt.rounding)[axis.index]
    flags = jnp.pad(bad, ((0, 0), (0, -rows % FLAGS))).astype(jnp.uint8)
    flags = lax.bitcast_convert_type(flags.reshape(n, -1, 4), jnp.uint32)
    records = whole // TILE_ROWS * fmt.tile_words(width)
    target = pk.Target(tiles, noise, records + flags.shape[1])
    payloads = pk.compress(pk.Source(flat, None, order), everyone, target, **options)
    arrived = axis.all_to_all(payloads.at[:, records:].set(flags))

    bad = lax.bitcast_convert_type(arrived[:, records:], jnp.uint8).reshape(n, -1)[:, :rows]
    poison = jnp.where(bad > 0, jnp.nan, jnp.float32(0)).reshape(-1)
    poison = jnp.pad(poison, (0, n * (whole - rows)))
    result = pk.Result(poison, order, n * rows, x.dtype)
    found = pk.decompress(arrived, tiles, everyone, result, **options).reshape(n, -1)[:, :size]
    # Rounded up, the largest values of float16 would become infinities.
    largest = jnp.finfo(jnp.float16).max
    return jnp.clip(found, -largest, largest) if x.dtype == jnp.float16 else found


def _format(method: DynamiQ, n_workers: int) -> WireFormat:
    """The wire format with one width, the largest that fits the method's bits for all workers."""
    # One worker sends nothing, and gets the format of two.
    found = method.allocation(max(n_workers, 2), Direct(), "all_gather")
    return replace(found.fmt, widths=found.floors, rounding="independent")


def _exchanged_bits(route: Route, bucket: Bucket) -> float:
    """Wire bits per coordinate of an exchange; 0 for methods that do not pad."""
    method, n = route.method, route.n_workers
    if not isinstance(method, DynamiQ):
        return 0.0
    fmt, size = _format(method, n), -(-bucket.size // n)
    rows = -(-size // fmt.super_group_size)
    words = -(-rows // TILE_ROWS) * fmt.tile_words(fmt.widths[0]) + -(-rows // FLAGS) * FLAGS // 4
    return 32 * words / size


def _check_serves(method: Method, n_workers: int, name: str = "method") -> None:
    """Refuses methods that cannot encode blocks without an agreement between workers."""
    serves = False
    if isinstance(method, DynamiQ):
        one = method.floor is not None or len(method.widths or ()) == 1
        serves = one and not method.dither and not method.format.subtract_mean
        serves = serves and _format(method, n_workers).widths[0] > 1
    elif isinstance(method, HopMethod):
        serves = method.shards and not method.needs_state
    if not serves:
        raise NotImplementedError(
            f"{name}={method!r}: all_to_all encodes at one width of 2 to 16 bits, without means, "
            "dither, state or lost packets, and not by XLA's own sums; pass dq.DynamiQ(bits=8.5), "
            "dq.comparators.MXFP8() or dq.BF16()"
        )
