"""Which results of a traced program are its arguments, unchanged, and what others are made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from dynamiq_jax.core.compat import evaluate_all, inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.primitives import SAME
from dynamiq_jax.jaxprs.walk import Flow

Takes = Callable[[JaxprEqn], Sequence[Any]]
"""(equation) -> operands of it that matter."""


def used_inputs(program: Any) -> set[int]:
    """The numbers of the inputs that an equation takes or a result is."""
    jaxpr, _ = with_constants(program)
    used = {x for equation in jaxpr.eqns for x in equation.invars if isinstance(x, Var)}
    used |= {x for x in jaxpr.outvars if isinstance(x, Var)}
    return {i for i, x in enumerate(jaxpr.invars) if x in used}


DATA = -1
"""The number of all values in a program that are not its inputs."""

_Numbers = frozenset[int]


class _Sources(Flow[_Numbers]):
    """The numbers of the inputs of which a value is made; see `inputs_of`."""

    nothing, closed = _Numbers(), _Numbers({DATA})

    def __init__(self, watch: Callable[[_Numbers], None], takes: Takes, ends: str):
        self.watch, self.takes, self.ends, self.settles = watch, takes, ends, False

    def join(self, facts: Sequence[_Numbers]) -> _Numbers:
        """See `Flow`."""
        return _Numbers().union(*facts)

    def after(self, equation: JaxprEqn, operands: list[_Numbers]) -> list[_Numbers]:
        """See `Flow`."""
        taken = self.takes(equation) if not self.settles else ()
        for atom, sources in zip(equation.invars, operands, strict=True):
            if any(atom is x for x in taken):
                self.watch(sources)
        return super().after(equation, operands)

    def made(self, equation: JaxprEqn, operands: list[_Numbers]) -> list[_Numbers]:
        """See `Flow`; unknown programs get the last operands."""
        for program in inner_jaxprs(equation):
            count = len(with_constants(program)[0].invars)
            self(program, [*[self.nothing] * (count - len(operands)), *operands][-count:])
        ends = name_of(equation) == self.ends
        return [self.closed if ends else self.join(operands)] * len(equation.outvars)

    def settled(
        self, step: Callable[[list[_Numbers]], list[_Numbers]], carry: list[_Numbers]
    ) -> tuple[list[_Numbers], list[_Numbers]]:
        """See `Flow`; operands in a loop are seen when all that they are made of is known."""
        before, self.settles = self.settles, True
        found = super().settled(step, carry)
        self.settles = before
        step(found[0])
        return found


def inputs_of(program: Any, takes: Takes, *, alone: bool = False, ends: str = "") -> set[int]:
    """The numbers of a program's inputs of which those operands are made that ``takes`` returns.

    If ``alone``, operands count that are made of one input, and of nothing else in the program. The
    results of the primitive ``ends`` count as data.
    """
    found: set[int] = set()

    def watch(sources: _Numbers) -> None:
        found.update(sources if not alone or len(sources) == 1 else ())

    count = len(with_constants(program)[0].invars)
    _Sources(watch, takes, ends)(program, [_Numbers({i}) for i in range(count)])
    return found - {DATA}


def inputs_behind(program: Any, ends: str) -> set[int]:
    """The numbers of a program's inputs of which its results are made past the primitive ``ends``.

    An input counts if one of its ways to a result has no such primitive.
    """
    count = len(with_constants(program)[0].invars)
    flow = _Sources(lambda _: None, lambda _: (), ends)
    return {*flow.join(flow(program, [_Numbers({i}) for i in range(count)]))} - {DATA}


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


class _Row(NamedTuple):
    """One row of an argument, or of rows."""

    of: "_Argument"
    scan: int
    """The `id` of the scan that takes it."""


_Argument = int | _Row | None


class _Passed(Flow[_Argument]):
    """Which argument a value is; `None`: none of them."""

    def join(self, facts: Sequence[_Argument]) -> _Argument:
        """See `Flow`."""
        return facts[0] if len({*facts}) == 1 else None

    def made(self, equation: JaxprEqn, operands: list[_Argument]) -> list[_Argument]:
        """See `Flow`."""
        return operands if name_of(equation) in SAME else [None] * len(equation.outvars)

    def row(self, scan: JaxprEqn, fact: _Argument) -> _Argument:
        """See `Flow`."""
        return None if fact is None else _Row(fact, id(scan))

    def rows(self, scan: JaxprEqn, fact: _Argument) -> _Argument:
        """See `Flow`; a row of another scan is the same in each turn of this one."""
        return fact.of if isinstance(fact, _Row) and fact.scan == id(scan) else None

    def mapped(self, equation: JaxprEqn, operands: list[_Argument]) -> list[_Argument]:
        """See `Flow`; a value that a map takes apart must be put together as it was."""
        before, after = equation.params["in_specs"], equation.params["out_specs"]
        pairs = zip(self(equation.params["jaxpr"], range(len(before))), after, strict=True)
        return [operands[x] if isinstance(x, int) and before[x] == y else None for x, y in pairs]


def passed_arguments(program: Any) -> list[int | None]:
    """For every result of a jaxpr, the number of the argument that it is, or `None`.

    Calls, such as `jax.checkpoint` and `jax.jit`, loops and branches are looked through.
    """
    found = _Passed()(program, range(len(with_constants(program)[0].invars)))
    return [x if isinstance(x, int) else None for x in found]
