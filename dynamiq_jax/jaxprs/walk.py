"""One interpreter of jaxprs, for evaluations (`interpret`) and for analyses (`Flow`).

An evaluation runs a program on values of another kind, such as one worker's slices: its ``rule``
says what an equation makes. An analysis gives every value of a program a *fact*, such as the mesh
axes over which it may vary. `Flow` takes facts into calls, branches, loops and maps, and goes
around loops until nothing changes; a subclass says how facts of two values are joined, and has the
rules of primitives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn, Literal

from dynamiq_jax.core.compat import inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.primitives import CALLS, MAP

Value = TypeVar("Value")


def interpret(
    program: Any,
    args: Sequence[Value],
    rule: Callable[[JaxprEqn, list[Value]], Sequence[Value]],
    *,
    literal: Callable[[Literal], Value],
    constant: Callable[[Any], Value],
) -> list[Value]:
    """The results of a program, equation by equation.

    Args:
      program: a jaxpr, with or without the values of its constants.
      args: the values of its inputs.
      rule: gets an equation and the values of its operands, and returns those of its results.
      literal: gives the value of a number that stands in an equation.
      constant: gives the value of an array that the program closes over.
    """
    jaxpr, constants = with_constants(program)
    closed = constants or [None] * len(jaxpr.constvars)  # an analysis needs no values
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, closed), strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Value:
        return literal(atom) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        made = rule(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def within(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation, and all equations inside of it."""
    yield equation
    for program in inner_jaxprs(equation):
        yield from equations_of(program)


def equations_of(program: Any) -> Iterator[JaxprEqn]:
    """The equations of a program, each followed by all equations inside of it."""
    for equation in with_constants(program)[0].eqns:
        yield from within(equation)


class ScanParts(NamedTuple):
    """How many operands of a scan are constants, and how many are carried; rows come last.

    Results are what is carried, then rows. Versions of JAX say the numbers differently, so they are
    counted: a row has one dimension less in the loop.
    """

    constants: int
    carried: int


def scan_parts(equation: JaxprEqn) -> ScanParts:
    """The parts of a scan."""
    body, _ = with_constants(inner_jaxprs(equation)[0])
    rank = lambda x: len(x.aval.shape)
    same = lambda whole, own: sum(map(lambda x, y: rank(x) == rank(y), whole, own))
    carried = same(equation.outvars, body.outvars)
    return ScanParts(same(equation.invars, body.invars) - carried, carried)


class Flow(Generic[Value]):
    """An analysis: the facts of a program's results, from those of its arguments."""

    nothing: ClassVar[Any] = None
    """The fact of numbers that stand in equations."""
    closed: ClassVar[Any] = None
    """The fact of arrays that programs close over."""

    def join(self, facts: Sequence[Value]) -> Value:
        """The fact of a value that is one of several, or that is made of all of them."""
        raise NotImplementedError

    def made(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The facts of the results of an equation that is no call, loop, branch or map."""
        return [self.join(operands)] * len(equation.outvars)

    def chosen(self, facts: list[Value], choice: Value) -> list[Value]:
        """The facts of values that a branch's index, or a loop's condition, has chosen."""
        return facts

    def row(self, scan: JaxprEqn, fact: Value) -> Value:
        """The fact of one row, which a scan takes, of an array."""
        return fact

    def rows(self, scan: JaxprEqn, fact: Value) -> Value:
        """The fact of an array of the rows that a scan makes."""
        return fact

    def mapped(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The facts of the results of a map."""
        return self(equation.params["jaxpr"], operands)

    def __call__(self, program: Any, args: Sequence[Value]) -> list[Value]:
        """The facts of a program's results."""
        facts = {"literal": lambda _: self.nothing, "constant": lambda _: self.closed}
        return interpret(program, args, self.after, **facts)

    def after(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """The facts of one equation's results."""
        name, programs = name_of(equation), inner_jaxprs(equation)
        if name in CALLS and programs:
            return self(programs[0], operands)
        if name == "cond":
            index, *given = operands
            found = zip(*(self(program, given) for program in programs), strict=True)
            return self.chosen([self.join(own) for own in found], index)
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation.params, operands)
        if name == MAP:
            return self.mapped(equation, operands)
        return self.made(equation, operands)

    def _scan(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        parts, (body,) = scan_parts(equation), inner_jaxprs(equation)
        last = parts.constants + parts.carried
        constants, rows = (
            operands[: parts.constants],
            [self.row(equation, x) for x in operands[last:]],
        )
        step = lambda carry: self(body, [*constants, *carry, *rows])
        carry, made = self.settled(step, operands[parts.constants : last])
        return [*carry, *(self.rows(equation, x) for x in made)]

    def _while(self, params: dict[str, Any], operands: list[Value]) -> list[Value]:
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def step(carry: list[Value]) -> list[Value]:
            (goes_on,) = self(params["cond_jaxpr"], [*operands[:first], *carry])
            made = self(params["body_jaxpr"], [*operands[first:last], *carry])
            return self.chosen(made, goes_on)

        return self.settled(step, operands[last:])[0]

    def settled(
        self, step: Callable[[list[Value]], list[Value]], carry: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """The values that a loop carries once another ``step`` adds nothing, and its rows."""
        while True:
            made = step(carry)
            after = [self.join(own) for own in zip(carry, made, strict=False)]
            if after == carry:
                return carry, made[len(carry) :]
            carry = after
