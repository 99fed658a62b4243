"""Parts of a program that take whole matrices, such as Muon's, where arrays are split.

An optimizer may compute something from a whole matrix, such as a product. `owned` finds these
*parts* in a program whose other equations are elementwise. Parts that compute the same from
different matrices form a group, and `run_group` gives every worker a share of their matrices:
slices travel to the owner by an all-to-all, the owner runs the part, and slices of its results
travel back.

A stack of matrices, as scanned layers have, is many matrices if the program treats them alike; see
`rows`. Else its owner takes all of it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import (
    constant_of,
    evaluate,
    evaluate_all,
    inner_jaxprs,
    name_of,
    with_constants,
)
from dynamiq_jax.jaxprs import rows
from dynamiq_jax.jaxprs.constraints import Recorded
from dynamiq_jax.jaxprs.primitives import CALLS, ELEMENTWISE, KEPT, PRODUCTS
from dynamiq_jax.jaxprs.walk import interpret, within
from dynamiq_jax.tree.leaves import Padding, axes_of, split_of

MOST = 4
"""Arrays that a part is given. One that takes more mixes matrices, as a norm of all of them does,
and a single owner would run it."""


@dataclasses.dataclass(eq=False)
class Part:
    """Equations that one owner runs on whole arrays."""

    equations: list[JaxprEqn] = dataclasses.field(default_factory=list)
    given: dict[Var, P] = dataclasses.field(default_factory=dict)
    """Arrays that are split, and how; the owner gets them whole."""
    results: dict[Var, P] = dataclasses.field(default_factory=dict)
    """Values that the rest of the program takes, and how they are split there."""

    @property
    def shared(self) -> list[Var]:
        """Values that all workers have."""
        made = {*self.given, *(v for e in self.equations for v in e.outvars)}
        read = (v for e in self.equations for v in e.invars if isinstance(v, Var))
        return [v for v in dict.fromkeys(read) if v not in made]

    @functools.cached_property
    def program(self) -> Any:
        """The part as a program of ``given`` and ``shared``."""
        inputs = [*self.given, *self.shared]
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]  # type: ignore
        run = lambda *xs: evaluate_all(
            self.equations, dict(zip(inputs, xs, strict=True)), list(self.results)
        )
        return jax.make_jaxpr(run)(*types)

    @property
    def is_of_a_matrix(self) -> bool:
        """Whether it has products, and takes one matrix, its momentum and the like."""
        # One shape: with several matrices the part mixes them.
        shapes = {v.aval.shape for v in self.given}  # type: ignore[attr-defined]
        products = (name_of(e) in PRODUCTS for own in self.equations for e in within(own))
        return len(shapes) == 1 and len(self.given) <= MOST and any(products)

    @functools.cached_property
    def stacked(self) -> int | None:
        """The number of matrices in a stack that the part treats alike; `None`: it is no stack."""
        shapes = {(v.aval.shape[:1], len(v.aval.shape) > 2) for v in (*self.given, *self.results)}  # type: ignore
        if len(shapes) > 1 or not all(long for _, long in shapes):
            return None
        ((count,), _), *_ = shapes
        return count if rows.treats_alike(self.program, len(self.given)) else None


class Owners(NamedTuple):
    """The workers that may own matrices, inside of a map."""

    axis: Axis
    exact: bool
    """Whether f32 travels as it is, else as bf16."""


class Schedule(NamedTuple):
    """A program in an order in which it can run."""

    program: Any
    steps: list[JaxprEqn | list[Part]]
    """Equations of the program, and groups of parts of one kind."""


def flat(closed: Any) -> Any:
    """A program without calls and branches; all branches run, and the index chooses."""

    def rule(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name, programs = name_of(equation), inner_jaxprs(equation)
        if name in CALLS and programs:
            return run(programs[0], operands)
        if name == "cond" and not equation.effects:
            index, *given = operands
            ways = zip(*(run(program, given) for program in programs), strict=True)
            return [lax.select_n(index, *xs) for xs in ways]
        return evaluate(equation, *operands)

    def run(program: Any, args: Sequence[Any]) -> list[Any]:
        return interpret(program, args, rule, literal=constant_of, constant=lambda x: x)

    kinds: list[Any] = [v.aval for v in with_constants(closed)[0].invars]
    # Weak types too, or the program would promote otherwise.
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in kinds]
    return jax.make_jaxpr(lambda *args: run(closed, args))(*types)


def owned(
    closed: Any, specs: Sequence[P], result_specs: Sequence[P], axis: Axis
) -> Schedule | None:
    """How the workers of ``axis`` run a program of matrices, from how they split its arrays.

    `None`: it needs a value of an owner elsewhere than
    in an array that is split, or other axes split a matrix.
    """
    program = flat(closed)
    finder = _Finder(axis)
    if not finder.take(program, specs, result_specs):
        return None
    steps = finder.ordered(program)
    return None if steps is None else Schedule(program, steps)


class _Finder:
    """Finds parts, equation by equation."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.split: dict[Var, P] = {}
        """Arrays of which workers have slices."""
        self.owner: dict[Var, Part] = {}
        """Values of a part, and the part."""
        self.makers: dict[Var, JaxprEqn] = {}
        """The elementwise equations that make arrays in ``split``."""
        self.origins: dict[Var, frozenset[Var]] = {}
        """The arrays that these are made of, themselves included."""

    def take(self, program: Any, specs: Sequence[P], result_specs: Sequence[P]) -> bool:
        """Whether owners and slices can run the program."""
        jaxpr, _ = with_constants(program)
        pairs = zip(jaxpr.invars, specs, strict=True)
        self.split = {v: spec for v, spec in pairs if axes_of(spec)}
        self.origins = {v: frozenset({v}) for v in self.split}
        for equation in jaxpr.eqns:
            if not self._equation(equation):
                return False
        pairs = zip(jaxpr.outvars, result_specs, strict=True)
        for v, spec in pairs:
            if isinstance(v, Var) and v in self.owner:
                if not self._fits(v, spec):
                    return False
                self.owner[v].results[v] = spec
        for part in self.parts:
            self._with_makers(part)
        return all(part.is_of_a_matrix for part in self.parts)

    @property
    def parts(self) -> list[Part]:
        """The parts, in the order of their first equations."""
        return list(dict.fromkeys(self.owner.values()))

    def _equation(self, equation: JaxprEqn) -> bool:
        operands = dict.fromkeys(v for v in equation.invars if isinstance(v, Var))
        owned = [v for v in operands if v in self.owner]
        split = [v for v in operands if v in self.split]
        elementwise = name_of(equation) in ELEMENTWISE or name_of(equation) in KEPT
        if not owned and (elementwise or not split):
            if split:
                self._elementwise(equation, split)
            return True
        parts = dict.fromkeys(self.owner[v] for v in owned)
        origins = frozenset().union(*(self.origins[v] for part in parts for v in part.given))
        outside = [v for v in split if v not in origins]
        # A matrix from elsewhere, as the parameter that an update is added to: results go back to
        # slices first.
        if elementwise and outside:
            spec = self.split[outside[0]]
            if all(self._fits(v, spec) for v in owned):
                for v in owned:
                    self.owner[v].results[v] = spec
                self._elementwise(equation, outside)
                return True
        # Matrices travel over this axis alone, and an effect would happen on one worker.
        if equation.effects or not all(self._is_ours(self.split[v]) for v in split):
            return False
        part = self._joined(list(parts))
        part.given |= {v: self.split[v] for v in split}
        part.equations.append(equation)
        self.owner |= dict.fromkeys(equation.outvars, part)
        return True

    def _elementwise(self, equation: JaxprEqn, split: list[Var]) -> None:
        """Notes an equation that slices run."""
        origins = frozenset().union(*(self.origins[v] for v in split))
        for v in equation.outvars:
            self.split[v], self.makers[v] = self.split[split[0]], equation
            self.origins[v] = origins | {v}

    def _joined(self, parts: list[Part]) -> Part:
        """One part in the place of several."""
        if len(parts) == 1:
            return parts[0]
        part = Part()
        for own in parts:
            part.equations += own.equations
            part.given |= own.given
            part.results |= own.results
        self.owner |= {v: part for v, own in self.owner.items() if own in parts}
        return part

    def _with_makers(self, part: Part) -> None:
        """Lets the owner compute what it is given from other things that it is given."""
        # What an owner can compute from what it has need not travel.
        for v in [v for v in self.split if v in part.given][::-1]:  # what is made of others first
            others = {*part.given} - {v}
            equation = self.makers.get(v)
            if equation is None or v in part.results:
                continue
            operands = {x for x in equation.invars if x in self.split or x in self.owner}
            if operands <= others and others:
                part.equations.insert(0, equation)
                del part.given[v]

    def _is_ours(self, spec: P) -> bool:
        """Whether the workers, and no other axes, split an array."""
        return [names for _, names in split_of(spec, tuple(axes_of(spec)))] == [self.axis.names]

    def _fits(self, variable: Var, spec: P) -> bool:
        """Whether slices of an owner's value can travel to all workers."""
        given = self.owner[variable].given.items()
        like = {v.aval.shape for v, own in given if own == spec}  # type: ignore[attr-defined]
        # Results travel like one of the matrices that came, with the same padding.
        return self._is_ours(spec) and variable.aval.shape in like  # type: ignore[attr-defined]

    def ordered(self, program: Any) -> list[JaxprEqn | list[Part]] | None:
        """The steps of the program; `None` if parts need results of each other."""
        jaxpr, _ = with_constants(program)
        # By identity: equations that look alike are different steps.
        inside = {id(e) for part in self.parts for e in part.equations}
        known = {*jaxpr.invars, *jaxpr.constvars}
        waiting = [e for e in jaxpr.eqns if id(e) not in inside]
        parts, steps, alike = self.parts, [], _Alike(jaxpr)
        while waiting or parts:
            later = []
            for equation in waiting:
                ready = all(isinstance(v, Literal) or v in known for v in equation.invars)
                (steps if ready else later).append(equation)
                known |= {*equation.outvars} if ready else set()
            ready = [part for part in parts if known.issuperset([*part.given, *part.shared])]
            # Neither a part nor an equation can run: parts wait for each other.
            if not ready and len(later) == len(waiting):
                return None
            groups: dict[Any, list[Part]] = {}
            for part in ready:
                # A group has one exchange, which shares its matrices out evenly.
                groups.setdefault(alike(part), []).append(part)
                known |= {*part.results}
            steps += groups.values()
            waiting, parts = later, [part for part in parts if part not in ready]
        return steps


class _Alike:
    """Tells which parts belong to one group."""

    def __init__(self, jaxpr: Any) -> None:
        self.makers = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
        self.numbers: dict[Any, int] = {}
        """A number for every value; values that are computed alike have the same."""

    def __call__(self, part: Part) -> tuple[Any, ...]:
        """Parts with equal results compute the same from their matrices, which are split alike."""
        shared = (self._number(v) for v in part.shared)
        # Programs of equal text do the same; their constants are inputs.
        return str(part.program), *part.given.values(), *part.results.values(), *shared

    def _number(self, value: Any) -> int:
        if isinstance(value, Literal):
            return self._numbered(str(value))
        if value not in self.makers:
            return self._numbered(value)
        equation, place = self.makers[value]
        operands = map(self._number, equation.invars)
        return self._numbered((name_of(equation), str(equation.params), place, *operands))

    def _numbered(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


# --- Running a group ------------------------------------------------------------------------------


def run_group(
    group: Sequence[Part],
    given: Sequence[Sequence[Array]],
    shared: Sequence[Array],
    owners: Owners,
) -> list[list[Array]]:
    """Slices of the results of every part.

    Args:
      group: parts of one kind.
      given: for each part, this worker's slices of what it is given.
      shared: the values that all workers have; they are the same for all parts.
      owners: the workers.
    """
    first, axis = group[0], owners.axis
    # Stacks have a dimension of matrices already.
    join = jnp.concatenate if first.stacked else jnp.stack
    arrays = *first.given.items(), *first.results.items()
    moves = [_Move(v, spec, owners, first.stacked) for v, spec in arrays]
    n_given = len(first.given)
    joined = [join(xs) for xs in zip(*given, strict=True)]
    # Not strict: the moves of results follow.
    whole = [move.to_owner(x) for move, x in zip(moves, joined, strict=False)]
    if first.stacked:
        found = rows.run(first.program, whole, shared, axis)
    else:
        structure = jax.tree.structure([0] * len(first.results))
        run = Recorded(first.program, structure, axis).run
        found = jax.vmap(lambda *xs: run(*xs, *shared))(*whole)
    pairs = zip(moves[n_given:], found, strict=True)
    results = [move.from_owner(x, len(joined[0])) for move, x in pairs]
    apart = [jnp.split(x, len(group)) if first.stacked else list(x) for x in results]
    return [list(own) for own in zip(*apart, strict=True)]


class _Move(NamedTuple):
    """How matrices of one kind get to their owners, and back."""

    variable: Var
    spec: P
    owners: Owners
    stacked: int | None

    @property
    def dimension(self) -> int:
        """The dimension of joined matrices that is split."""
        ((dimension, _),) = split_of(self.spec, self.owners.axis.names)
        return dimension if self.stacked else dimension + 1

    @property
    def padding(self) -> Padding:
        """The zeros at the end of this dimension."""
        shape = self.variable.aval.shape  # type: ignore[attr-defined]
        ((dimension, _),) = split_of(self.spec, self.owners.axis.names)
        return Padding(dimension - len(shape), -shape[dimension] % self.owners.axis.size)

    def to_owner(self, x: Array) -> Array:
        """A share of whole matrices, from this worker's slices of all of them."""
        if not self.dimension:  # a slice of a stack has whole matrices
            return x
        # Each owner gets as many matrices as others; the last ones may be zeros.
        x = Padding(-x.ndim, -len(x) % self.owners.axis.size).padded(x)
        return self.padding.cut(self._travels(x, 0, self.dimension))

    def from_owner(self, x: Array, count: int) -> Array:
        """This worker's slices of all ``count`` results, from a share of whole ones."""
        if not self.dimension:
            return x
        return self._travels(self.padding.padded(x), self.dimension, 0)[:count]

    def _travels(self, x: Array, apart: int, together: int) -> Array:
        wire = x if self.owners.exact else x.astype(jnp.bfloat16)
        found = lax.all_to_all(wire, self.owners.axis.names, apart, together, tiled=True)
        return found.astype(x.dtype)
