"""One interpreter of jaxprs, for evaluations (`interpret`) and for analyses (`Flow`).

An evaluation runs a program on values of another kind, such as one worker's slices: its ``rule``
says what an equation makes. An analysis gives every value of a program a *fact*, such as the mesh
axes over which it may vary. `Flow` takes facts into calls, branches, loops and maps, and goes
around loops until nothing changes; a subclass says how facts of two values are joined, and has the
rules of primitives.

The last section has the analyses that several others need: which results of a program are its
arguments, unchanged, and of which inputs values are made.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn, Literal, Var

from dynamiq_jax.core.compat import evaluate_all, inner_jaxprs, name_of, with_constants
from dynamiq_jax.jaxprs.primitives import CALLS, MAP, SAME

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
            # Facts only grow by joining, so this ends.
            after = [self.join(own) for own in zip(carry, made, strict=False)]
            if after == carry:
                return carry, made[len(carry) :]
            carry = after


# --- Inputs of which results are made -------------------------------------------------------------


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
    numbers: set[int] = set()

    def watch(sources: _Numbers) -> None:
        numbers.update(sources if not alone or len(sources) == 1 else ())

    count = len(with_constants(program)[0].invars)
    _Sources(watch, takes, ends)(program, [_Numbers({i}) for i in range(count)])
    return numbers - {DATA}


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
        # A choice between two arguments is neither of them.
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
