"""Hierarchical: fast links inside, slow links outside, each used for what it is good at."""

from dataclasses import dataclass

from dynamiq_jax.topologies.base import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchical:
    """Two levels, for a tuple of axes: the last is the inner one, all others the outer one.

    The inner axis reduce-scatters the gradient, so that each of its workers is left with one slice
    of it; the outer axis all-reduces that slice, compressed; the inner axis gathers the results.
    Only 1/n_inner of the gradient crosses the outer links.

    Attributes:
      inner: how the inner axis scatters and gathers; `None`: natively, for links on which
        compression does not pay, in bf16 (f16 gradients in f16; all in what `BF16` and `F32` are
        named for). A topology compresses there, too, at the cost of two more encodings.
      outer: how the outer axis reduces; `None` chooses `Butterfly` for powers of two, else `Ring`.
    """

    inner: Topology | None = None
    outer: Topology | None = None

    def __post_init__(self):
        """Refuses nested hierarchies and things that are no topology."""
        for name, value in (("inner", self.inner), ("outer", self.outer)):
            if value is not None and (isinstance(value, type) or not hasattr(value, "schedule")):
                raise ValueError(
                    f"{name}={value!r} is not a topology of one level; pass for example dq.Ring()"
                )
