"""`psum` and `pmean` over pytrees, drop-in for `jax.lax`'s. Validation of arguments lives here."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt

from dynamiq_jax._compat import tracks_varying, varying_axes
from dynamiq_jax.buckets import Bucket, Leaf, describe_leaves, group_leaves, join, split
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.topologies import Ring, Topology

Tree = TypeVar("Tree")


def psum(
    tree: Tree,
    axis_name: str,
    *,
    method: DynamiQ | None = None,
    topology: Topology | None = None,
    key: Array | None = None,
) -> Tree:
    """Sums every leaf over the mapped axis, compressed; stands where `jax.lax.psum` stood.

    Runs inside `jax.shard_map` (also with ``check_vma=True`` and ``out_specs=P()``), `jax.pmap`
    and ``jax.vmap(axis_name=...)``. The result has the same bits on all workers. Every encoding is
    unbiased over the rounding's randomness (but for width 0), and so is the result with
    ``rounding="independent"``; the paired roundings trade a little bias for much less error, see
    `pallas_kernels.hashing`. A NaN or infinity on any worker makes its whole super-group NaN on
    all. Differentiates as `jax.lax.psum` does.

    Args:
      tree: any pytree. f32, bf16 and f16 leaves are compressed and come back in their dtype and
        shape; other dtypes, and leaves too small to gain, are summed exactly by `jax.lax.psum`.
        `explain` lists which leaf goes which way.
      axis_name: the mapped axis.
      method: how to compress; default ``DynamiQ()``, 5 bits per coordinate.
      topology: how payloads travel; default ``Ring()``.
      key: a PRNG key for the rounding, the same on all workers. Default: a hash of the
        all-reduced statistics, new whenever the gradient is.

    Returns:
      A tree like ``tree``.

    Raises:
      ValueError: a leaf does not vary over ``axis_name`` (its sum would be n times itself), or an
        argument is malformed.
    """
    return _reduce(tree, axis_name, method, topology, key, mean=False)


def pmean(
    tree: Tree,
    axis_name: str,
    *,
    method: DynamiQ | None = None,
    topology: Topology | None = None,
    key: Array | None = None,
) -> Tree:
    """Averages every leaf over the mapped axis, compressed; see `psum` for everything else."""
    return _reduce(tree, axis_name, method, topology, key, mean=True)


def _reduce(tree, axis_name, method, topology, key, *, mean: bool):
    method = DynamiQ() if method is None else method
    topology = Ring() if topology is None else topology
    check_arguments(axis_name, method, topology)
    n_workers = lax.axis_size(axis_name)
    exact_reduce = lax.pmean if mean else lax.psum
    values, treedef = jax.tree.flatten(tree)
    leaves = describe_leaves(tree)
    _check_varying(leaves, values, axis_name, n_workers)
    words = None if key is None else _key_words(key)
    if n_workers == 1:
        return exact_reduce(tree, axis_name)
    grouping = group_leaves(
        leaves,
        min_leaf_size=method.min_leaf_size,
        min_bucket_size=method.smallest_bucket(n_workers),
        bucket_bytes=method.bucket_bytes,
    )
    if grouping.exact:
        indices = [leaf.index for leaf, _ in grouping.exact]
        for i, value in zip(
            indices, exact_reduce([values[i] for i in indices], axis_name), strict=True
        ):
            values[i] = value
    for bucket in grouping.buckets:
        reduce_flat = functools.partial(
            method.all_reduce,
            n_workers=n_workers,
            topology=topology,
            divisor=n_workers if mean else 1,
        )
        flat = _as_native(join(bucket, values), axis_name, reduce_flat, exact_reduce, words, bucket)
        for i, value in split(bucket, flat):
            values[i] = value
    return jax.tree.unflatten(treedef, values)


def _as_native(x, axis_name, reduce_flat, exact_reduce, words, bucket: Bucket):
    """The compressed reduction of ``x`` with the derivative of the exact one."""
    seed = None if words is None else bucket_seed(words, bucket.tag)

    @jax.custom_jvp
    def reduce(x, seed):
        return reduce_flat(x, axis_name, seed=seed)

    @reduce.defjvp
    def _(primals, tangents):
        return reduce(*primals), exact_reduce(tangents[0], axis_name)

    return reduce(x, seed)


def bucket_seed(words: UInt[Array, " 2"], tag) -> UInt[Array, " 2"]:
    """The seed of one bucket: the key's words and the bucket's tag."""
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), tag)
    )


def _key_words(key: Array) -> UInt[Array, " 2"]:
    """``uint32[2]`` from a typed or raw PRNG key of any implementation."""
    if not hasattr(key, "dtype"):
        raise ValueError(f"key={key!r} is not a PRNG key; pass jax.random.key(seed)")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.dtype != jnp.uint32 or key.ndim != 1 or key.shape[0] < 2:
        raise ValueError(
            f"key has dtype {key.dtype} and shape {key.shape}; expected one PRNG key, such as "
            "jax.random.key(seed) or jax.random.fold_in(key, step)"
        )
    words = key[:2]
    for i in range(2, key.shape[0], 2):  # longer keys: hash, since their halves may be equal
        words = bucket_seed(words, key[i]) ^ bucket_seed(words, key[min(i + 1, key.shape[0] - 1)])
    return words


def check_arguments(axis_name, method, topology) -> None:
    """Refuses arguments of the wrong kind, with the remedy."""
    if not isinstance(axis_name, str):
        raise NotImplementedError(
            f"axis_name={axis_name!r}: one axis name (a str) is supported; "
            "reduce over one axis at a time"
        )
    if isinstance(method, type) or not hasattr(method, "wire_bits"):
        raise ValueError(f"method={method!r} is not a method; pass for example dq.DynamiQ(bits=5)")
    if isinstance(topology, type) or not hasattr(topology, "chunks_per_worker"):
        raise ValueError(f"topology={topology!r} is not a topology; pass for example dq.Ring()")


def _check_varying(leaves: list[Leaf], values, axis_name: str, n_workers: int) -> None:
    if not tracks_varying(axis_name):
        return
    fixed = [
        leaf
        for leaf, value in zip(leaves, values, strict=True)
        if axis_name not in varying_axes(value) and leaf.size > 0
    ]
    if fixed:
        leaf = fixed[0]
        raise ValueError(
            f"leaf {leaf.name} ({leaf.dtype.name}{list(leaf.shape)}) and {len(fixed) - 1} more do "
            f"not vary over axis {axis_name!r}: all {n_workers} workers hold the same value, which "
            f"a psum would multiply by {n_workers}. Gradients of replicated parameters are already "
            "summed under check_vma=True: differentiate with dq.value_and_grad, or cast the "
            f"parameters first with jax.lax.pcast(params, {axis_name!r}, to='varying')"
        )
