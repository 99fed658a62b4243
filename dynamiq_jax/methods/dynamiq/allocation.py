"""How DynamiQ distributes its bits before it has seen any data.

The rule has three parts. At every encoding each super-group gets at least the *floor* of the stage:
the largest width that fits the budget in all stages, or the next larger one in the stages where
this removes most error. The rest of the budget is spread evenly over all stages. There it widens
the super-groups where this removes most squared error (`dynamiq_jax.methods.dynamiq.plan`).

If only the squared error counted, all super-groups with little energy would get the narrowest
width, and their error would be as large as their values. Optimisers that divide by the scale of
each coordinate, such as Adam, then take full steps along this noise: docs/results.md.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import numpy as np

from dynamiq_jax.methods.base import compounded
from dynamiq_jax.topologies import Stage
from pallas_kernels import WireFormat, distortion
from pallas_kernels.format import Levels

Floor = int | Literal["auto"] | None
"""A width; "auto" chooses one for every stage; `None`: squared error alone decides."""

NARROWEST_FLOOR, WIDEST_FLOOR = 2, 14
LARGEST_RELATIVE_ERROR = {False: 0.38, True: 0.124}
"""The limit of the relative error, by whether there is dither, whose noise does not shrink with the
coordinate. Beyond it, training with Adam lost at least 0.5% of validation loss in trainings
of least squared error."""
LARGEST_DITHERED_ERROR = 2.0
"""The limit beyond which dither without a floor had more squared error than no dither: the same on
rings of 32 workers, ten times as much on rings of 64 (docs/algorithm.md, section 7)."""


class Allocation(NamedTuple):
    """Static decisions for all stages of a collective, for any size."""

    fmt: WireFormat
    """The wire format; its widths are those that a tile may have."""
    floors: tuple[int, ...]
    """The smallest width in every stage."""
    held: tuple[int, ...]
    """The width for which every stage's payload has room in all tiles, even in small buckets: the
    floor, or without a floor the largest width that fits the stage's bits."""
    bits: tuple[float, ...]
    """Bits per coordinate of every stage relative to their average over all that is sent."""
    relative_error: float
    """The approximate |error|² / |sum|² of super-groups with the floors' widths, see
    `DynamiQ.relative_error`."""
    lost: float
    """The sum of the squared errors of all encodings at the floors' widths, over the energy of the
    values that workers send; unlike in `relative_error`, no errors cancel."""


class Upgrade(NamedTuple):
    """A step between neighbouring widths on the lower convex hull of (words, distortion)."""

    width: int
    words: int
    gain: float
    """The distortion removed per word, for unit energy; it decreases from upgrade to upgrade."""


def width_upgrades(fmt: WireFormat, floor: int | None = None) -> tuple[int, tuple[Upgrade, ...]]:
    """The narrowest width and the upgrades worth taking, best first.

    Widths above the convex hull (a wider one removes more error per word) are never used. With a
    ``floor`` the upgrades pass through it: first the hull of widths up to it, then the hull of
    widths from it on.
    """
    widths = sorted(fmt.widths)
    if floor is None or floor <= widths[0]:
        return widths[0], _hull(fmt, widths)
    below = _hull(fmt, [w for w in widths if w <= floor])
    return widths[0], below + _hull(fmt, [w for w in widths if w >= floor])


def _hull(fmt: WireFormat, widths: list[int]) -> tuple[Upgrade, ...]:
    """The upgrades along the lower convex hull of (words, distortion), from the first width."""
    words = [fmt.tile_words(w) for w in widths]
    errors = [distortion(fmt, w) for w in widths]
    upgrades, at = [], 0
    while at < len(widths) - 1:
        gains = [
            (errors[at] - errors[to]) / (words[to] - words[at]) for to in range(at + 1, len(widths))
        ]
        to = at + 1 + int(np.argmax(gains))  # gains[0] is that of the step to at + 1
        if gains[to - at - 1] <= 0:
            break
        upgrades.append(Upgrade(widths[to], words[to] - words[at], max(gains)))
        at = to
    return tuple(upgrades)


@functools.lru_cache(maxsize=256)
def allocate(
    stages: tuple[Stage, ...],
    fmt: WireFormat,
    *,
    bits: float,
    widths: tuple[int, ...] | None,
    floor: Floor,
    balance: float | None,
) -> Allocation:
    """Floors, widths and bits of all stages, for ``bits`` per coordinate of payloads on average.

    Without ``widths`` a tile may get the floors, one below them, and even widths above.
    """
    step = 2 if floor is None else 1  # a floor may have any width
    candidates = widths or tuple(range(NARROWEST_FLOOR, widest_floor(fmt.levels) + 1, step))
    every = dataclasses.replace(fmt, widths=candidates)
    if floor == "auto" and balance is None:
        floors = _joint_floors(stages, every, bits)
        offsets = _less_average(stages, [every.bits_per_coord(w) for w in floors])
    else:
        offsets = stage_bits(stages, balance)
        if floor == "auto":
            floors = tuple(_widest_within(every, bits + offset) for offset in offsets)
        else:
            floors = (min(candidates) if floor is None else floor,) * len(stages)
    if widths is None and floor is not None:
        every = dataclasses.replace(fmt, widths=_widths_around(floors, fmt.levels))
    held = floors
    if floor != "auto":
        within = (_widest_within(every, bits + offset) for offset in offsets)
        held = tuple(map(max, floors, within))
    errors = [s.error * distortion(every, w) for s, w in zip(stages, floors, strict=True)]
    # `Stage.error` halves all stages but the sinks', which twice the sum counts once too often.
    lost = 2 * sum(errors) - errors[-1]
    return Allocation(every, floors, held, offsets, compounded(errors), lost)


def stage_bits(stages: tuple[Stage, ...], balance: float | None) -> tuple[float, ...]:
    """Bits per coordinate of every stage relative to their average over all that is sent.

    With errors that fall as ``2^(-a bits)``, the sum of ``error_i 2^(-a bits_i)`` is least for a
    given sum of ``sent_i bits_i`` if ``bits_i`` is the logarithm of ``error_i / sent_i`` over a,
    but for a constant. Where super-groups differ as gradients' do, a is 2 at high rates and 2 to 3
    at three to six bits.
    """
    if balance is None:
        return _less_average(stages, [math.log2(s.error / s.sent) / 2.5 for s in stages])
    return _less_average(stages, [balance] * (len(stages) - 1) + [0.0])


def _less_average(stages: tuple[Stage, ...], bits: list[float]) -> tuple[float, ...]:
    """Bits less their average over all payloads that are sent."""
    total = sum(stage.sent for stage in stages)
    average = sum(b * stage.sent for b, stage in zip(bits, stages, strict=True)) / total
    return tuple(b - average for b in bits)


def widest_floor(levels: Levels) -> int:
    """The largest width that is chosen automatically."""
    return 10 if levels == "geometric" else WIDEST_FLOOR


def _widths_around(floors: tuple[int, ...], levels: Levels) -> tuple[int, ...]:
    """From one width below the floors to the widest floor, then even ones to 10 or 4 bits above."""
    least, most = min(floors), max(floors)
    floor_widths = range(max(least - 1, min(least, NARROWEST_FLOOR)), most + 1)
    above = range(most + 2 - most % 2, min(max(10, most + 4), widest_floor(levels)) + 1, 2)
    return (*floor_widths, *above)


def _widest_within(fmt: WireFormat, bits: float) -> int:
    """The largest width on the hull that takes at most this many bits per coordinate."""
    narrowest, upgrades = width_upgrades(fmt)
    fitting = (u.width for u in upgrades if fmt.bits_per_coord(u.width) <= bits + 1e-9)
    return max([narrowest, *fitting])


def _joint_floors(stages: tuple[Stage, ...], fmt: WireFormat, bits: float) -> tuple[int, ...]:
    """The largest width for all stages, and the next larger one where it removes most error."""
    narrowest, upgrades = width_upgrades(fmt)
    widths = (narrowest, *(u.width for u in upgrades))
    common = _widest_within(fmt, bits)
    floors = [common] * len(stages)
    if common == widths[-1]:
        return tuple(floors)
    wider = widths[widths.index(common) + 1]
    step = fmt.bits_per_coord(wider) - fmt.bits_per_coord(common)
    # ``left`` is in bits per coordinate times payloads, of which stage i sends ``sent``.
    left = (bits - fmt.bits_per_coord(common)) * sum(stage.sent for stage in stages)
    for i in sorted(range(len(stages)), key=lambda i: -stages[i].error / stages[i].sent):
        if stages[i].sent * step <= left:
            floors[i] = wider
            left -= stages[i].sent * step
    return tuple(floors)
