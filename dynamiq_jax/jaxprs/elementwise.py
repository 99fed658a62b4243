"""Programs that compute every coordinate from this coordinate alone, on slices of their arrays.

`on_slices` traces a program on whole arrays, so that sizes in it are those of whole arrays. Then it
runs the trace on slices. A value is one of three kinds:

* *sliced*: one entry per coordinate of an array that is split, in the array's order;
* *uniform*: all entries are equal, as in a count, a learning rate, or zeros like a parameter;
* *whole*: any other value that does not depend on sliced ones. All workers have the same.

A primitive in `ELEMENTWISE` may take sliced values of one shape that are split alike, and uniform
ones. `on_slices` refuses all other uses of sliced values, and effects, which collectives have.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.compat import evaluate, inner_jaxprs, name_of, varying_axes, with_constants
from dynamiq_jax.jaxprs.owners import Owners, Schedule, owned, run_group
from dynamiq_jax.jaxprs.primitives import CALLS, ELEMENTWISE, PRODUCTS, RESHAPES
from dynamiq_jax.jaxprs.walk import equations_of, interpret
from dynamiq_jax.tree.leaves import Padding, axes_of, split_of, whole_shape

JAX = os.path.join(os.path.dirname(jax.__file__), "")
PUT_AFTER = (
    "Put it after, with exact differences, since norms see their errors: "
    "optax.chain(dq.optax.sharded(..., compression=dq.Policy(parameters=dq.F32())), ...)"
)
REMEDIES = {
    "clip_by_global_norm": "Pass max_norm= to dq.optax.sharded in the place of it",
    "apply_if_finite": "Leave it out: steps that are not finite change nothing",
    "zero_nans": "Leave it out: steps that are not finite change nothing",
    "_layouts.py": "Leave out flatten: dq.optax.sharded joins leaves anyway",
    "_accumulation.py": "Leave out should_skip_update_fn: steps that are not finite change nothing",
    "adaptive_grad_clip": PUT_AFTER,
    "normalize_by_update_norm": PUT_AFTER,
    "scale_by_trust_ratio": PUT_AFTER,
    "add_noise": "Its noise depends on the place of a coordinate: use dq.optax.all_reduce",
}
REMEDY = (
    "An update must depend on its own coordinate, or its own matrix, alone; for other optimizers "
    "(Adafactor, LAMB) use dq.optax.all_reduce, and max_norm= is the clip by norm"
)


class _Value(NamedTuple):
    """A value of the program."""

    data: Any
    """This worker's slice, one entry of a uniform value, or a whole array."""
    spec: P | None = None
    """How mesh axes split a sliced value."""
    uniform: bool = False

    def full(self, shape: tuple[int, ...]) -> Array:
        """The data, in this shape if it is uniform."""
        return jnp.broadcast_to(self.data, shape) if self.uniform else self.data


def _value(x: Any, spec: P | None = None) -> _Value:
    if spec is not None and axes_of(spec):
        return _Value(x, spec)
    if jnp.size(x) != 1:
        return _Value(x)
    # One entry is uniform in any shape, and a scalar fits all of these.
    return _Value(jnp.reshape(x, ()) if jnp.ndim(x) else x, uniform=True)


def whole_arrays(
    tree: Any, specs: Sequence[P], sizes: Mapping[str, int], padding: Sequence[Padding]
) -> Any:
    """The shapes and dtypes of whole arrays, from a tree of slices of padded ones."""
    leaves, treedef = jax.tree.flatten(tree)
    whole = []
    for x, spec, zeros in zip(map(jax.typeof, leaves), specs, padding, strict=True):
        shape = zeros.shape_of(whole_shape(x.shape, split_of(spec, tuple(sizes)), sizes))
        whole.append(jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type))
    return treedef.unflatten(whole)


def on_slices(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    wholes: tuple[Any, ...],
    specs: Sequence[P],
    results: tuple[Any, Sequence[P]],
    sizes: Mapping[str, int],
    *,
    owners: Owners | None = None,
) -> Any:
    """Slices of what ``function`` returns for whole arrays, of which ``args`` are slices.

    Specs say how mesh axes split each leaf, ``wholes`` which shapes whole arguments have, and
    ``results`` both of the results; ``sizes`` has the number of slices along every axis. The last
    slices may be longer than what is left of an array: what they have there, and get, is not the
    function's.

    ``owners`` may run parts that take whole matrices.
    """
    # For whole arrays, so that sizes and means in the program are not those of slices.
    closed, made = jax.make_jaxpr(function, return_shape=True)(*wholes)
    likes, result_specs = results
    if jax.tree.structure(made) != jax.tree.structure(likes):
        raise ValueError(
            f"the inner optimizer returns {jax.tree.structure(made)}, and must return "
            f"{jax.tree.structure(likes)}: updates like the parameters, a state like init's"
        )
    leaves = zip(jax.tree.leaves(args), specs, strict=True)
    values = [_value(x, spec) for x, spec in leaves]
    schedule = None
    # Only products need whole matrices; other programs run on slices alone.
    if owners and any(name_of(equation) in PRODUCTS for equation in equations_of(closed)):
        schedule = owned(closed, specs, result_specs, owners.axis)
    if owners is None or schedule is None:
        found = _run(closed, values)
    else:
        found = _by_owners(schedule, values, owners)
    made, treedef = jax.tree_util.tree_flatten_with_path(made)
    slices = []
    for value, (path, x), like, spec in zip(
        found, made, jax.tree.leaves(likes), result_specs, strict=True
    ):
        axes = axes_of(spec)
        if not value.uniform and (x.shape, value.spec) != (like.shape, spec if axes else None):
            has = "not split" if value.spec is None else f"split by {value.spec}"
            raise ValueError(
                f"the inner optimizer's result{jax.tree_util.keystr(path)} is {x.shape}, {has}, "
                f"and should be {like.shape}, split by {spec}. {REMEDY}"
            )
        parts = {d: math.prod(sizes[a] for a in names) for d, names in split_of(spec, tuple(axes))}
        # Rounded up: the last slices have padding.
        shape = tuple(-(-length // parts.get(d, 1)) for d, length in enumerate(like.shape))
        slices.append(value.full(shape))
    return treedef.unflatten(slices)


def _run(closed: Any, args: Sequence[_Value], source: JaxprEqn | None = None) -> list[_Value]:
    """The results of a program; ``source`` is the outermost equation that runs it."""
    return interpret(
        closed,
        args,
        lambda equation, operands: _results(equation, operands, source or equation),
        literal=_literal,
        constant=_value,
    )


def _by_owners(schedule: Schedule, args: Sequence[_Value], owners: Owners) -> list[_Value]:
    """The results of a program with parts that take whole matrices."""
    jaxpr, constants = with_constants(schedule.program)
    known = dict(zip(jaxpr.constvars, map(_value, constants), strict=True))
    known |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> _Value:
        return _literal(atom) if isinstance(atom, Literal) else known[atom]

    for step in schedule.steps:
        if isinstance(step, JaxprEqn):
            found = _results(step, [read(atom) for atom in step.invars], step)
            known |= zip(step.outvars, found, strict=True)
            continue
        given = [[known[v].data for v in part.given] for part in step]
        shared = [known[v].full(v.aval.shape) for v in step[0].shared]  # type: ignore
        found = run_group(step, given, shared, owners)
        for part, slices in zip(step, found, strict=True):
            pairs = zip(part.results.items(), slices, strict=True)
            known |= {v: _Value(x, spec) for (v, spec), x in pairs}
    return [read(atom) for atom in jaxpr.outvars]


def _literal(atom: Any) -> _Value:
    return _value(np.asarray(atom.val, atom.aval.dtype))


def _results(equation: JaxprEqn, operands: list[_Value], source: JaxprEqn) -> list[_Value]:
    """The results of one equation, which is in the ``source``, or is it."""
    name, params = name_of(equation), equation.params
    shapes, made = ([x.aval.shape for x in xs] for xs in (equation.invars, equation.outvars))  # type: ignore
    if name in CALLS:
        return _run(inner_jaxprs(equation)[0], operands, source)
    if name == "cond":  # all branches run, and the index chooses among their results
        index, *given = operands
        ways = zip(*(_run(branch, given, source) for branch in params["branches"]), strict=True)
        choose = functools.partial(_elementwise, lax.select_n, name, source)
        pairs = zip(ways, made, strict=True)
        return [choose([index, *xs], [(), *(shape for _ in xs)]) for xs, shape in pairs]
    if equation.effects:
        raise _refusal(name, source, "with an effect beside its results")
    if name == "optimization_barrier":
        return operands
    if name == "bitcast_convert_type" and shapes == made:  # to numbers of as many bits
        bind = functools.partial(equation.primitive.bind, **params)
        return [_elementwise(bind, name, source, operands, shapes)]
    if name in RESHAPES and all(x.uniform for x in operands):
        return operands[:1]
    if name in ELEMENTWISE:
        bind = functools.partial(equation.primitive.bind, **params)
        return [_elementwise(bind, name, source, operands, shapes)]
    pairs = list(zip(operands, shapes, strict=True))
    for x, shape in pairs:
        if x.spec is not None:
            raise _refusal(name, source, f"of an array {shape} that is split by {x.spec}")
    return [_value(x) for x in evaluate(equation, *(x.full(shape) for x, shape in pairs))]


def _elementwise(
    function: Callable[..., Array],
    name: str,
    source: JaxprEqn,
    operands: list[_Value],
    shapes: list[tuple[int, ...]],
) -> _Value:
    """The result of an elementwise function for operands of these whole shapes."""
    pairs = list(zip(operands, shapes, strict=True))
    kinds = dict.fromkeys((shape, x.spec) for x, shape in pairs if not x.uniform)
    like = next((x for x in operands if x.spec is not None), None)
    if like is None:
        data = [x.full(shape) if kinds else x.data for x, shape in pairs]
    elif len(kinds) == 1:
        data = [x.full(like.data.shape) for x in operands]
    else:
        both = " and ".join(f"{shape} by {spec or P()}" for shape, spec in kinds)
        raise _refusal(name, source, f"of arrays that are split differently, {both}")
    axes = frozenset().union(*map(varying_axes, data))
    for i, x in enumerate(data):  # JAX's primitives take operands that vary over the same axes
        if missing := tuple(sorted(axes - varying_axes(x))):
            data[i] = lax.pcast(x, missing, to="varying")
    return _Value(function(*data), None if like is None else like.spec, uniform=not kinds)


def _refusal(name: str, source: JaxprEqn, what: str) -> ValueError:
    """The error; it names the transformation and the line of code that an equation comes from."""
    traceback = source.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    # Frames of JAX say nothing to users.
    own = [frame for frame in frames if not frame.file_name.startswith(JAX)]
    # A transformation's update is a function inside of the one that users know.
    roots = (f.function_name.partition(".<locals>.update") for f in own)
    names = [root for root, found, _ in roots if found and root != "with_extra_args_support"][:1]
    lines = [f"{os.path.basename(frame.file_name)}:{frame.line_num}" for frame in own][:1]
    place = f" ({', '.join(names + lines)})" if lines else ""
    remedy = next((text for key, text in REMEDIES.items() if key in place), REMEDY)
    return ValueError(f"the inner optimizer computes {name!r}{place} {what}. {remedy}")
