"""THC: codes whose table values can be added as integers (tensor homomorphic compression).

The numerics of `thc`, as pure functions. A worker's gradient passes through

1. `hadamard.cut`: pieces of ``D`` = 2^k coordinates, the last one filled with zeros;
2. `standardize`: x / M; M is the largest root mean square that any worker's piece has (the
   paper's M is the norm, sqrt(D) times this);
3. `hadamard.rotate`: z = H diag(s) x / (M sqrt(D)), with signs s that all workers share, is nearly
   N(0, 1) or narrower;
4. `quantize`: z, clipped to +-T, rounds stochastically to one of the *nodes*
   q_k = -T + 2 T table[k] / g and becomes the *index* k;
5. `lookup`: the integers W = table[k] in 0..g, which are summed over n workers, in words of
   `lanes`;
6. `dequantize_sum`, `hadamard.unrotate`, `unstandardize`: the mean gradient.

A *table* is an increasing integer array from 0 to its *granularity* g, see `optimal_table`. The
*threshold* T leaves a fraction ``p`` of N(0, 1) to
be clipped, which is the only bias.
"""

import functools
import math
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt, UInt32


def clip_threshold(p: float) -> float:
    """T = Phi^-1(1 - p/2): a fraction ``p`` of N(0, 1), 0 < p < 1, lies outside of +-T."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p}; pass the clipped fraction, above 0 and below 1")
    return -NormalDist().inv_cdf(p / 2)


def _interval_error(a, b) -> np.ndarray:
    """The integral of (b - z)(z - a) phi(z) over a < z < b: what N(0, 1) loses between nodes."""

    def tail(x):  # 1 - Phi(x), exact in relative terms where Phi(x) is nearly 1
        return np.vectorize(math.erfc, otypes=[float])(x / math.sqrt(2)) / 2

    density_a, density_b = (np.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (a, b))
    moment0, moment1 = tail(a) - tail(b), density_a - density_b
    moment2 = moment0 + a * density_a - b * density_b
    return (a + b) * moment1 - moment2 - a * b * moment0


@functools.lru_cache(maxsize=64)
def optimal_table(bits: int, granularity: int, p: float) -> Int[np.ndarray, " levels"]:
    """The symmetric table of least squared error on N(0, 1) among those of ``2**bits`` nodes.

    A dynamic programme over the nodes above zero, their mirror images below: exact, in f64.

    It is read-only. The granularity is 2**bits - 1 or more.
    """
    upper = np.arange(granularity // 2 + 1, granularity + 1)
    nodes = clip_threshold(p) * (2 * upper / granularity - 1)
    i, j = np.triu_indices(upper.size, 1)
    cost = np.full((upper.size, upper.size), np.inf)
    cost[i, j] = _interval_error(nodes[i], nodes[j])
    # best[j]: the error from zero to node j with the nodes chosen so far, of which j is the last.
    best = _interval_error(-nodes, nodes) / 2
    came_from = []
    for _ in range(2 ** (bits - 1) - 1):
        total = best[:, None] + cost
        came_from.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    chosen = [upper.size - 1]
    for previous in reversed(came_from):
        chosen.append(previous[chosen[-1]])
    half = upper[chosen]
    table = np.concatenate([granularity - half, half[::-1]])
    table.setflags(write=False)
    return table


def _to_middle(x) -> Array:
    """The power of two that brings ``x`` where its square and its inverse are normal f32."""
    return jnp.where(x > 2.0**40, 2.0**-80, jnp.where(x < 2.0**-40, 2.0**80, 1.0))


def scale_of(x: Float[Array, "*pieces D"]) -> Float[Array, "*pieces"]:
    """The root mean square of every piece in f32; inf if one of its coordinates is not finite.

    However large they are, finite coordinates have a finite scale. Subnormal ones may count as 0.
    """
    x = x.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    factor = _to_middle(jnp.max(jnp.abs(x), axis=-1))
    scale = jnp.sqrt(jnp.mean((x * factor[..., None]) ** 2, axis=-1)) / factor
    return jnp.where(finite, scale, jnp.inf)


def standardize(
    x: Float[Array, "*pieces D"], scale: Float[Array, "*pieces"]
) -> Float[Array, "*pieces D"]:
    """x / scale; a scale of 0 (all is 0, then) counts as 1."""
    scale = jnp.where(scale == 0, 1.0, scale)
    factor = _to_middle(scale)
    return x * factor[..., None] / (scale * factor)[..., None]


def unstandardize(
    z: Float[Array, "*pieces D"], scale: Float[Array, "*pieces"]
) -> Float[Array, "*pieces D"]:
    """The inverse of `standardize`. A scale that is not finite makes its piece NaN."""
    return z * jnp.where(jnp.isfinite(scale), scale, jnp.nan)[..., None]


def quantize(
    z: Float[Array, "*shape"],
    table: Int[np.ndarray, " levels"],
    threshold: float,
    noise: UInt32[Array, "*shape"],
) -> UInt32[Array, "*shape"]:
    """Stochastic rounding of z, clipped to +-T, to one of the two nodes next to it.

    The expected node is the clipped z, up to f32 rounding. NaN gets some valid index. Returns
    indices into the table. A small word of the noise rounds up.
    """
    granularity = int(table[-1])
    position = jnp.clip(z * (granularity / (2 * threshold)) + granularity / 2, 0, granularity)
    cell = jnp.clip(position.astype(jnp.int32), 0, granularity - 1)
    # Nodes lie on the grid of cells: one look-up per cell finds the interval it belongs to.
    index = np.searchsorted(table, np.arange(granularity), side="right") - 1
    below = jnp.asarray(index, jnp.int32)[cell]
    start = jnp.asarray(table[index], jnp.float32)[cell]
    gap = jnp.asarray(table[index + 1] - table[index], jnp.float32)[cell]
    fraction = (position - start) / gap
    up = (noise >> 8).astype(jnp.float32) < fraction * 2.0**24
    return (below + up.astype(jnp.int32)).astype(jnp.uint32)


def lookup(
    indices: UInt[Array, "*shape"], table: Int[np.ndarray, " levels"]
) -> UInt32[Array, "*shape"]:
    """The integers ``table[indices]`` in 0..g; these are what may be summed."""
    return jnp.asarray(table, jnp.uint32)[indices]


def dequantize_sum(
    total: UInt32[Array, "*shape"], n_workers: int, granularity: int, threshold: float
) -> Float[Array, "*shape"]:
    """The mean z of ``n_workers`` from the sum of their integers: (total/n - g/2) 2T/g, in f32.

    With one worker, the node itself. Sums n g are below 2^31.
    """
    most = n_workers * granularity
    # Centred as an integer first: exact (modulo 2^32), and a sum in the middle decodes to zero.
    centred = (2 * total).astype(jnp.int32) - most
    return centred.astype(jnp.float32) * (threshold / most)
