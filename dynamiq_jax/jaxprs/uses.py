"""Losses on Explicit meshes, use by use: a use for which JAX has no rule reads a plain copy.

A large parameter is typed as reduced, so that JAX leaves its gradient unreduced. JAX has rules for
some uses of such a value, such as matrix products, and none for others, such as elementwise
products with examples. `per_use` runs the jaxpr of a loss that was traced with plain parameters. It
runs with two twins of each parameter:

* the *typed* twin goes through operations on parameters alone (`derive`). It meets examples in
  equations of `TYPED` if JAX has a rule for these very types, and in loops, branches and
  checkpoints;
* the *plain* twin serves all other equations. JAX sums its gradient, exactly.

An equation that needs a plain operand computes it from plain twins, by the same equations. So the
gradient of a parameter is the sum of its twins' gradients, and only gradients of uses without a
rule travel uncompressed. A use without examples, such as a penalty, needs no traffic.

**Values that follow from parameters alone** have a derivative for any operation. A value that is
typed as reduced is the same on every device. Its gradient is unreduced: every device holds a term
of it. An operation on parameters alone, as in weight norm, has a derivative that is linear in the
gradient. So each device may apply it to its own term, and the terms of the result are those of the
parameter's gradient. JAX has no such rule for most operations. Here the terms become the rows of an
array that the data axes split, and the derivative is vmapped over them. No device sends anything.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import (
    constant_of,
    evaluate,
    evaluate_here,
    inner_jaxprs,
    name_of,
    refusals,
    unrolls_typed,
    varying_axes,
    with_constants,
)
from dynamiq_jax.jaxprs.primitives import (
    CASTS,
    CHECKPOINTS,
    JITS,
    MAP,
    ON_AUTO,
    OWN_DERIVATIVE,
    TYPED,
    collective_of,
)
from dynamiq_jax.jaxprs.walk import equations_of, interpret, scan_parts, within
from dynamiq_jax.tree.leaves import axes_of

if TYPE_CHECKING:
    from dynamiq_jax.training.explicit_axes import Gather


# --- Values that follow from parameters alone -----------------------------------------------------


def has_own_derivative(equation: JaxprEqn) -> bool:
    """Whether users may have written the derivative of an equation, or of one inside of it."""
    # An effect counts too: the derivative runs the equation again, and a print would come twice.
    return any(own.effects or name_of(own).startswith(OWN_DERIVATIVE) for own in within(equation))


def is_inexact(x: Any) -> bool:
    """Whether an array, or a variable of a jaxpr, has gradients."""
    return jnp.issubdtype(getattr(x, "aval", x).dtype, jnp.inexact)


def untyped(x: Any) -> Any:
    """``x``, typed as neither reduced nor unreduced."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec.reduced:
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, P(*sharding.spec.partitions)))


def keeps_terms(run: Callable[..., Sequence[Any]], typed: Sequence[Array]) -> bool:
    """Whether the gradients of typed operands of ``run`` are unreduced, over the same axes.

    Traces ``run`` and its derivative. Raises JAX's error where JAX has no rule.
    """

    def back(*typed: Array) -> Any:
        # Cotangents of typed results would have to be unreduced: the reshard's transpose makes them
        # so.
        results = lambda *typed: [untyped(x) for x in run(*typed) if is_inexact(x)]
        found, pullback = jax.vjp(results, *typed)
        return pullback([0 * x for x in found])

    gradients = jax.eval_shape(back, *typed)
    return all(
        own.sharding.spec.unreduced == jax.typeof(x).sharding.spec.reduced
        for own, x in zip(gradients, typed, strict=True)
    )


def derive(
    equation: JaxprEqn, operands: Sequence[Any], places: Sequence[int], *own: Array
) -> list[Any]:
    """The results of an equation, typed as reduced as some of its operands are.

    Args:
      equation: one of which `has_own_derivative` is `False`.
      operands: its operands; those at ``places`` count for nothing.
      places: the numbers of operands that have derivatives.
      own: these. One at least is typed as reduced. Gradients of others are summed, by JAX.

    Returns:
      The results; those without gradients, such as integers, are not typed.
    """
    # All typed operands are reduced over the same axes, so the first one tells them.
    sharding = next(s for s in (jax.typeof(x).sharding for x in own) if s.spec.reduced)
    mesh, reduced = sharding.mesh, sharding.spec.reduced
    axes = _in_order(sharding)
    moves = [is_inexact(x) for x in equation.outvars]
    is_typed = [bool(jax.typeof(x).sharding.spec.reduced) for x in own]

    def plainly(*values: Array) -> list[Any]:
        given = dict(zip(places, values, strict=True))
        return list(evaluate(equation, *(given.get(i, x) for i, x in enumerate(operands))))

    def moving(*values: Array) -> list[Array]:
        return [x for x, m in zip(plainly(*values), moves, strict=True) if m]

    def forward(*own: Array) -> tuple[list[Array], tuple[Array, ...]]:
        plain = tuple(map(untyped, own))
        found = moving(*plain)
        return [_put(mesh, x, P(*_split(x), reduced=reduced)) for x in found], plain

    def backward(plain: tuple[Array, ...], gradients: list[Array]) -> tuple[Array, ...]:
        def rows(x: Array) -> Array:
            return _rows(mesh, axes, x, P(*_split(x), unreduced=reduced))

        def terms(x: Array, like: Array, typed: bool) -> Array:
            # An operand without a type has a whole gradient: the sum over rows is an all-reduce.
            if not typed:
                return _put(mesh, jnp.sum(x, 0), P(*_split(like)))
            return _terms(mesh, axes, x, like)

        found = jax.vmap(jax.vjp(moving, *plain)[1])(list(map(rows, gradients)))
        return tuple(map(terms, found, plain, is_typed))

    typed_results = jax.custom_vjp(lambda *own: forward(*own)[0])
    typed_results.defvjp(forward, backward)
    found = iter(typed_results(*own) if any(moves) else ())
    if all(moves):
        return list(found)
    # Integers and the like come from values without derivatives.
    fixed = plainly(*(lax.stop_gradient(untyped(lax.stop_gradient(x))) for x in own))
    return [next(found) if m else x for m, x in zip(moves, fixed, strict=True)]


def map_rows(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
    """The results of a `jax.shard_map` for typed operands; `None` if it has none that it sums.

    A map gets what is the same on all devices whole, and its derivative sums the gradients of all
    devices. Here such an operand goes in as the rows of an array, one on each device. So the
    derivative leaves each device its term.
    """
    params = equation.params
    # Versions of JAX name this parameter differently.
    manual = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    names, specs = frozenset(params[manual]), list(params["in_specs"])
    shardings = [jax.typeof(x).sharding for x in operands]
    typed = {i: _in_order(s) for i, s in enumerate(shardings) if s.spec.reduced}
    # Rows take the data axes for a dimension of their own: the map must run over these axes, and
    # the operand must not be split by them already.
    if any(not {*axes} <= names - axes_of(specs[i]) for i, axes in typed.items()):
        return None
    given = list(operands)
    for i, axes in typed.items():
        given[i] = _rows_of_copies(shardings[i].mesh, axes, operands[i])
        specs[i] = P(axes, *specs[i])

    def inner(*xs: Any) -> tuple[Any, ...]:
        own = [x[0] if i in typed else x for i, x in enumerate(xs)]
        # The program was traced with operands that are the same on all workers, and a row varies.
        # Without check_vma no type tells the difference.
        run = _more_varying if params["check_vma"] else _plainly
        return tuple(run(params["jaxpr"], own))

    options = {key: params[key] for key in ("out_specs", "check_vma")}
    mesh = shardings[next(iter(typed))].mesh
    return jax.shard_map(inner, mesh=mesh, in_specs=tuple(specs), axis_names=names, **options)(
        *given
    )


def _plainly(program: Any, args: Sequence[Any]) -> list[Any]:
    rule = lambda equation, operands: evaluate(equation, *operands)
    return interpret(program, args, rule, literal=constant_of, constant=jnp.asarray)


def _more_varying(program: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a map's program for operands that vary over more axes than it was traced for.

    JAX raises an error if they meet a loop or a branch, whose program has types of its own.

    Raises:
      NotImplementedError: they meet a derivative that users wrote for the sum of all terms.
    """

    def rule(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = name_of(equation)
        pairs = zip(operands, equation.invars, strict=True)
        if has_own_derivative(equation) and any(
            varying_axes(x) - varying_axes(v.aval) for x, v in pairs
        ):
            raise NotImplementedError(f"terms in {name}")
        # JAX refuses the cast of an operand that varies already.
        if name in CASTS:
            return Axis(equation.params["axes"]).to_varying(operands)
        if name in JITS:
            return _more_varying(inner_jaxprs(equation)[0], operands)
        # JAX's operations take operands that vary over the same axes alone; collectives have rules
        # of their own.
        if collective_of(name) is None:
            names = frozenset().union(*map(varying_axes, operands))
            operands = Axis(tuple(names)).to_varying(operands) if names else operands
        return evaluate_here(equation, operands, lambda program: program)

    return interpret(program, args, rule, literal=constant_of, constant=jnp.asarray)


def _rows_of_copies(mesh: Any, axes: tuple[str, ...], x: Array) -> Array:
    """The copies of a typed value as rows that data axes split; their gradients are its terms."""

    def forward(x: Array) -> tuple[Array, Array]:
        plain = untyped(x)
        return _rows(mesh, axes, plain, P(*_split(plain))), plain

    def backward(plain: Array, gradient: Array) -> tuple[Array]:
        return (_terms(mesh, axes, gradient, plain),)

    rows = jax.custom_vjp(lambda x: forward(x)[0])
    rows.defvjp(forward, backward)
    return rows(x)


def _rows(mesh: Any, axes: tuple[str, ...], x: Array, spec: P) -> Array:
    """Rows that ``axes`` split: each is what a device has of ``x``."""
    into: dict[str, Any] = {"in_specs": spec, "out_specs": P(axes, *spec.partitions)}
    run = jax.shard_map(lambda own: own[None], mesh=mesh, check_vma=False, **into)
    return run(_put(mesh, x, spec))


def _terms(mesh: Any, axes: tuple[str, ...], rows: Array, like: Array) -> Array:
    """The unreduced value, split as ``like`` is, of which each device has a term: its row."""
    spec = P(axes, *_split(like))
    into: dict[str, Any] = {
        "in_specs": spec,
        "out_specs": P(*_split(like), unreduced=frozenset(axes)),
    }
    run = jax.shard_map(lambda row: row[0], mesh=mesh, check_vma=False, **into)
    return run(_put(mesh, rows, spec))


def _put(mesh: Any, x: Array, spec: P) -> Array:
    return jax.reshard(x, NamedSharding(mesh, spec))


def _in_order(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of terms, in the mesh's order: which device's term is which row does not matter."""
    return tuple(name for name in sharding.mesh.axis_names if name in sharding.spec.reduced)


def _split(x: Any) -> tuple[Any, ...]:
    """The entries of a value's spec, one for each dimension that the type names."""
    return tuple(jax.typeof(x).sharding.spec.partitions)


# --- Losses, use by use ---------------------------------------------------------------------------


SMALL = 4096
"""The size of a gradient up to which JAX may sum it without a warning."""


class Value:
    """A value of the program, or the twins of a value that depends only on parameters.

    Args:
      plain: makes the value without a type, when that is wanted.
      typed: makes the value typed as reduced, or `None`, when that is first wanted.
      leaves: the parameters that it follows from.
      data: whether it also follows from examples.
      broken: of a value without a typed twin, names the first primitive that has no rule.
    """

    def __init__(
        self,
        plain: Callable[[], Any],
        typed: Callable[[], Array | None] | None = None,
        leaves: frozenset[int] = frozenset(),
        data: bool = True,
        broken: Callable[[], str] = str,
    ):
        self.plain, self.leaves, self.data = plain, leaves, data
        self._typed, self._broken = typed, broken

    @functools.cached_property
    def typed(self) -> Array | None:
        """The value typed as reduced, or `None` if it has no such twin."""
        return None if self._typed is None else self._typed()

    @property
    def broken(self) -> str:
        """The primitive because of which it has no typed twin; "" if it has one, or needs none."""
        return self._broken() if self.typed is None else ""


@dataclasses.dataclass
class Uses:
    """The results of a run: which twins were needed, and which gradients JAX sums."""

    axes: frozenset[str]
    """The data axes of more than one device."""
    wanted: set[int] = dataclasses.field(default_factory=set)
    """The numbers of parameters whose plain twin served."""
    typed: set[int] = dataclasses.field(default_factory=set)
    """The parameters whose typed twin met examples."""
    native: dict[int, str] = dataclasses.field(default_factory=dict)
    """By parameter: the first primitive that has no rule on its way to examples."""
    gathered: set[int] = dataclasses.field(default_factory=set)
    """The numbers of parameters that `fsdp` gathers."""


def value_of(x: Any, data: bool = True) -> Value:
    """A value that does not depend on parameters."""
    return Value(lambda: x, data=data)


def parameter(typed: Array | None, plain: Array, number: int, uses: Uses) -> Value:
    """The twins of a parameter; ``uses`` records whether the plain one is needed."""

    def wanted() -> Array:
        uses.wanted.add(number)
        return plain

    return Value(wanted, lambda: typed, frozenset((number,)), False)


def per_use(closed: Any, values: Sequence[Value], uses: Uses) -> list[Value]:
    """Runs a jaxpr."""
    kept = kept_here(closed, uses.axes)

    def constant(x: Any) -> Value:
        own = x if isinstance(x, Array) else jnp.asarray(x)  # rules of users may index it
        # A tracer belongs to the program around the loss, and may depend on examples.
        return value_of(own, isinstance(x, Tracer))

    def rule(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        # A call is opened: one of its equations may have no rule while all others have one.
        if name_of(equation) in JITS:
            return per_use(inner_jaxprs(equation)[0], operands, uses)
        if gather := gather_of(equation):
            return _gathered(gather, operands, uses)
        # A call of `fsdp` inside makes the twins there, so that program must be opened even where
        # no examples go in.
        if any(x.data for x in operands) or _has_gathers(equation):
            return _with_data(equation, operands, uses)
        return _of_parameters(equation, operands, id(equation) in kept)

    literal = lambda atom: value_of(atom.val, False)
    return interpret(closed, values, rule, literal=literal, constant=constant)


gathered_p = Primitive("gathered_by_dynamiq_jax")
"""The mark of a call of `fsdp`, in traces that `per_use` reads."""
gathered_p.multiple_results = True


@gathered_p.def_abstract_eval
def _(*operands: Any, gather: "Gather") -> list[Any]:
    """Whole leaves; a key's words may come last of the operands."""
    specs = [gather.whole[i] for i in gather.chosen]
    shards = operands[: len(specs)]
    return [
        x.update(sharding=NamedSharding(x.sharding.mesh, s))
        for x, s in zip(shards, specs, strict=True)
    ]


def gather_of(equation: JaxprEqn) -> "Gather | None":
    """How an equation gathers, if it stands for a call of `fsdp`."""
    return equation.params["gather"] if equation.primitive is gathered_p else None


def _gathered(gather: "Gather", operands: list[Value], uses: Uses) -> list[Value]:
    """The twins of gathered leaves: equal values whose gradients travel in two ways."""
    count = len(gather.chosen)
    shards = [x.plain() for x in operands[:count]]
    words = operands[count].plain() if len(operands) > count else None
    values = gather.values(shards, words)
    made = []

    # One call types all leaves, so that one collective sums the gradients of all.
    @functools.cache
    def typed() -> list[Array]:
        return gather.typed(shards, words, values)

    # Not strict: a key's words may come after the shards.
    for place, (number, x) in enumerate(zip(gather.chosen, operands, strict=False)):
        uses.gathered |= x.leaves
        own = functools.partial(_at, typed, place)
        if number in gather.large:
            plain = functools.partial(gather.plain, place, shards[place], values[place])
            made.append(Value(plain, own, x.leaves, x.data))
        else:
            # JAX sums the gradient of a small leaf in any case, so one value serves all uses.
            made.append(Value(own, leaves=x.leaves, data=x.data))
    return made


def _has_gathers(equation: JaxprEqn) -> bool:
    return any(map(gather_of, within(equation)))


def _with_data(equation: JaxprEqn, operands: list[Value], uses: Uses) -> list[Value]:
    """The results of an equation whose operands depend on examples."""
    name, made = name_of(equation), None
    leaves = frozenset().union(*(x.leaves for x in operands))
    gathers = _has_gathers(equation)
    if gathers or any(x.typed is not None for x in operands):
        made = _typed(equation, operands, uses)
    if made is None and gathers:
        raise NotImplementedError(f"fsdp within {name}")
    if made is None:
        plain = [x.plain() for x in operands]
        for x, own in zip(operands, plain, strict=True):
            # Of an expert that data axes split no other worker has terms.
            apart = name == MAP and axes_of(jax.typeof(own).sharding.spec) >= uses.axes
            # What depends on examples as well has met them at an earlier use, which has been
            # counted.
            if x.leaves and not x.data and not apart and own.size >= SMALL:
                for leaf in x.leaves:
                    uses.native.setdefault(leaf, x.broken or name)
        made = evaluate(equation, *plain)
    elif name not in _RUNNERS:
        # Runners tell of the uses inside of them.
        uses.typed.update(*(x.leaves for x in operands if x.typed is not None))
    return [Value(functools.partial(_same, x), leaves=leaves) for x in made]


def _typed(equation: JaxprEqn, operands: list[Value], uses: Uses) -> Sequence[Any] | None:
    """The results for typed operands; `None` if JAX refuses these."""
    name = name_of(equation)
    # An attempt that JAX refuses must leave no marks: plain operands then make their own.
    before = {*uses.wanted}, {*uses.typed}, dict(uses.native), {*uses.gathered}
    try:
        if name in _RUNNERS:
            return _RUNNERS[name](equation, operands, uses)
        twins = [x.plain() if x.typed is None else x.typed for x in operands]
        if not any(jax.typeof(x).sharding.spec.reduced for x in twins):
            return evaluate(equation, *twins)  # on Auto axes, where the compiler has every rule
        if _same_types(equation, twins):
            return evaluate(equation, *twins)  # JAX has taken these very types
        if name in TYPED:
            return _by_rule(equation, operands)
        if name == MAP:
            return map_rows(equation, twins)
    except refusals():
        uses.wanted, uses.typed, uses.native, uses.gathered = before
    return None


def _same_types(equation: JaxprEqn, operands: list[Any]) -> bool:
    """Whether a map was traced with operands of these types."""
    before: list[Any] = [variable.aval for variable in equation.invars]
    reduced = lambda x: x.sharding.spec.reduced
    same = all(reduced(x) == reduced(jax.typeof(y)) for x, y in zip(before, operands, strict=True))
    return name_of(equation) == MAP and same


def _by_rule(equation: JaxprEqn, operands: list[Value]) -> Sequence[Any] | None:
    """The results by JAX's own rule for typed operands; `None`, or its error, if it has none."""
    twins = [x.plain() if x.typed is None else x.typed for x in operands]
    places = [i for i, x in enumerate(operands) if x.typed is not None]

    def run(*typed: Array) -> Sequence[Any]:
        own = list(twins)
        for i, x in zip(places, typed, strict=True):
            own[i] = x
        return evaluate(equation, *own)

    # JAX may take these operands and still sum their gradients; then the plain twins serve.
    typed = [twins[i] for i in places]
    return run(*typed) if keeps_terms(run, typed) else None


def _of_parameters(equation: JaxprEqn, operands: list[Value], kept: bool) -> list[Value]:
    """The twins of the results of an equation whose operands depend only on parameters.

    With ``kept`` it is one of `kept_here`.
    """
    leaves = frozenset().union(*(x.leaves for x in operands))
    name = name_of(equation)

    # A twin is made when it is first wanted: where nobody takes the typed one, no rule is needed.
    @functools.cache
    def plainly() -> Sequence[Any]:
        return evaluate(equation, *(x.plain() for x in operands))

    @functools.cache
    def typed() -> Sequence[Any]:
        try:
            return _derived(equation, operands, kept)
        except refusals():
            return [None] * len(equation.outvars)

    def broken() -> str:
        before = next((x.broken for x in operands if x.broken), "")
        return before or (name if any(x.typed is not None for x in operands) else "")

    made = []
    for i, variable in enumerate(equation.outvars):
        plain = functools.partial(_at, plainly, i)
        own = functools.partial(_at, typed, i) if leaves else None
        if is_inexact(variable) or not leaves:
            made.append(Value(plain, own, leaves, False, broken))
        else:  # such as integers, which have no gradients
            made.append(Value(functools.partial(_fixed, own, plain), data=False))
    return made


def _fixed(first: Any, second: Any) -> Any:
    found = first()
    return second() if found is None else found


def _derived(equation: JaxprEqn, operands: list[Value], kept: bool) -> Sequence[Any]:
    """The typed results of an equation on parameters; a result without a rule is `None`."""
    none = [None] * len(equation.outvars)
    pairs = list(zip(operands, equation.invars, strict=True))
    # Beside a large operand without a typed twin the result has none: JAX sums that gradient, and
    # `broken` says why.
    large = [x for x, v in pairs if v.aval.size >= SMALL]  # type: ignore[attr-defined]
    if any(x.broken for x in large) or not any(x.typed is not None for x in operands):
        return none
    if name_of(equation) == "reshard":
        return _resharded(equation, operands[0], kept)
    # JAX's own rule needs no rows; `derive` serves where there is none.
    if name_of(equation) in TYPED and all(map(is_inexact, equation.outvars)):
        with contextlib.suppress(*refusals()):
            if (found := _by_rule(equation, operands)) is not None:
                return found
    if has_own_derivative(equation):
        return none
    twins = [x.plain() if x.typed is None else x.typed for x in operands]
    moving = [i for i, (x, v) in enumerate(pairs) if x.leaves and is_inexact(v)]
    run = functools.partial(derive, equation, twins, moving)
    chosen = [twins[i] for i in moving]
    return run(*chosen) if keeps_terms(run, chosen) else none


def _same(x: Any) -> Any:
    return x


def _at(made: Callable[[], Sequence[Any]], place: int) -> Any:
    return made()[place]


def kept_on_auto(jaxpr: Any, axes: Collection[str]) -> set[int]:
    """The result of `kept_here` for a program and all programs inside of its equations."""
    equations = with_constants(jaxpr)[0].eqns
    inner = (kept_on_auto(own, axes) for equation in equations for own in inner_jaxprs(equation))
    return kept_here(jaxpr, axes).union(*inner)


def unrolled_in_part(jaxpr: Any) -> bool:
    """Whether JAX has no rule for a loop of a program: typed values, and it is unrolled in part."""

    def refused(equation: JaxprEqn) -> bool:
        if name_of(equation) != "scan" or unrolls_typed():
            return False
        specs = (x.aval.sharding.spec for x in (*equation.invars, *equation.outvars))  # type: ignore[attr-defined]
        is_typed = any(spec.reduced or spec.unreduced for spec in specs)
        return is_typed and 1 < equation.params["unroll"] < equation.params["length"]

    return any(map(refused, equations_of(jaxpr)))


def kept_here(jaxpr: Any, axes: Collection[str]) -> set[int]:
    """The `id` of each equation that brings an array to Auto axes for uses of `ON_AUTO` alone.

    JAX reads rows by `jax.sharding.auto_axes`: reshard, gather, reshard. `jnp.take` has its gather
    within a `jax.jit`. Data axes, ``axes``, split the result, so that the gradient of the array has
    each device's terms. Other functions on Auto axes may have whole gradients, which JAX would take
    for terms.
    """
    own = with_constants(jaxpr)[0]
    users = _users(own)

    def splits(equation: JaxprEqn) -> bool:
        if name_of(equation) != "reshard":
            return False
        # If one data axis does not split the result, the gradient is whole over that axis, and no
        # term.
        return {*axes} <= axes_of(P(*equation.params["dst_sharding"].spec.partitions))

    def is_split(variable: Any) -> bool:
        # The uses of a result of this program are out of sight here.
        return variable not in own.outvars and all(map(splits, users.get(variable, ())))

    return {
        # By identity: an equation that looks alike may have other users.
        id(equation)
        for equation in own.eqns
        if name_of(equation) == "reshard"
        and (found := _results_of_uses(own, equation.outvars[0])) is not None
        and all(map(is_split, found))
    }


def _users(jaxpr: Any) -> dict[Any, list[JaxprEqn]]:
    """The equations that take each variable, once for each operand that it is."""
    users: dict[Any, list[JaxprEqn]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                users.setdefault(atom, []).append(equation)
    return users


def _results_of_uses(jaxpr: Any, variable: Any) -> list[Any] | None:
    """The results of all uses of a variable, where each is one of `ON_AUTO`; else `None`."""
    results: list[Any] = []
    if variable in jaxpr.outvars:
        return None
    for equation in _users(jaxpr).get(variable, ()):
        # An equation that takes it twice has gradients by both operands, and reads rows of one.
        if sum(atom is variable for atom in equation.invars) != 1:
            return None
        if name_of(equation) in ON_AUTO:
            results += equation.outvars
        elif name_of(equation) in JITS:
            inner = with_constants(inner_jaxprs(equation)[0])[0]
            (place,) = (i for i, atom in enumerate(equation.invars) if atom is variable)
            made = _results_of_uses(inner, inner.invars[place])
            # Such a result is used inside, on Auto axes, before data axes split it.
            if made is None or any(_users(inner).get(x) or x not in inner.outvars for x in made):
                return None
            pairs = zip(equation.outvars, inner.outvars, strict=True)
            results += [outer for outer, x in pairs if x in made]
        else:
            return None
    return results


def _resharded(equation: JaxprEqn, operand: Value, kept: bool) -> list[Any]:
    """A typed value that the loss reshards; it stays typed if no data axis splits the result."""
    assert operand.typed is not None
    if kept:
        return list(evaluate(equation, operand.typed))
    target = equation.params["dst_sharding"]
    reduced = jax.typeof(operand.typed).sharding.spec.reduced
    if axes_of(P(*target.spec.partitions)) & reduced:
        return [None]
    if not reduced <= {*target.mesh.explicit_axes}:
        return [None]  # gradients on Auto axes are whole, and JAX would take them for terms
    spec = P(*target.spec.partitions, reduced=reduced)
    return [jax.reshard(operand.typed, NamedSharding(target.mesh, spec))]


# --- Loops, branches and checkpoints --------------------------------------------------------------


class _NotPassedError(Exception):
    """An inner program needs a plain twin of an operand, which was not passed to it."""

    def __init__(self, inner: "_Inner", number: int):
        super().__init__(number)
        self.inner, self.number = inner, number


@dataclasses.dataclass(eq=False)
class _Inner:
    """The inputs of an inner program: the twins of its operands, in this order."""

    operands: Sequence[Value]
    wanted: frozenset[int]
    """The operands whose plain twin goes in."""
    unused: frozenset[int]
    """The operands whose typed twin does not."""
    uses: Uses

    @functools.cached_property
    def typed(self) -> frozenset[int]:
        """The operands whose typed twin goes in."""
        found = (i for i, x in enumerate(self.operands) if x.typed is not None)
        return frozenset(found) - self.unused

    @property
    def twins(self) -> list[tuple[int, bool]]:
        """(number of the operand, whether it is the typed twin)."""
        found = []
        for i in range(len(self.operands)):
            found += [(i, True)] if i in self.typed else []
            found += [(i, False)] if i not in self.typed or i in self.wanted else []
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
                functools.partial(self._plain, given, i),
                functools.partial(given.get, (i, True)),
                frozenset((i,)) if x.leaves else frozenset(),
                x.data,
                functools.partial(getattr, x, "broken"),
            )
            for i, x in enumerate(self.operands)
        ]

    def _plain(self, given: dict[tuple[int, bool], Any], number: int) -> Any:
        if (number, False) not in given:
            raise _NotPassedError(self, number)
        return given[number, False]


def _run_inner(
    operands: Sequence[Value], uses: Uses, run: Callable[[_Inner], list[Any]]
) -> list[Any]:
    """Runs an inner program; traces it again with one more plain twin if it needs one."""
    wanted: set[int] = set()
    unused: frozenset[int] = frozenset()
    named: dict[int, str] = {}  # why a twin is unused, which a run without it cannot tell
    while True:
        # New `Uses` each time: what a run that was given up has marked does not count.
        inner = _Inner(operands, frozenset(wanted), unused, Uses(uses.axes))
        try:
            found = run(inner)
        except _NotPassedError as error:
            if error.inner is not inner:  # a program around this one has to pass it first
                raise
            wanted.add(error.number)
            continue
        # A typed twin that went in and met no examples would get a gradient of zeros.
        if idle := inner.typed - inner.uses.typed:
            unused |= idle
            named |= inner.uses.native
            continue
        # Inside, parameters are numbered as operands; outside by their leaves.
        for number, name in (inner.uses.native | named).items():
            for leaf in operands[number].leaves:
                uses.native.setdefault(leaf, name)
        uses.typed.update(*(operands[number].leaves for number in inner.uses.typed))
        uses.gathered.update(*(operands[number].leaves for number in inner.uses.gathered))
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
    n_consts, n_carry = scan_parts(equation)
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
            # Operands of the body: constants, what is carried, rows.
            values[n_consts:n_consts] = map(value_of, carry)
            found = [x.plain() for x in per_use(params["jaxpr"], values, inner.uses)]
            return found[:n_carry], found[n_carry:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, made = scan_typed(body, carries, rows, **options)
        return [*carry, *made]

    return _run_inner(others, uses, run)


def scan_typed(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: list[Any],
    rows: list[Any],
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Any, Any]:
    """`lax.scan`, also of typed rows where JAX has no rule for them in a loop unrolled in part.

    There every iteration of a loop runs the body ``unroll`` times.
    """
    if not 1 < unroll < length or unrolls_typed():
        return lax.scan(body, carry, rows, length=length, reverse=reverse, unroll=unroll)
    turns, rest = divmod(length, unroll)
    # The turns that are left over are the last that run: at the start of the rows if reversed.
    first, last = (rest, length) if reverse else (0, length - rest)
    once = jax.jit(body)  # traced once for all of its calls

    def turn(carry: Any, rows: Any) -> tuple[Any, Any]:
        made: list[Any] = [None] * unroll
        for i in reversed(range(unroll)) if reverse else range(unroll):
            carry, made[i] = once(carry, jax.tree.map(lambda x, i=i: x[i], rows))
        return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *made)

    def part(x: Array, *ends: int) -> Array:
        return lax.slice_in_dim(x, *ends)

    grouped = [part(x, first, last).reshape(turns, unroll, *x.shape[1:]) for x in rows]
    carry, made = lax.scan(turn, carry, grouped, length=turns, reverse=reverse)
    made = jax.tree.map(lambda y: lax.collapse(y, 0, 2), made)
    if not rest:
        return carry, made
    ends = (0, first) if reverse else (last, length)
    over = [part(x, *ends) for x in rows]
    # Unrolled as a whole, for which JAX has a rule.
    carry, more = lax.scan(body, carry, over, length=rest, reverse=reverse, unroll=rest)
    pairs = (more, made) if reverse else (made, more)
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *pairs)


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
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "scan": _scan,
    "cond": _cond,
}
