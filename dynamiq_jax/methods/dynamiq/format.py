"""Options of DynamiQ's wire format."""

from dataclasses import dataclass

from dynamiq_jax.core.checks import Options, check_fields
from dynamiq_jax.methods.base import check_choice
from dynamiq_jax.tree.leaves import ScaleAxis
from pallas_kernels.format import GroupScale, Levels


@dataclass(frozen=True, kw_only=True, slots=True)
class Format(Options):
    """How coordinates share scales, widths and means, and which levels codes represent.

        method = dq.DynamiQ(format=dq.Format(levels="piecewise"))

    Attributes:
      group_size: the number of coordinates that share a scale: 8, 16, 32 or 64.
      super_group_size: the number of coordinates that share a width and statistics: 128, 256, 512
        or 1024.
      levels: "companded" (steps of 1, 2, 4 and 8 from zero outwards, so that small coordinates of a
        group have smaller errors, which matters for Adam), "piecewise" (steps of 1 and 2: the
        smallest squared error), "geometric" (the paper's law; widths up to 10) or "uniform".
        Default: "companded", or "piecewise" with dither.
      group_scale: "uint8" fractions of a bf16 super-group scale, or "bf16" for each group.
      scale_axis: the axis of leaves along which neighbours share scales and widths: an integer, or
        "auto", the axis whose size is most common among the matrices of the tree; in a transformer
        this is the residual stream (if sizes are equally common, the last axis; axes shorter than
        64, such as layers and heads, are ignored). In `all_gather` leaves are the shards that are
        gathered. `None`: the last axis, which needs no transposition. Gradients vary along tokens
        and neurons much more than along the residual stream.
      subtract_mean: whether the mean of each super-group is sent separately, as in the paper. It
        takes 1/16 bit, and pays for gradients whose means hold more than a tenth of the energy.
    """

    group_size: int = 32
    super_group_size: int = 256
    levels: Levels | None = None
    group_scale: GroupScale = "uint8"
    scale_axis: ScaleAxis = None
    subtract_mean: bool = False

    def __post_init__(self):
        """Checks every field; errors name the value, what is allowed and what to pass."""
        check_fields(self)
        check_choice("group_size", self.group_size, (8, 16, 32, 64))
        check_choice("super_group_size", self.super_group_size, (128, 256, 512, 1024))
        if self.super_group_size // self.group_size < 4:
            raise ValueError(
                f"super_group_size={self.super_group_size} holds fewer than 4 groups of "
                f"group_size={self.group_size}; pass group_size <= {self.super_group_size // 4}"
            )
