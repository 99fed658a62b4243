"""Stand-ins for push kernels, which run on any machine."""

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis


def exchanged(tree, axes, *, to_all):
    """Brings what a push kernel brings, on any machine."""
    axis = Axis(tuple(axes))
    return jax.tree.map(axis.all_gather, tree) if to_all else axis.all_to_all(tree)


def reduced(source, tiles, noise, words, result, axes, *, fmt, even):
    """Runs the kernels that `pk.all_reduce` stands for."""
    axis, (first, last) = Axis(tuple(axes)), tiles
    n, me = axis.size, axis.index
    if noise.ndim == 1:  # a part of the seed
        noise = pk.slot_noise(axis.psum(noise), n, fmt.rounding)
    if even:
        rows = first.shape[1] * pk.TILE_ROWS
        first, last = (jnp.repeat(x[:1], n, axis=0) for x in tiles)
        source = source._replace(order=jnp.arange(n * rows, dtype=jnp.int32).reshape(n, rows))
        result = result._replace(mean_sum=jnp.zeros(n * rows))
    result, everyone = result._replace(order=source.order), jnp.arange(n, dtype=jnp.int32)
    own, noises = noise[me], noise if fmt.dither else None
    sent = pk.compress(source, everyone, pk.Target(first, own, words[0]), fmt=fmt)
    came = pk.Input(exchanged(sent, axes, to_all=False)[:, None], first, me, noises)
    (total,) = pk.decompress_accumulate_recompress(
        (came,), source, me[None], pk.Target(last, own, words[1]), fmt=fmt
    )
    sums = exchanged(total, axes, to_all=True)
    return pk.decompress(sums, last, everyone, result, noises, fmt=fmt)
