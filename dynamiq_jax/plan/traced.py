"""Reads which plans a traced program (a jaxpr) runs, and how often.

XLA joins small collectives of several plans to one, under one of their names. So which plans run is
read before XLA, from the collectives in their scopes.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dynamiq_jax.core.compat import inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.primitives import MAP, MARK, SUMS, collective_of
from dynamiq_jax.plan.plan import known, scope_of

Sent = collections.Counter[tuple[str, bool]]
"""Bytes that one worker sends, by scope ('': none), and by whether they are floats of 16 bits,
which XLA widens on CPUs."""


def bytes_by_scope(jaxpr: Any) -> Sent:
    """Bytes of the collectives in maps of a program, by the scope in whose name they run.

    A collective in a scan counts as often as the scan's length, and in a loop without a known
    length once. Of branches the costliest counts.
    """

    def walk(jaxpr: Any, sizes: Mapping[str, int], scope: str) -> Sent:
        found: Sent = collections.Counter()
        for equation in with_constants(jaxpr)[0].eqns:
            told = scope_of(str(equation.source_info.name_stack))
            own = scope if told is None else told
            # The mark of a plan of sums by JAX itself, or push kernels, which are no collectives.
            if name_of(equation) == MARK or any(x.pushes for x in known([own]).values()):
                found[own, False] += 0
            if collective_of(name_of(equation)) is not None:
                for atom in equation.invars:
                    dtype = atom.aval.dtype  # type: ignore[attr-defined]
                    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
                    found[own, narrow] += _sent(equation, atom, sizes)  # type: ignore[assignment]
                continue
            inside = sizes
            if name_of(equation) == MAP:
                inside = {**sizes, **equation.params["mesh"].shape}
            parts = [walk(inner, inside, own) for inner in inner_jaxprs(equation)]
            if name_of(equation) == "cond":
                parts = [max(parts, key=lambda part: part.total(), default=collections.Counter())]
            times = equation.params["length"] if name_of(equation) == "scan" else 1
            for part in parts:
                for key, sent in part.items():
                    found[key] += times * sent
        return found

    return walk(jaxpr, {}, "")


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
