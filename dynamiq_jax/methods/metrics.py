"""How far an estimate is from the exact sum, and what a reduction knows about its error."""

import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import inlined

_LARGER = 62
"""The exponent of two by which small coordinates are scaled before they are squared."""


class Metrics(NamedTuple):
    """The effect of one `dynamiq_jax.reduce` on a tree: f32 scalars, the same on all workers."""

    vnmse: Float[Array, ""] | float
    """Expected |error|² / |sum|² of the compressed leaves, from the plan's widths and energies: for
    Gaussian coordinates, and gradients that are independent between workers until their sum is
    encoded. |sum|² is |result|² minus the expected |error|². It was 0.8 to 1.6 times the true value
    at 2.5 to 5 bits (docs/algorithm.md, section 3). It is infinite if the expected |error|² is all
    of |result|², and 0 if the result is zero. It is NaN if the method does not know its error, if
    ``norm`` is NaN or the root mean square of a bucket's coordinates is below 2e-19, whose squares
    f32 does not hold, and with `Hierarchical(inner=...)`, whose inner encodings are not known."""
    norm: Float[Array, ""] | float
    """|result|² of the compressed leaves, over finite values; NaN if f32 does not hold it: above
    3e38, and below 1e-38 if the result is not zero."""
    nonfinite: Float[Array, ""] | float
    """The number of coordinates of compressed leaves whose result is NaN or infinite."""
    widths: Float[Array, " 17"]
    """The fraction of the payloads' coordinates that has width 0 to 16; zeros without widths. For a
    hierarchy, on its outer axes."""
    bits_per_coord: Float[Array, ""] | float
    """Bits per coordinate of all leaves, in units in which bf16 takes 16."""
    wire_bytes: Float[Array, ""] | float
    """The number of bytes that one worker sends."""


class Reduced(NamedTuple):
    """The result of `dynamiq_jax.reduce`."""

    tree: Any
    """The sums or means."""
    state: Any
    """The state for the next step; `None` without a state."""
    metrics: Metrics | None
    """The metrics; `None` without ``metrics=True``."""


class PayloadFacts(NamedTuple):
    """Facts about the payloads of one all-reduce; the same on all workers."""

    error: Float[Array, ""] | float = math.nan
    """Expected |value - exact|², f32; NaN if the method does not know it."""
    coords_by_width: Float[Array, " 17"] | float = 0.0
    """The number of coordinates that one worker sends at widths 0 to 16, f32; 0 without widths."""


class BucketMetrics(NamedTuple):
    """The metrics of one bucket; those of several buckets add up."""

    facts: PayloadFacts
    norm: Float[Array, ""] | float
    """|result|² over finite values, f32."""
    nonfinite: Float[Array, ""] | float
    """The number of coordinates, f32."""


def bucket_metrics(value: Float[Array, " d"], facts: PayloadFacts) -> BucketMetrics:
    """Adds one pass over the result to the facts of the method."""
    norm, nonfinite = finite_norm(value), jnp.sum(~jnp.isfinite(value), dtype=jnp.float32)
    # Squares that f32 cannot hold, and results of which nothing is finite, have no norm.
    zero = jnp.all(value == 0)
    norm = jnp.where((norm > 0) & (norm < jnp.inf) | zero, norm, jnp.nan)
    # Methods tell errors by energies of coordinates, of which f32 loses some if they are smaller.
    held = (norm >= value.size * 2.0 ** (-2 * _LARGER)) | zero
    error = jnp.where(held, jnp.asarray(facts.error, jnp.float32), jnp.nan)
    return BucketMetrics(facts._replace(error=error), norm, nonfinite)


def of_all_parts(own: BucketMetrics, axes: Collection[str]) -> BucketMetrics:
    """The metrics of a bucket that is split over mesh axes, from the metrics of each device."""
    if not axes:
        return own
    parts = Axis(tuple(sorted(axes)))
    own = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), own)
    return parts.psum(parts.to_varying(own))


def finite_norm(x: Float[Array, "*shape"]) -> Float[Array, ""]:
    """|x|² over finite values, in f32; also if it is near the smallest number of f32."""
    finite = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)
    # In one pass; a power of two changes no bits of a sum that f32 holds.
    norm, larger = _squared(finite), _squared(finite * 2.0**_LARGER)
    return jnp.where(norm < 2.0**-_LARGER, larger * 2.0 ** (-2 * _LARGER), norm)


def summarise(buckets: list[BucketMetrics], *, bits_per_coord: float, wire_bytes: float) -> Metrics:
    """The metrics of a tree from those of its buckets."""
    nothing = BucketMetrics(PayloadFacts(error=0.0), 0.0, 0.0)
    facts, norm, nonfinite = jax.tree.map(lambda *parts: sum(parts), nothing, *buckets)
    widths = jnp.broadcast_to(jnp.asarray(facts.coords_by_width, jnp.float32), (17,))
    norm, error = jnp.asarray(norm, jnp.float32), jnp.asarray(facts.error, jnp.float32)
    # Errors are unbiased, so that |result|² is expected to be |sum|² + |error|²; NaN stays NaN.
    relative = jnp.where(error >= norm, jnp.inf, error / (norm - error))
    found = Metrics(
        vnmse=jnp.where(norm == 0, 0.0, relative),
        norm=norm,
        nonfinite=nonfinite,
        widths=widths / jnp.maximum(jnp.sum(widths), 1.0),
        bits_per_coord=bits_per_coord,
        wire_bytes=wire_bytes,
    )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)


@inlined  # outside of programs its operations would be compiled one by one
def vnmse(estimate, exact) -> Float[Array, ""]:
    """Vector-normalised mean squared error: |estimate - exact|² / |exact|² over a whole pytree.

    Both trees have the same structure; arithmetic is f32. It is zero for two zero trees, infinite
    if only ``exact`` is zero, and otherwise does not depend on the scale of the trees (unitless).
    """
    unit = _unit(exact)
    scaled = lambda x: jnp.asarray(x, jnp.float32) * unit
    difference = jax.tree.map(lambda a, b: scaled(a) - scaled(b), estimate, exact)
    error, norm = _squared(difference), _squared(jax.tree.map(scaled, exact))
    return jnp.where(error == 0, 0.0, error / norm)


def worst_leaf_error(estimate, exact, *, min_size: int = 0) -> Float[Array, ""]:
    """The largest relative error of a leaf: |estimate - exact|² / |exact|² of single leaves.

    It predicts the training loss better than `vnmse`: Adam takes equal steps in all coordinates, so
    noise harms a leaf with little energy as much as a leaf with much energy, but hardly changes
    `vnmse`.

    Both trees have the same structure and shapes; arithmetic is f32. A leaf whose exact values are
    all zero has no relative error and is ignored: the error of a nonzero estimate would be infinite
    and hide all other leaves. The result is zero if all leaves are ignored (unitless).

    Leaves with fewer than ``min_size`` coordinates are ignored: `psum` sums leaves below its
    method's ``min_leaf_size`` exactly.
    """
    errors = jax.tree.leaves(jax.tree.map(vnmse, estimate, exact))
    counted = (
        jnp.where(jnp.all(jnp.asarray(leaf, jnp.float32) == 0), 0.0, error)
        for error, leaf in zip(errors, jax.tree.leaves(exact), strict=True)
        if jnp.size(leaf) >= min_size
    )
    return functools.reduce(jnp.maximum, counted, jnp.float32(0))


def _unit(tree) -> Float[Array, ""]:
    """A power of two by which the largest value of a tree is about 1, f32; 1 for a zero tree."""
    sizes = [
        jnp.max(jnp.abs(jnp.asarray(x, jnp.float32)), initial=0.0) for x in jax.tree.leaves(tree)
    ]
    _, exponent = jnp.frexp(functools.reduce(jnp.maximum, sizes, jnp.float32(0)))
    return jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, -125, 125))


def _squared(tree) -> Float[Array, ""]:
    """|tree|², in f32."""
    return sum(
        (jnp.sum(jnp.square(jnp.asarray(x, jnp.float32))) for x in jax.tree.leaves(tree)),
        start=jnp.float32(0),
    )
