"""Reads which plans a traced program (a jaxpr) runs, and how often.

XLA joins small collectives of several plans to one, under one of their names. So which plans run is
read before XLA, from the collectives in their scopes.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dynamiq_jax.core.compat import inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.primitives import (
    ELEMENTWISE,
    FILLS,
    MAP,
    MARK,
    SUMS,
    VIEWS,
    collective_of,
)
from dynamiq_jax.jaxprs.walk import Flow
from dynamiq_jax.plan.plan import known, scope_of

Sent = collections.Counter[tuple[str, bool]]
"""Bytes that one worker sends, by scope ('': none), and by whether they are floats of 16 bits,
which XLA widens on CPUs."""


def bytes_by_scope(jaxpr: Any) -> tuple[Sent, Sent]:
    """Bytes of the collectives in maps of a program, by the scope in whose name they run.

    A collective in a scan counts as often as the scan's length, and in a loop without a known
    length once. Of branches the costliest counts. The second counter has the part of them that XLA
    folds.
    """
    folds = _Numbers.operands_of(jaxpr)

    def walk(jaxpr: Any, sizes: Mapping[str, int], scope: str, path: Path) -> collections.Counter:
        found = collections.Counter()
        for equation in with_constants(jaxpr)[0].eqns:
            told = scope_of(str(equation.source_info.name_stack))
            own, here = scope if told is None else told, (*path, id(equation))
            # The mark of a plan of sums by JAX itself, or push kernels, which are no collectives.
            if name_of(equation) == MARK or any(x.pushes for x in known([own]).values()):
                found[own, False, False] += 0
            if collective_of(name_of(equation)) is not None:
                for number, atom in enumerate(equation.invars):
                    dtype = atom.aval.dtype  # type: ignore[attr-defined]
                    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
                    folded = folds.get((here, number), False)
                    found[own, narrow, folded] += _sent(equation, atom, sizes)  # type: ignore[assignment]
                continue
            inside = sizes
            if name_of(equation) == MAP:
                inside = {**sizes, **equation.params["mesh"].shape}
            parts = [walk(inner, inside, own, here) for inner in inner_jaxprs(equation)]
            if name_of(equation) == "cond":
                parts = [max(parts, key=lambda part: part.total(), default=collections.Counter())]
            times = equation.params["length"] if name_of(equation) == "scan" else 1
            for part in parts:
                for key, sent in part.items():
                    found[key] += times * sent
        return found

    asked: Sent = collections.Counter()
    folded: Sent = collections.Counter()
    for (scope, narrow, folds_it), sent in walk(jaxpr, {}, "", ()).items():
        asked[scope, narrow] += sent
        folded[scope, narrow] += folds_it * sent
    return asked, folded


Path = tuple[int, ...]
"""The identities of equations, each inside of the one before it: programs may run twice."""


class _Numbers(Flow[bool]):
    """Whether an array is one number, the same on all workers: a constant, such as zeros.

    XLA computes what a collective makes of such arrays, and sends nothing. JAX makes zeros for
    gradients of parameters that nothing uses.
    """

    nothing, closed = True, False

    def __init__(self):
        self.path: Path = ()
        self.found: dict[tuple[Path, int], bool] = {}

    @classmethod
    def operands_of(cls, jaxpr: Any) -> dict[tuple[Path, int], bool]:
        """Whether XLA folds an operand of a collective: by the equation's path, and number."""
        flow = cls()
        flow(jaxpr, [False] * len(with_constants(jaxpr)[0].invars))
        return flow.found

    def join(self, facts: Sequence[bool]) -> bool:
        """See `Flow`."""
        return all(facts)

    def after(self, equation: JaxprEqn, operands: list[bool]) -> list[bool]:
        """See `Flow`."""
        around, self.path = self.path, (*self.path, id(equation))
        found = super().after(equation, operands)
        self.path = around
        return found

    def made(self, equation: JaxprEqn, operands: list[bool]) -> list[bool]:
        """See `Flow`."""
        name = name_of(equation)
        if collective_of(name) in FOLDED:
            for number, fact in enumerate(operands):
                # A loop is gone around until facts stay; the last ones hold for all turns.
                self.found[self.path, number] = fact
            return operands
        known = bool(operands) and all(operands) and name in FILLS | ELEMENTWISE | VIEWS
        return [known] * len(equation.outvars)


FOLDED = SUMS | {"all_gather", "reduce_scatter"}
"""Collectives that XLA folds if their operands are one number; exchanges and permutes travel."""


def _sent(equation: JaxprEqn, atom: Any, sizes: Mapping[str, int]) -> float:
    """Bytes that one worker sends of an operand of a collective."""
    kind, params = collective_of(name_of(equation)), equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes.get(axis, 1) for axis in axes)
    given = atom.aval.size * atom.aval.dtype.itemsize
    if kind == "ppermute":
        moves = [pair for pair in params["perm"] if pair[0] != pair[1]]
        return given * len(moves) / max(n, 1)
    if kind == "all_gather":
        return (n - 1) * given
    return (2 if kind in SUMS else 1) * given * (n - 1) / max(n, 1)
