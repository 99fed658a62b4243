"""One chunk with a tile of every width, through the codec alone: no workers, no plan.

One call encodes all widths of a format, so that a format costs one compilation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from compiler import SOME

import pallas_kernels as pk
from pallas_kernels import TILE_ROWS, WireFormat

slot_noise = jax.jit(pk.slot_noise, static_argnums=(1, 2))
EVERY = tuple(range(1, 17))
DITHERED = tuple(w for w in EVERY if w != 15)
FORMATS = {
    "default": WireFormat(widths=EVERY),
    "piecewise": WireFormat(widths=EVERY, levels="piecewise"),
    "geometric": WireFormat(widths=(*range(1, 11), 16), levels="geometric"),
    "uniform": WireFormat(widths=EVERY, levels="uniform"),
    "correlated": WireFormat(widths=EVERY, rounding="correlated"),
    "independent": WireFormat(widths=EVERY, rounding="independent"),
    "bf16_scales": WireFormat(widths=EVERY, group_scale="bf16"),
    "group_8": WireFormat(widths=EVERY, group_size=8),
    "group_32": WireFormat(widths=EVERY, group_size=32),
    "group_64": WireFormat(widths=EVERY, group_size=64),
    "super_128": WireFormat(widths=EVERY, super_group_size=128),
    "super_512": WireFormat(widths=EVERY, super_group_size=512),
    "super_1024": WireFormat(widths=EVERY, super_group_size=1024),
    "dither": WireFormat(widths=DITHERED, levels="piecewise", dither=True),
    "dither_companded": WireFormat(widths=DITHERED, dither=True, rounding="independent"),
    "dither_uniform": WireFormat(widths=DITHERED, levels="uniform", dither=True, group_size=16),
}


class Chunk:
    """One tile of each width of a format, in one chunk, for the second encoder of three."""

    def __init__(self, fmt: WireFormat):
        self.fmt, self.widths = fmt, np.array(fmt.widths)
        self.words = [fmt.tile_words(w) for w in self.widths]
        self.offsets = np.cumsum(self.words) - self.words
        self.tiles = jnp.asarray(pk.pack_tiles(self.offsets, self.widths), jnp.int32)[None]
        self.rows = TILE_ROWS * len(self.widths)
        self.size = self.rows * fmt.super_group_size
        self.order = jnp.arange(self.rows, dtype=jnp.int32)[None]
        self.payload_words = sum(self.words)

    def noise(self, seed):
        return slot_noise(seed, 3, self.fmt.rounding)[1]

    def target(self, seed):
        return pk.Target(self.tiles, self.noise(seed), self.payload_words)

    def result(self, mean_sum, **others):
        return pk.Result(mean_sum, self.order, self.rows, jnp.float32, **others)

    @functools.cached_property
    def round_trip(self):
        """jit of (x, mean, seed) -> (payload, decoded)."""
        fmt, chunks = self.fmt, jnp.zeros(1, jnp.int32)

        def run(x, mean, seed):
            source, result = pk.Source(x, mean, self.order), self.result(mean)
            payload = pk.compress(source, chunks, self.target(seed), fmt=fmt)
            noise = self.noise(seed)[None]
            decoded = pk.decompress(payload, self.tiles, chunks, result, noise, fmt=fmt)
            return payload, decoded.reshape(-1)

        return jax.jit(run, compiler_options=SOME)


@functools.cache
def chunk_of(name):
    return Chunk(FORMATS[name])


def seeds(count, seed=1):
    return jax.random.bits(jax.random.key(seed), (count, 2), jnp.uint32)


def normal(chunk, seed=0):
    """N(0, 1) coordinates, and a bf16 mean for every super-group."""
    return _normal(seed, chunk.rows, chunk.size)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed, rows, size):
    x_key, mean_key = jax.random.split(jax.random.key(seed))
    mean = 0.2 * jax.random.normal(mean_key, (rows,), jnp.bfloat16)
    return jax.random.normal(x_key, (size,)), mean.astype(jnp.float32)
