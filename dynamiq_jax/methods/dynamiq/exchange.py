"""All-to-alls: blocks of one width, which need no agreement between workers.

After a block's tiles comes one byte for every super-group, which says whether it had a NaN or an
infinity.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

import pallas_kernels as pk
from dynamiq_jax.core.axis import seed_of
from dynamiq_jax.methods.base import Call
from pallas_kernels import Backend, WireFormat
from pallas_kernels.format import TILE_ROWS

FLAGS = 16
"""Flags of super-groups come in multiples of this: payloads are whole quads of words."""


def block_words(size: int, fmt: WireFormat) -> int:
    """32-bit words of a block of ``size`` coordinates."""
    rows = -(-size // fmt.super_group_size)
    flags = -(-rows // FLAGS) * FLAGS // 4
    return -(-rows // TILE_ROWS) * fmt.tile_words(fmt.widths[0]) + flags


def exchange(
    x: Float[Array, "n s"], call: Call, fmt: WireFormat, backend: Backend | None
) -> Float[Array, "n s"]:
    """Encodes all super-groups at one width and in their order; each block is one chunk."""
    axis, (n, size) = call.axis, x.shape
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
    options = {"fmt": fmt, "backend": backend}

    mean, sqnorm = pk.statistics(flat, super_group_size=group_size, backend=backend)
    bad = ~jnp.isfinite(mean).reshape(n, rows)
    noise = pk.slot_noise(seed_of(call.seed, sqnorm), n, fmt.rounding)[axis.index]
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
