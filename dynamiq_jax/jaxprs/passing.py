"""Which results of a traced program are its arguments, unchanged, and what others are made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from dynamiq_jax.core.compat import evaluate_all, inner_jaxprs, name_of, with_constants


def used_inputs(program: Any) -> set[int]:
    """The numbers of the inputs that an equation takes or a result is."""
    jaxpr, _ = with_constants(program)
    used = {x for equation in jaxpr.eqns for x in equation.invars if isinstance(x, Var)}
    used |= {x for x in jaxpr.outvars if isinstance(x, Var)}
    return {i for i, x in enumerate(jaxpr.invars) if x in used}


class Evaluable(NamedTuple):
    """The part of a program that some of its results are made of."""

    program: Any
    equations: list[JaxprEqn]
    results: list[Any]
    needed: set[Any]

    def takes(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, of all of the program, that this part takes."""
        jaxpr, _ = with_constants(self.program)
        return [x for own, x in zip(jaxpr.invars, inputs, strict=True) if own in self.needed]

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results for the inputs of the program."""
        jaxpr, constants = with_constants(self.program)
        taken = [x for x in jaxpr.invars if x in self.needed], self.takes(inputs)
        known = zip((*jaxpr.constvars, *taken[0]), (*constants, *taken[1]), strict=True)
        return evaluate_all(self.equations, dict(known), self.results)


def evaluable(program: Any, count: int) -> Evaluable:
    """The part of a program that its last ``count`` results are made of."""
    jaxpr, _ = with_constants(program)
    results = jaxpr.outvars[len(jaxpr.outvars) - count :]
    needed, kept = {x for x in results if isinstance(x, Var)}, []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed |= {x for x in equation.invars if isinstance(x, Var)}
    return Evaluable(program, kept[::-1], results, needed)


_SAME_VALUE = {"pcast", "pvary", "copy", "copy_p", "optimization_barrier", "assume_invarying"}
"""Primitives whose result number i has the value of operand number i."""


def passed_arguments(program: Any) -> list[int | None]:
    """For every result of a jaxpr, the number of the argument that it is, or `None`.

    Calls, such as `jax.checkpoint` and `jax.jit`, loops and branches are looked through.
    """
    jaxpr, _ = with_constants(program)
    known: dict[Any, int] = {x: number for number, x in enumerate(jaxpr.invars)}

    def number_of(x: Any) -> int | None:
        return known.get(x) if isinstance(x, Var) else None

    for equation in jaxpr.eqns:
        for result, operand in zip(equation.outvars, _operands(equation), strict=True):
            number = None if operand is None else number_of(equation.invars[operand])
            if number is not None:
                known[result] = number
    return [number_of(x) for x in jaxpr.outvars]


def _operands(equation: JaxprEqn) -> list[int | None]:
    """For every result of an equation, the number of the operand that it is, or `None`."""
    name, options, inner = name_of(equation), equation.params, inner_jaxprs(equation)
    unknown: list[int | None] = [None] * len(equation.outvars)
    if name in _SAME_VALUE:
        return [*range(len(equation.outvars))]
    if not inner:
        return unknown
    if name == "while":
        # Operands: the condition's constants, the body's constants, the carry. The body does not
        # get the first of these, and its results are the carry.
        own = passed_arguments(options["body_jaxpr"])
        body, _ = with_constants(options["body_jaxpr"])
        first, before = len(body.invars) - len(own), len(equation.invars) - len(body.invars)
        return [before + first + i if x == first + i else None for i, x in enumerate(own)]
    if name == "cond":
        branches = zip(*map(passed_arguments, inner), strict=True)
        # Operand 0 is the number of the branch.
        return [1 + x[0] if x[0] is not None and {*x} == {x[0]} else None for x in branches]
    if len(inner) > 1:
        return unknown
    own, (jaxpr, _) = passed_arguments(inner[0]), with_constants(inner[0])
    if (len(jaxpr.invars), len(own)) != (len(equation.invars), len(unknown)):
        return unknown
    if name == "scan":
        # Operands: constants, the carry, then arrays of which every iteration takes one row. The
        # results are the carry, then arrays of rows. Rows have one dimension less in the loop.
        rows = len(jaxpr.invars) - _n_rows(equation.invars, jaxpr.invars)
        carry = len(own) - _n_rows(equation.outvars, jaxpr.outvars)
        first = rows - carry
        return [
            x if x is not None and (x == first + i if i < carry else x >= rows) else None
            for i, x in enumerate(own)
        ]
    if name == "shard_map":
        before, after = options["in_specs"], options["out_specs"]
        return [x if x is not None and before[x] == after[i] else None for i, x in enumerate(own)]
    return own


def _n_rows(whole: Sequence[Any], rows: Sequence[Any]) -> int:
    """The number of arrays of which a scan's body takes one row."""
    return sum(x.aval.ndim > y.aval.ndim for x, y in zip(whole, rows, strict=True))
