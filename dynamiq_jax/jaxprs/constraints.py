"""Losses for `jax.jit` that JAX refuses under a map over the data axes.

Such a loss may constrain how its arrays are sharded, also over data axes. Or a loop of it may start
from a constant, which is typed as the same on all workers, and carry on with values of a worker's
own examples. So this loss is traced outside of the map (`record`), where the axes are automatic. It
becomes equations, which then run inside of the map (`Recorded.run`): the map's axes are removed
from constraints, and all values are typed as varying. No part of JAX is replaced.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import (
    constant_of,
    evaluate_here,
    inner_jaxprs,
    name_of,
    varying_axes,
    with_constants,
)
from dynamiq_jax.jaxprs.primitives import (
    CUSTOM,
    JITS,
    MAP,
    REDUCTIONS,
    SAME,
    SUMS,
    collective_of,
)
from dynamiq_jax.jaxprs.walk import Flow, equations_of, interpret, within

REMEDY = "call dq.with_sharding_constraint in the place of JAX's function of this name"

_Axes = frozenset[str]
_ONE = _Axes()

_gathered: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "dynamiq_jax_gathered_axes", default=frozenset()
)


@contextlib.contextmanager
def gathered_over(names: Collection[str]) -> Iterator[None]:
    """In this context, `with_sharding_constraint` forgets Explicit axes, in this thread alone."""
    token = _gathered.set(frozenset(names))
    try:
        yield
    finally:
        _gathered.reset(token)


def with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """`jax.lax.with_sharding_constraint` for a loss that `value_and_grad` may map over workers.

    It removes the axes of the surrounding map from each spec, and keeps the others. A spec without
    axes has no effect. In a loss on Explicit axes, where constraints are assertions, a spec that
    names a data axis has no effect: the loss takes gathered parameters. Elsewhere the function does
    the same as JAX's.

    Args:
      x: a pytree of arrays, of any shapes and dtypes.
      shardings: a `PartitionSpec` or `NamedSharding` for all leaves, or a tree of these that is a
        prefix of ``x``. `None` does not constrain its part of ``x``.

    Returns:
      ``x``, constrained.

    Raises:
      ValueError: a spec does not fit its array or the mesh.
    """
    mesh = get_abstract_mesh()
    # Over these axes arrays of the loss are whole, or one worker's part.
    names = {*mesh.manual_axes, *(_gathered.get() & {*mesh.explicit_axes})}

    def is_leaf(s: Any) -> bool:
        return s is None or isinstance(s, P | jax.sharding.Sharding)

    def one(sharding: Any, part: Any) -> Any:
        if sharding is None:
            return part
        # Other shardings name no axes to forget.
        if not names or not isinstance(sharding, P | NamedSharding):
            return jax.lax.with_sharding_constraint(part, sharding)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        return jax.tree.map(lambda x: _constrain(x, spec, names), part)

    return jax.tree.map(one, shardings, x, is_leaf=is_leaf)


def _constrain(x: Array, spec: P, names: Collection[str]) -> Array:
    """Constrains an array by a spec that forgets these axes."""
    mesh = get_abstract_mesh()
    own = P(*(_without(entry, names) for entry in spec))
    # On Explicit axes a constraint is an assertion, which a shortened spec would fail. On Auto axes
    # an empty one would ask for copies on all devices.
    if own != spec and (AxisType.Explicit in mesh.axis_types or not any(own)):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, own))


def _without(entry: Any, names: Collection[str]) -> Any:
    """One entry of a PartitionSpec over the other axes."""
    if entry is None or entry is P.UNCONSTRAINED:
        return entry
    if isinstance(entry, str):
        return None if entry in names else entry
    return tuple(name for name in entry if name not in names) or None


# --- Programs that were traced outside of the map -------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A function that was traced where no axis is manual, and runs under a map over an axis."""

    closed: Any
    structure: Any
    axis: Axis

    @property
    def constants(self) -> Sequence[Any]:
        """The arrays that the function closes over."""
        return with_constants(self.closed)[1]

    def run(self, *args: Any) -> Any:
        """The results for one worker's arguments, typed as varying."""
        leaves = self.axis.to_varying(jax.tree.leaves(args))
        return self.structure.unflatten(_replay(self.closed, self.axis, leaves))

    def varying(self, *args: Any, choices: bool = True) -> Any:
        """The axes of the map over which each result may vary, from the axes of all arguments.

        A result that depends only on collectives' results, constants and arguments without axes is
        the same on all workers. Without ``choices`` it also may depend on them in which branch is
        taken, and in how often a loop runs, as for JAX's types.
        """
        return self.structure.unflatten(_Varying(choices)(self.closed, jax.tree.leaves(args)))


def record(
    function: Callable[..., Any],
    args: Any,
    mesh: Mesh | AbstractMesh,
    axis: Axis,
    manual: Sequence[str],
) -> Recorded:
    """Traces ``function(*args)`` of one worker outside of all maps.

    Args:
      function: a function of trees of arrays. It may use the names of the axis.
      args: trees of arrays or their types, of one worker's shapes.
      mesh: the mesh whose axes of the map are Auto.
      axis: the axes over which values are typed as varying.
      manual: all axes of the map; the others have one device.
    """
    traces: list[tuple[Any, Any]] = []

    def trace(numbers: Any) -> Any:
        traces.append(jax.make_jaxpr(function, return_shape=True)(*args))
        return numbers

    for name in manual:  # gives the names to collectives in the function
        trace = jax.vmap(trace, axis_name=name, axis_size=mesh.shape[name])
    numbers = jax.ShapeDtypeStruct(tuple(mesh.shape[name] for name in manual[::-1]), "int32")
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    unset = get_abstract_mesh().empty
    try:
        with jax.sharding.use_abstract_mesh(abstract):
            jax.eval_shape(trace, numbers)
    except Exception:
        # Flax constrains boxed parameters where a mesh is set, at times by specs that do not fit.
        if unset:
            with contextlib.suppress(Exception):
                jax.eval_shape(trace, numbers)
        if not traces:
            raise
    (closed, shapes), *_ = traces
    return Recorded(closed, jax.tree.structure(shapes), axis)


def lowers_otherwise(program: Any) -> bool:
    """Whether JAX may refuse a program only when it lowers it, where no error can be caught.

    It traces the programs of a linear solve again then, for the types of its operands. Under a map
    these may vary over axes over which the inputs of the programs do not, and a cast to varying in
    them fails.
    """
    return any(
        _retyped(equation)
        for equation in equations_of(program)
        if name_of(equation) == "custom_linear_solve"
    )


def _retyped(solve: JaxprEqn) -> bool:
    """Whether operands of a linear solve vary over other axes than the inputs of its programs."""
    counts, operands = solve.params["const_lengths"], solve.invars
    given = operands[sum(counts) :]
    for count, program in zip(counts, solve.params["jaxprs"], strict=True):
        own, operands = operands[:count], operands[count:]
        inputs = [] if program is None else with_constants(program)[0].invars
        pairs = zip(inputs, [*own, *given], strict=False)
        if any(varying_axes(x.aval) != varying_axes(y.aval) for x, y in pairs):
            return True
    return False


def _replay(program: Any, axis: Axis, args: Sequence[Any], copies: _Axes = _ONE) -> list[Any]:
    """Runs a program's equations under the map. All values in it are typed as varying."""

    def rule(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        # Cast again: a collective's result is typed as the same on all workers.
        return axis.to_varying(list(run_equation(equation, axis, operands, copies)))

    return interpret(
        program,
        args,
        rule,
        literal=lambda atom: axis.to_varying(constant_of(atom)),
        constant=axis.to_varying,
    )


def run_equation(
    equation: JaxprEqn, axis: Axis, operands: list[Any], copies: _Axes = _ONE
) -> Sequence[Any]:
    """The results of one equation for one worker's operands, all typed as varying.

    It stands in a map of the loss over the axes ``copies``, along which all hold the same.
    """
    name, params = name_of(equation), equation.params
    # A map of the loss's own over these axes has copies of one worker's values.
    if own := _named(equation) & copies:
        return _of_copies(equation, operands, own)
    if name == "sharding_constraint":
        return [_constrain(operands[0], _spec_of(params), get_abstract_mesh().manual_axes)]
    if name == "psum":  # without manual axes this is another primitive than under the map
        groups = params["axis_index_groups"]
        operands = Axis(params["axes"]).to_varying(operands)
        return jax.lax.psum(operands, params["axes"], axis_index_groups=groups)
    programs = inner_jaxprs(equation)
    if name in JITS | CUSTOM and programs:
        return _replay(programs[0], axis, operands, copies)
    if name == MAP:
        return _run_map(params, axis, operands, copies)
    return evaluate_here(equation, operands, functools.partial(_inside, axis, copies))


def _run_map(params: dict[str, Any], axis: Axis, operands: list[Any], copies: _Axes) -> Any:
    """The results of a map of the loss: over axes of the map around it, it maps over copies.

    Without types JAX keeps what the backward pass needs as one array of all devices' values, which
    is split as well.

    Raises:
      ValueError: it splits arrays over these axes, of which this worker's rows are one part.
    """
    manual = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    names = _Axes(params[manual])
    around = names & {*get_abstract_mesh().manual_axes}
    entries = [entry for spec in (*params["in_specs"], *params["out_specs"]) for entry in spec]
    if any(_without(entry, around) != entry for entry in entries):
        raise ValueError(
            "a loss on Auto axes runs on one worker's rows, so a jax.shard_map of its own over "
            f"{sorted(around)}, or the derivative of one, cannot split them; leave that map out, "
            "or use a mesh of Explicit axes"
        )

    def inner(*xs: Any) -> tuple[Any, ...]:
        return tuple(_replay(params["jaxpr"], axis, xs, copies | around))

    if names == around:
        return inner(*operands)
    options = {key: params[key] for key in ("in_specs", "out_specs", "check_vma")}
    return jax.shard_map(inner, axis_names={*names - around}, **options)(*operands)


def _named(equation: JaxprEqn) -> _Axes:
    """The axes that an equation names."""
    params = equation.params
    found = params.get("axes", params.get("axis_name", ()))
    return _Axes([found] if isinstance(found, str) else [x for x in found if isinstance(x, str)])


def _of_copies(equation: JaxprEqn, operands: list[Any], names: _Axes) -> list[Any]:
    """The results of a collective among copies of one worker's values.

    JAX's derivative of a map that does not check types divides by the number of copies, and sums.

    Raises:
      ValueError: the collective distinguishes the copies.
    """
    name = name_of(equation)
    if name in SAME or collective_of(name) in ("pmax", "pmin"):
        return operands
    if collective_of(name) == "psum" and names == _named(equation):
        count = math.prod(get_abstract_mesh().shape[name] for name in names)
        return [count * x for x in operands]
    raise ValueError(
        f"a loss on Auto axes runs on one worker's rows, so it cannot call {name} over "
        f"{sorted(names)} in a jax.shard_map of its own; leave that map out, or use a mesh of "
        "Explicit axes"
    )


def _inside(axis: Axis, copies: _Axes, program: Any) -> Any:
    """A program within an equation, as it runs under the map."""
    kinds: list[Any] = [variable.aval for variable in with_constants(program)[0].invars]
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in kinds]
    # JAX takes a type as varying where it also names the mesh.
    whole = NamedSharding(get_abstract_mesh(), P())
    types = [x.update(sharding=whole) for x in jax.eval_shape(axis.to_varying, plain)]
    return jax.make_jaxpr(lambda *xs: _replay(program, axis, xs, copies))(*types)


def _spec_of(params: dict[str, Any]) -> P:
    """The spec of a recorded constraint."""
    sharding, dims = params["sharding"], params["unconstrained_dims"]
    if not isinstance(sharding, NamedSharding) or params["layout"] is not None:
        raise ValueError(
            f"under a map over data axes a loss cannot constrain an array to {sharding} with "
            f"layout {params['layout']}; use a PartitionSpec or a NamedSharding"
        )
    # Dimensions without a constraint may lie behind the spec's end.
    entries = [*sharding.spec, *[None] * (1 + max(dims, default=-1) - len(sharding.spec))]
    return P(*(P.UNCONSTRAINED if i in dims else entry for i, entry in enumerate(entries)))


class _Varying(Flow[_Axes]):
    """The axes over which results may vary, from the axes of arguments."""

    nothing = closed = _Axes()

    def __init__(self, choices: bool):
        self.choices = choices
        """Whether the axes of a branch's index and of a loop's condition count."""

    def join(self, facts: Sequence[_Axes]) -> _Axes:
        """See `Flow`."""
        return _Axes().union(*facts)

    def chosen(self, facts: list[_Axes], choice: _Axes) -> list[_Axes]:
        """See `Flow`."""
        return [own | choice for own in facts] if self.choices else facts

    def mapped(self, equation: JaxprEqn, operands: list[_Axes]) -> list[_Axes]:
        """See `Flow`; the map's own axes count as they do for any other equation."""
        return self.made(equation, operands)

    def made(self, equation: JaxprEqn, operands: list[_Axes]) -> list[_Axes]:
        """See `Flow`."""
        found, name, params = self.join(operands), name_of(equation), equation.params
        # Sums within groups differ between these.
        if name in SUMS and params.get("axis_index_groups") is None:
            found -= {*params["axes"]}
        # A worker's number, also one that an inner program asks for.
        for own in within(equation):
            if name_of(own) == "axis_index":
                named = own.params["axis_name"]
                found |= {named} if isinstance(named, str) else {*named}
        return [found] * len(equation.outvars)


class _FromNothing(_Varying):
    """Which results are reduced from arrays without entries, from which arguments are."""

    mapped = Flow.mapped

    def made(self, equation: JaxprEqn, operands: list[_Axes]) -> list[_Axes]:
        """See `Flow`."""
        kinds: list[list[Any]] = [
            [x.aval for x in own] for own in (equation.invars, equation.outvars)
        ]
        given, made = ([math.prod(x.shape) for x in own] for own in kinds)
        # An entry that is made of none: as a mean it is NaN.
        if name_of(equation).startswith(REDUCTIONS) and 0 in given and 0 not in made:
            return [_NOTHING] * len(made)
        return super().made(equation, operands)


_NOTHING = _Axes({"no entries"})


def reduced_from_nothing(program: Any) -> list[bool]:
    """For each result of a program, whether it depends on a reduction of an empty array."""
    jaxpr, _ = with_constants(program)
    found = _FromNothing(choices=True)(program, [_Axes()] * len(jaxpr.invars))
    return [_NOTHING <= own for own in found]
