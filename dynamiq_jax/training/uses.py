"""Losses on Explicit meshes, use by use: what JAX has no rule for reads a plain copy.

A large parameter is typed as reduced, so that JAX leaves its gradient unreduced. JAX has rules for
some uses of such a value, as in matrix products, and none for others, as in products with examples
coordinate by coordinate. `per_use` runs the jaxpr of a loss that was traced with plain parameters,
with two twins of each parameter:

* the *typed* twin goes through equations of `RULES`, loops, branches and checkpoints, as far as JAX
  takes it;
* the *plain* twin serves all other equations. JAX sums its gradient, exactly.

Each equation that needs a plain operand computes it from plain twins, along the same equations. So
the gradient of a parameter is the sum of its twins' gradients, and only the uses without a rule
travel uncompressed. A use that sees no examples, as a penalty, needs no traffic at all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.compat import (
    REFUSALS,
    evaluate,
    inner_jaxprs,
    name_of,
    with_constants,
)
from dynamiq_jax.tree.placement import axes_of

RULES = frozenset(
    "broadcast_in_dim convert_element_type copy dot_general dynamic_slice expand_dims gather "
    "reshape slice squeeze transpose".split()
)
"""Primitives that JAX may take typed values in, forwards and backwards."""

INLINED = frozenset("jit pjit closed_call core_call".split())
"""Primitives that run the program in their parameters once, and mean nothing else."""

SMALL = 4096
"""Coordinates of a gradient that JAX may sum without a word."""


@dataclasses.dataclass
class Value:
    """A value of the program, or the twins of one that follows from parameters alone."""

    typed: Array | None
    plain: Callable[[], Any]
    """The value without a type, made when it is first wanted."""
    leaves: frozenset[int] = frozenset()
    """The parameters that it follows from."""
    data: bool = True
    """Whether it also follows from examples."""


@dataclasses.dataclass
class Uses:
    """What a run has found: plain twins that were wanted, and gradients that JAX sums."""

    wanted: set[int] = dataclasses.field(default_factory=set)
    """The numbers of parameters whose plain twin served."""
    typed: set[int] = dataclasses.field(default_factory=set)
    """Those whose typed twin met examples."""
    native: dict[int, str] = dataclasses.field(default_factory=dict)
    """By parameter: the first primitive that joins it with examples and has no rule."""


def value_of(x: Any, data: bool = True) -> Value:
    """A value that is no parameter."""
    return Value(None, lambda: x, data=data)


def parameter(typed: Array | None, plain: Array, number: int, uses: Uses) -> Value:
    """The twins of a parameter; ``uses`` learns when the plain one is wanted."""

    def wanted() -> Array:
        uses.wanted.add(number)
        return plain

    return Value(typed, wanted, frozenset((number,)), False)


def per_use(closed: Any, values: Sequence[Value], uses: Uses) -> list[Value]:
    """Runs a jaxpr."""
    jaxpr, constants = with_constants(closed)
    known: dict[Any, Value] = {}
    for variable, x in zip(jaxpr.constvars, constants, strict=True):
        known[variable] = value_of(x, isinstance(x, Tracer))
    known.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Value:
        return value_of(atom.val, False) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        made = _equation(equation, [read(atom) for atom in equation.invars], uses)
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(equation: JaxprEqn, operands: list[Value], uses: Uses) -> list[Value]:
    """The results of one equation."""
    name, count = name_of(equation), len(equation.outvars)
    if name in INLINED:
        return per_use(inner_jaxprs(equation)[0], operands, uses)
    leaves = frozenset().union(*(x.leaves for x in operands))
    data = any(x.data for x in operands)
    typed = None
    if any(x.typed is not None for x in operands):
        typed = _typed(equation, name, operands, uses)
    if typed is not None and data and name not in _RUNNERS:
        uses.typed.update(*(x.leaves for x in operands if x.typed is not None))

    @functools.cache
    def plainly() -> list[Any]:
        for x, variable in zip(operands, equation.invars, strict=True):
            large = variable.aval.size >= SMALL  # type: ignore[attr-defined]
            if data and large and x.leaves and not x.data:
                for leaf in x.leaves:
                    uses.native.setdefault(leaf, name)
        return list(evaluate(equation, *(x.plain() for x in operands)))

    if data:
        made = plainly() if typed is None else typed
        return [Value(None, functools.partial(_same, x), leaves) for x in made]
    twins = [None] * count if typed is None else typed
    plain = [functools.partial(_at, plainly, i) for i in range(count)]
    return [Value(x, own, leaves, False) for x, own in zip(twins, plain, strict=True)]


def _same(x: Any) -> Any:
    return x


def _at(made: Callable[[], list[Any]], place: int) -> Any:
    return made()[place]


def _typed(equation: JaxprEqn, name: str, operands: list[Value], uses: Uses) -> list[Any] | None:
    """The results for typed operands; `None` where JAX does not take them."""
    before = {*uses.wanted}, {*uses.typed}, dict(uses.native)
    try:
        if name in _RUNNERS:
            return _RUNNERS[name](equation, operands, uses)
        if name == "reshard":
            return _resharded(equation, operands[0])
        if name == "dot_general" and not _splits_terms(equation, operands):
            return None
        if name in RULES:
            twins = (x.plain() if x.typed is None else x.typed for x in operands)
            return list(evaluate(equation, *twins))
    except REFUSALS:
        uses.wanted, uses.typed, uses.native = before
    return None


def _splits_terms(equation: JaxprEqn, operands: list[Value]) -> bool:
    """Whether a product of a typed value has terms: the other operand is split over its axes.

    Otherwise all workers compute the same, and the derivative cannot be unreduced. Flash attention
    by cuDNN has such results, whose type does not say how they are split.
    """
    typed = next(x.typed for x in operands if x.typed is not None)
    reduced = jax.typeof(typed).sharding.spec.reduced
    split = [
        axes_of(P(*jax.typeof(x.plain()).sharding.spec.partitions))
        for x in operands
        if x.typed is None
    ]
    return not reduced or any(reduced <= axes for axes in split)


def _resharded(equation: JaxprEqn, operand: Value) -> list[Any] | None:
    """A typed value that the loss reshards; it stays typed if nothing splits the result."""
    assert operand.typed is not None
    target, reduced = (
        equation.params["dst_sharding"],
        jax.typeof(operand.typed).sharding.spec.reduced,
    )
    if any(entry is not None for entry in target.spec.partitions):
        return None
    kept = P(*target.spec.partitions, reduced=reduced)
    return [jax.reshard(operand.typed, NamedSharding(target.mesh, kept))]


# --- Loops, branches and checkpoints --------------------------------------------------------------


class _NotPassedError(Exception):
    """An inner program wants a plain twin that it does not have."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class _Inner(NamedTuple):
    """What an inner program takes: which twins of which operands, in this order."""

    operands: Sequence[Value]
    wanted: frozenset[int]
    """The operands whose plain twin goes in beside the typed one."""
    uses: Uses

    @property
    def twins(self) -> list[tuple[int, bool]]:
        """(number of the operand, whether it is the typed twin)."""
        found = []
        for i, x in enumerate(self.operands):
            found += [(i, True)] if x.typed is not None else []
            found += [(i, False)] if x.typed is None or i in self.wanted else []
        return found

    @property
    def arrays(self) -> list[Any]:
        """The arrays that go in."""
        operands = self.operands
        return [operands[i].typed if typed else operands[i].plain() for i, typed in self.twins]

    def values(self, arrays: Sequence[Any]) -> list[Value]:
        """The values of the operands inside, from the arrays that went in."""
        given = dict(zip(self.twins, arrays, strict=True))
        return [
            Value(
                given.get((i, True)),
                functools.partial(self._plain, given, i),
                frozenset((i,)) if x.leaves else frozenset(),
                x.data,
            )
            for i, x in enumerate(self.operands)
        ]

    def _plain(self, given: dict[tuple[int, bool], Any], number: int) -> Any:
        if (number, False) not in given:
            raise _NotPassedError(number)
        return given[number, False]


def _run_inner(
    operands: Sequence[Value], uses: Uses, run: Callable[[_Inner], list[Any]]
) -> list[Any]:
    """Runs an inner program; traces it again with one more plain twin when it wants one."""
    wanted: set[int] = set()
    while True:
        inner = _Inner(operands, frozenset(wanted), Uses())
        try:
            found = run(inner)
        except _NotPassedError as error:
            if error.number in wanted:
                raise
            wanted.add(error.number)
            continue
        for number, name in inner.uses.native.items():
            for leaf in operands[number].leaves:
                uses.native.setdefault(leaf, name)
        uses.typed.update(*(operands[number].leaves for number in inner.uses.typed))
        return found


def _checkpoint(equation: JaxprEqn, operands: list[Value], uses: Uses) -> list[Any]:
    params = equation.params

    def run(inner: _Inner) -> list[Any]:
        def body(*arrays: Any) -> list[Any]:
            found = per_use(params["jaxpr"], inner.values(arrays), inner.uses)
            return [x.plain() for x in found]

        options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
        return jax.checkpoint(body, **options)(*inner.arrays)

    return _run_inner(operands, uses, run)


def _scan(equation: JaxprEqn, operands: list[Value], uses: Uses) -> list[Any]:
    params = equation.params
    body_of = with_constants(params["jaxpr"])[0]
    # Rows and stacked results have one dimension more outside of the body; carries come first of
    # the results, and constants first of the operands.
    rank = lambda variable: len(variable.aval.shape)
    pairs = zip(equation.invars, body_of.invars, strict=True)
    n_rows = sum(rank(outer) > rank(own) for outer, own in pairs)
    pairs = zip(equation.outvars, body_of.outvars, strict=True)
    n_carry = sum(rank(outer) == rank(own) for outer, own in pairs)
    n_consts = len(operands) - n_rows - n_carry
    # What a loop carries is plain: its type would have to be that of the first carry.
    carries = [x.plain() for x in operands[n_consts : n_consts + n_carry]]
    others = [*operands[:n_consts], *operands[n_consts + n_carry :]]

    def run(inner: _Inner) -> list[Any]:
        twins, arrays = inner.twins, inner.arrays
        is_row = [i >= n_consts for i, _ in twins]  # consts come first, then arrays of rows
        rows = [x for x, row in zip(arrays, is_row, strict=True) if row]

        def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            own = iter(row)
            given = [next(own) if r else x for x, r in zip(arrays, is_row, strict=True)]
            values = inner.values(given)
            values[n_consts:n_consts] = map(value_of, carry)
            found = [x.plain() for x in per_use(params["jaxpr"], values, inner.uses)]
            return found[:n_carry], found[n_carry:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, made = lax.scan(body, carries, rows, **options)
        return [*carry, *made]

    return _run_inner(others, uses, run)


def _cond(equation: JaxprEqn, operands: list[Value], uses: Uses) -> list[Any]:
    index = operands[0].plain()

    def run(inner: _Inner) -> list[Any]:
        def branch(closed: Any) -> Callable[..., list[Any]]:
            def taken(*arrays: Any) -> list[Any]:
                found = per_use(closed, inner.values(arrays), inner.uses)
                return [x.plain() for x in found]

            return taken

        return lax.switch(index, [*map(branch, equation.params["branches"])], *inner.arrays)

    return _run_inner(operands[1:], uses, run)


_RUNNERS: dict[str, Callable[[JaxprEqn, list[Value], Uses], list[Any]]] = {
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
}
