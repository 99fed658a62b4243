"""`few_bits`: sharded updates at 5.75 bits, for links that are the bound."""

from dynamiq_jax.compression.compression import Policy
from dynamiq_jax.methods import DynamiQ, Format


def few_bits() -> Policy:
    """A policy of `sharded` with 5.75 bits in all, the fewest near the loss of exact means.

        optimizer = dq.optax.sharded(adamw, "data", compression=dq.optax.few_bits())

    Gradients have 3.5 bits per coordinate, rounded to the nearest level. The owner of a slice adds
    each worker's gradient once, and keeps the sum in f32. Differences of parameters have 2.25 bits
    with dither: 64 coordinates share a scale. What a difference loses is in the next one. Scales
    follow the residual stream in both (``scale_axis="auto"``). docs/results.md has losses.

    Do not take it for `psum`, which would round sums at every hop, always to the same side, or for
    `fsdp`, which sends parameters instead of differences.

    Returns:
      A `Policy` with `DynamiQ` methods as ``gradients`` and ``parameters``.
    """
    wide = Format(group_size=64, super_group_size=512, scale_axis="auto")
    return Policy(
        gradients=DynamiQ(bits=3.5, rounding="nearest", format=Format(scale_axis="auto")),
        parameters=DynamiQ(bits=2.25, dither=True, format=wide),
    )
