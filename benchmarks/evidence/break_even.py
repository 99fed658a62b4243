"""Break-even by rate: steps of 1.1 B parameters by ways, modelled for any link, measured on five.

A step takes the computation, the kernels, and the bytes that it sends at a rate. The model's lower
end hides the exchange under all of the computation, its upper end under none. The computation is
the measured step without an exchange. The kernels are what the measured step over NVLink takes
beyond the computation and its bytes at NVLink's rate, which is that of bf16 psum there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("results")
RATES = 10, 12.5, 25, 50, 100, 200, 400
"""Gb/s of each GPU."""
MEASURED = {
    10: ("10 Gb/s", "2 × H200"),
    12.5: ("25 Gb/s", "2 hosts × 2 H200"),  # which share a NIC
    25: ("25 Gb/s", "2 × H200"),
}
"""Columns of steps by the rate of each GPU."""
NEAR = {"host memory": ("host memory", "2 × H200"), "NVLink": ("NVLink", "2 × H200")}
"""Columns whose rate is that of their bf16 psum."""
WAYS = {
    "bf16 psum": ("bf16-psum",),
    "5 bits": ("auto:5", "psum:5", "dp:5"),
    "sharded, 5 + 2.5": ("zero:5/2.5", "zero-dear:5/2.5"),
}
"""Ways by their names in `ways.py`: the first that was measured counts."""
BITS = {"bf16 psum": 32, "5 bits": 10, "sharded, 5 + 2.5": 7.5}
"""Bits of a coordinate on its way to the owner of its slice and back."""
INSIDE = {"bf16 psum": 0, "5 bits": 32, "sharded, 5 + 2.5": 18.5}
"""Bits inside of a host: gradients in bf16, finished sums too, differences at 2.5 bits. NCCL's
ring sends beside what goes between hosts."""

Column = Mapping[str, Sequence[float]]


class Sizes(NamedTuple):
    """Hosts, and GPUs in each of them."""

    hosts: int
    gpus: int


def first(column: Column, way: str) -> float | None:
    """The median ms of the first of a way's names that was measured."""
    return next((column[name][0] for name in WAYS[way] if name in column), None)


class Model:
    """The model, from the columns of `steps.json`."""

    def __init__(self, steps: Any):
        self.columns = {(run["links"], run["cards"]): run["ms"] for run in steps["runs"]}
        self.gbit = steps["parameters"] / 1e9
        nvlink = self.columns[NEAR["NVLink"]]
        self.compute_ms = nvlink["none"][0]
        self.near = {name: self._rate_of(self.columns[place]) for name, place in NEAR.items()}
        self.kernels_ms = {}
        for way in WAYS:
            wire_ms = self.wire_ms(way, self.near["NVLink"])
            self.kernels_ms[way] = (first(nvlink, way) or 0.0) - self.compute_ms - wire_ms

    def _rate_of(self, column: Column) -> float:
        gbit = self.gbit_sent("bf16 psum", Sizes(2, 1))
        return 1e3 * gbit / (column["bf16-psum"][0] - column["none"][0])

    def gbit_sent(self, way: str, sizes: Sizes) -> float:
        """Gigabits a GPU sends to other hosts: ours slices of its own, bf16 psum in a ring."""
        hosts, gpus = sizes
        n = hosts * gpus if way == "bf16 psum" else hosts
        return BITS[way] * self.gbit * (n - 1) / n / gpus

    def wire_ms(self, way: str, rate: float, sizes: Sizes = Sizes(2, 1)) -> float:  # noqa: B008
        """Milliseconds of all bytes, where each GPU has ``rate`` to other hosts."""
        inside = INSIDE[way] * self.gbit * (sizes.gpus - 1) / sizes.gpus
        extra = inside / self.near["NVLink"] if inside else 0.0
        return 1e3 * (self.gbit_sent(way, sizes) / rate + extra)

    def step_ms(self, way: str, rate: float, sizes: Sizes) -> tuple[float, float]:
        """The ends of the model: all hidden under the computation, and nothing hidden."""
        exchange = self.kernels_ms[way] + self.wire_ms(way, rate, sizes)
        return max(self.compute_ms, exchange), self.compute_ms + exchange

    def break_even(self, batches: int = 1) -> tuple[float, float]:
        """Gb/s from which bf16 psum takes less time than sharded updates, with so many batches.

        First where only bf16's exchange hides, then where neither does.
        """
        ours, psum = "sharded, 5 + 2.5", "bf16 psum"
        more = 1e3 * (self.gbit_sent(psum, Sizes(2, 1)) - self.gbit_sent(ours, Sizes(2, 1)))
        kernels = self.kernels_ms[ours]
        return more / (batches * self.compute_ms + kernels), more / kernels


GROUPS = {"": Sizes(2, 1), ", 2 × 2": Sizes(2, 2)}
"""Two hosts of one GPU, and two hosts of two."""


def lines(steps: Any) -> list[list[str]]:
    """The head and the rows of the table."""
    model = Model(steps)
    head = ["Gb/s", "", *(f"{way}{group}" for group in GROUPS for way in WAYS)]
    found = [head]
    named = {rate: f"{rate:g}" for rate in RATES}
    named |= {rate: f"{rate:,.0f}, {name}" for name, rate in model.near.items()}
    places = MEASURED | {model.near[name]: place for name, place in NEAR.items()}
    for rate in sorted(named):
        groups = [GROUPS[""]] if rate in model.near.values() else [*GROUPS.values()]
        ends = [model.step_ms(way, rate, sizes) for sizes in groups for way in WAYS]
        found.append([named[rate], "model", *(f"{low:,.0f}–{high:,.0f}" for low, high in ends)])
        if place := places.get(rate):
            told = [first(model.columns[place], way) for way in WAYS]
            own = ["" if ms is None else f"{ms:,.0f}" for ms in told]
            found.append(["", "measured", *[""] * len(WAYS) * ("hosts" in place[1]), *own])
    return [row + [""] * (len(head) - len(row)) for row in found]


def sentence(steps: Any) -> str:
    """Where bf16 wins."""
    model = Model(steps)
    hides, open_ = model.break_even()
    longer, _ = model.break_even(batches=2)
    return (
        f"**bf16 psum wins from {hides:,.0f} Gb/s per GPU on** ({longer:,.0f} with twice the "
        "tokens) if its exchange hides under the computation and that of sharded updates does not; "
        f"if nothing hides, from {open_:,.0f}."
    )
