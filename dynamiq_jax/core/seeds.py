"""Rounding: its seeds, the same on all workers, from a key or from what all know; other dtypes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import varying_axes
from pallas_kernels import mix


def check_key(key, axis: Axis | None = None) -> None:
    """Refuses keys that are not arrays, and those that JAX knows to vary over the axis.

    The check runs ahead of `jax.jit`, which turns numbers into arrays. Groups of workers may have
    different keys.
    """
    if key is None:
        return
    if not hasattr(key, "dtype"):
        raise ValueError(f"key={key!r} is not a PRNG key; pass jax.random.key(seed)")
    if axis is not None and axis.groups is None and not varying_axes(key).isdisjoint(axis.names):
        raise ValueError(
            f"key varies over axis {axis.name!r}, and workers that round by different keys do not "
            "get the same result; pass the key that was there before jax.lax.axis_index was folded "
            "in, through in_specs=P() of jax.shard_map"
        )


Seed = UInt[Array, " 2"] | UInt[Array, ""]
"""The seed of a collective's rounding, the same on all workers: two 32-bit words of a key; or, if
the caller gave no key, one number that tells its bucket from others."""


def key_words(key: Array | None) -> UInt[Array, " 2"] | None:
    """``uint32[2]`` from a typed or raw PRNG key of any implementation."""
    check_key(key)
    if key is None:
        return None
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.dtype != jnp.uint32 or key.ndim != 1 or key.shape[0] < 2:
        raise ValueError(
            f"key has dtype {key.dtype} and shape {key.shape}; expected one PRNG key, such as "
            "jax.random.key(seed) or jax.random.fold_in(key, step)"
        )
    words = key[:2]
    for i in range(2, key.shape[0], 2):  # longer keys: hash, since their halves may be equal
        words = fold_seed(words, key[i]) ^ fold_seed(words, key[min(i + 1, key.shape[0] - 1)])
    return words


def bucket_seeds(words: UInt[Array, " 2"] | None, tags: Sequence[int]) -> list[Seed]:
    """The seeds of buckets with these `Bucket.tag`, from a key's words if there is a key."""
    if words is None:
        return [jnp.uint32(tag) for tag in tags]
    return list(fold_seeds(words, tags)) if tags else []


def fold_seed(words: Seed, tag) -> Seed:
    """The seed of one part of a collective: ``words``, and the number of the part."""
    if words.ndim == 0:
        return mix(words + mix(jnp.asarray(tag, jnp.uint32) + jnp.uint32(1)))
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), tag)
    )


def fold_seeds(words: UInt[Array, " 2"], tags: Sequence[int]) -> UInt[Array, "tags 2"]:
    """`fold_seed` of every tag, bit for bit, by one hash of a vector.

    A hash is 220 operations of scalars. One for every part would be a fourth of a large program.
    """
    return jax.vmap(fold_seed, (None, 0))(words, jnp.asarray(np.asarray(tags, np.uint32)))


def seed_of(seed: Seed, stats: Float[Array, "*shape"] | None = None) -> UInt[Array, " 2"]:
    """The key's two words; without a key, a hash of the bucket's number and of the statistics."""
    if seed.ndim == 1:
        return seed
    number = jnp.stack([mix(seed), mix(seed * jnp.uint32(0x9E3779B1))])  # 0 changes nothing
    return number if stats is None else number ^ statistics_seed(stats)


def statistics_seed(stats: Float[Array, "*shape"]) -> UInt[Array, " 2"]:
    """A seed that is the same on all workers and new in every step: a hash of the statistics."""
    bits = lax.bitcast_convert_type(stats.astype(jnp.float32), jnp.uint32)
    position = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    first = mix(bits ^ mix(position + jnp.uint32(1)))
    second = mix(bits + mix(position ^ jnp.uint32(0x85EBCA6B)))
    # One sum of both is fewer kernels than two sums.
    return jnp.sum(jnp.stack([first.reshape(-1), second.reshape(-1)]), axis=1, dtype=jnp.uint32)


def rounded_to(dtype: Any, x: Array) -> Array:
    """Rounds ``x`` to the numbers of a floating-point ``dtype``, and keeps the dtype of ``x``.

    XLA may drop a cast to ``dtype`` that a cast back follows, but not this.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)
