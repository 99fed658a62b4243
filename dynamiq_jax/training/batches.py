"""How the arguments of a loss are split over the workers of Auto data axes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.warned import warn
from dynamiq_jax.reduction.reduction import warn_of_gather
from dynamiq_jax.tree.leaves import (
    axes_above_one,
    axes_of,
    describe_leaves,
    flat_specs,
    n_parts,
    names_of,
    placement_of,
)

ARRAYS = Array | np.ndarray | np.generic
"""Arguments of the loss of other types are constants of its program."""


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_seed(x: Any) -> bool:
    """Whether ``x`` is one PRNG key, also one without its type, as `jax.random.PRNGKey` makes it.

    Every array of uint32 with as many words as a key counts as one.
    """
    if is_key(x):
        return jnp.ndim(x) == 0
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return (jnp.shape(x), jnp.result_type(x)) == (words.shape, words.dtype)


class Told(NamedTuple):
    """An array that the loss takes, and its spec."""

    name: str
    spec: P | None
    """Its spec over the data axes, `None` where none is told."""
    closed: bool = False
    """Whether it is no argument: the loss closes over it."""


def positional_names(loss_fn: Callable[..., Any], count: int) -> list[str] | None:
    """The parameter names of the first ``count`` positional arguments; `None` if not known.

    All arguments of ``*args`` have its name.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    positional = kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD
    names = [x.name for x in parameters if x.kind in positional]
    rest = [x.name for x in parameters if x.kind == kinds.VAR_POSITIONAL]
    names += rest * (count - len(names))
    return names[:count] if len(names) >= count else None


def leaf_specs(
    batch_specs: Any,
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Sequence[int],
    axis: Axis,
) -> list[Told]:
    """The name of every leaf of the loss's arguments besides its parameters, and its spec.

    Leaves are those of ``(args, kwargs)`` without the arguments at the positions ``parameters``.
    The spec is `None` where ``batch_specs`` does not tell one. It is a dict by the names of
    arguments, positional or not, or a tuple with an entry for each positional one.

    Raises:
      ValueError: a name or an entry of ``batch_specs`` belongs to no such argument, or does not fit
        it.
    """
    names = positional_names(loss_fn, len(args))
    shown = names or [f"argument {i}" for i in range(len(args))]
    places = [i for i in range(len(args)) if i not in parameters]
    if isinstance(batch_specs, Mapping):
        _check_names(batch_specs, loss_fn, names, kwargs, [shown[i] for i in parameters])
        told = [batch_specs.get(shown[i]) for i in places]
        told = [_of_rest(x, shown, i) for x, i in zip(told, places, strict=True)]
        told += [batch_specs.get(name) for name in sorted(kwargs)]
    else:
        told = [*_by_order(batch_specs, [shown[i] for i in places], shown, parameters, kwargs)]
        told += [None] * len(kwargs)
    own = [(shown[i], args[i]) for i in places]
    own += [(name, kwargs[name]) for name in sorted(kwargs)]  # the order of a dict's leaves
    untold = P(axis.name, axis.name)  # stands for None: an axis twice is a spec of nothing
    found: list[Told] = []
    for (name, value), spec in zip(own, told, strict=True):
        try:
            flat = flat_specs(spec, value, axis.names, untold=untold)
        except ValueError as error:
            raise ValueError(f"batch_specs of the loss's argument {name!r}: {error}") from None
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
        found += [
            Told(name + jax.tree_util.keystr(path), None if s == untold else s)
            for path, s in zip(paths, flat, strict=True)
        ]
    return found


def _check_names(
    batch_specs: Mapping[str, Any],
    loss_fn: Callable[..., Any],
    names: list[str] | None,
    kwargs: Mapping[str, Any],
    parameters: list[str],
) -> None:
    """Refuses names that are those of no argument, or of parameters."""
    known = {*kwargs, *(names or ())}
    if names is not None:  # arguments with a default may be left out of a call
        own = inspect.signature(loss_fn).parameters.values()
        known |= {x.name for x in own if x.kind != inspect.Parameter.VAR_KEYWORD}
    for name in batch_specs:
        if name in parameters and name not in kwargs:
            raise ValueError(
                f"batch_specs names {name!r}, which the loss is differentiated by (argnums=); "
                "leave it out: specs= says how parameters are sharded"
            )
        if name not in known:
            raise ValueError(
                f"batch_specs names {name!r}, and the arguments of the loss are "
                f"{sorted(known - {*parameters})}; pass specs by these names"
            )


def _of_rest(spec: Any, names: list[str], place: int) -> Any:
    """The spec of one argument; a tuple for ``*args`` has an entry for each of these."""
    first = names.index(names[place])
    shared = names.count(names[place]) > 1
    is_list = isinstance(spec, tuple | list) and not isinstance(spec, P)
    return spec[place - first] if shared and is_list else spec


def _by_order(
    batch_specs: Any,
    places: list[str],
    names: list[str],
    parameters: Sequence[int],
    kwargs: Mapping[str, Any],
) -> Sequence[Any]:
    """The specs of positional arguments, of a tuple with one for each; one spec is for all."""
    if not isinstance(batch_specs, tuple | list) or isinstance(batch_specs, P):
        return [batch_specs] * len(places)
    if len(batch_specs) != len(places):
        own = ", ".join(repr(names[i]) for i in parameters)
        keywords = f", and the keywords {sorted(kwargs)}" if kwargs else ""
        raise ValueError(
            f"batch_specs has {len(batch_specs)} entries, and the loss got {len(places)} "
            f"positional arguments besides its parameters ({own}): {places}{keywords}; pass one "
            "entry for each of these positional ones in their order, or a dict of specs by the "
            "names of arguments, positional or not"
        )
    return batch_specs


def placed_batch(
    data: Any, told: Sequence[Told], mesh: Mesh | AbstractMesh, axis: Axis
) -> tuple[tuple[P, ...], tuple[bool, ...]]:
    """Each array's spec over the data axes, and whether it is a key that workers fold.

    ``told`` is of every leaf of ``data``. Where no spec is told, arguments that are whole on every
    device are whole if the sharding of others shows that these are split; all other arguments are
    split along their leading axis. Arrays that the loss closes over are split if they have as many
    rows as these.
    """
    arrays = [
        (own, x)
        for own, x in zip(told, jax.tree.leaves(data), strict=True)
        if isinstance(x, ARRAYS)
    ]
    arguments = _placed_arguments([row for row in arrays if not row[0].closed], mesh, axis)
    pairs = zip([x for own, x in arrays if not own.closed], arguments, strict=True)
    rows = {jnp.shape(x)[0] for x, spec in pairs if {*names_of((*spec, None)[0])} & {*axis.names}}
    closed = _placed_closed([row for row in arrays if row[0].closed], rows, mesh, axis)
    specs = iter(arguments), iter(closed)
    folded = tuple(own.spec is None and is_seed(x) for own, x in arrays)
    return tuple(next(specs[own.closed]) for own, _ in arrays), folded


def _placed_arguments(
    arrays: list[tuple[Told, Any]], mesh: Mesh | AbstractMesh, axis: Axis
) -> list[P]:
    """The spec of every argument; warns of arguments that may be no examples."""
    counting = {*axes_above_one(axis.names, mesh.shape)}
    places = [placement_of(x, mesh) for _, x in arrays]
    split_over = [frozenset() if p is None else axes_of(p) & counting for p in places]
    untold = [own.spec is None and bool(jnp.shape(x)) and not is_seed(x) for own, x in arrays]
    known = zip(arrays, untold, split_over, strict=True)
    batch = [jnp.shape(x)[0] for (_, x), is_untold, over in known if is_untold and over]
    specs, gathered, lengths = [], [], {}
    for ((name, spec, _), x), place, over, is_untold in zip(
        arrays, places, split_over, untold, strict=True
    ):
        shape = jnp.shape(x)
        if is_untold:
            _check_untold(name, x, axis)
            if batch and place is not None and not over:
                _warn_of_rows(name, shape, batch, axis)
                spec = P()
            else:
                _warn_of_place(name, place, counting, axis)
                lengths.setdefault(shape[0], shape)
        own = spec if spec is not None else P(axis.name) if is_untold else P()
        _check_divides(name, shape, own, mesh, axis)
        if over and not axes_of(own) and not is_key(x):
            gathered.append(x)
        specs.append(own)
    if len(lengths) > 1:
        warn(
            f"arguments of the loss are split over workers along leading axes of {len(lengths)} "
            f"lengths, as those of shapes {list(lengths.values())[:4]}: are all of them examples? "
            "Say P() in batch_specs for what every worker needs whole, as a frozen model, and a "
            "spec for the others",
        )
    warn_of_gather(
        describe_leaves(gathered),
        f"pass their specs over {axis.names} in batch_specs, and call jax.lax.all_gather in each "
        "layer, or dq.all_gather(compression=dq.DynamiQ(bits=8)) where the mesh has no other axes",
        what="arguments of the loss",
    )
    return specs


def _placed_closed(
    arrays: list[tuple[Told, Any]], rows: set[int], mesh: Mesh | AbstractMesh, axis: Axis
) -> list[P]:
    """The spec of every array that the loss closes over; warns where none is told."""
    untold = {
        own.name: jnp.shape(x)
        for own, x in arrays
        if own.spec is None and jnp.shape(x) and not is_seed(x)
    }
    rows = rows or {shape[0] for shape in untold.values()}
    if untold and len(rows) > 1:
        raise ValueError(
            f"the loss closes over arrays of {sorted(rows)} rows, {list(untold.items())[:6]}: pass "
            f"closed_specs=, a dict by the names of variables: P({axis.name!r}) for those whose "
            "rows are examples, and P() for what every worker needs whole"
        )
    specs = []
    for (name, spec, _), x in arrays:
        shape = jnp.shape(x)
        if name in untold and spec is None:
            _check_untold(name, x, axis)
            spec = P(axis.name) if shape[0] in rows else P()
        own = P() if spec is None else spec
        _check_divides(name, shape, own, mesh, axis)
        specs.append(own)
    split = [name for (name, spec, _), _ in arrays if name in untold]
    if untold:
        found = {own.name: spec for (own, _), spec in zip(arrays, specs, strict=True)}
        warn(
            "the loss closes over arrays of the program around it: "
            f"{ {name: found[name] for name in split[:6]} } is how they are split over workers. "
            "Pass value_and_grad(closed_specs=...) with these specs by the names of variables, or "
            "one for all, or pass the arrays as arguments",
        )
    return specs


def _check_untold(name: str, x: Any, axis: Axis) -> None:
    """Refuses arrays of PRNG keys that would be split over workers."""
    if is_key(x):
        raise ValueError(
            f"the loss's argument {name!r} is an array of PRNG keys, {jax.typeof(x)}: pass "
            f"P({axis.name!r}) in batch_specs if these are one for each example, and P() "
            "if every worker takes all of them"
        )


def _warn_of_rows(name: str, shape: tuple[int, ...], batch: list[int], axis: Axis) -> None:
    """Warns of an array that is whole by its sharding, and may be examples by its shape."""
    if shape[0] in batch:
        warn(
            f"the loss's argument {name!r} has shape {shape}, as many rows as the batch, and its "
            f"sharding is replicated over {axis.names}: every worker gets all of it. Say P() in "
            f"batch_specs if that is right, and P({axis.name!r}) if its rows are examples",
        )


def _warn_of_place(name: str, place: P | None, counting: set[str], axis: Axis) -> None:
    """Warns of an array that is split along its leading axis, and is sharded along another."""
    for dimension, entry in enumerate(place or ()):
        if dimension and counting & {*names_of(entry)}:
            warn(
                f"the loss's argument {name!r} is sharded as {place}, and is split over workers "
                f"along its leading axis: say in batch_specs P({axis.name!r}) if its rows are "
                f"examples, and {place} if each worker takes what it has",
            )


def _check_divides(
    name: str, shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh, axis: Axis
) -> None:
    """Refuses a spec that does not divide the array into equal parts."""
    for dimension, entry in enumerate(spec):
        count = n_parts(names_of(entry), mesh.shape)
        if dimension >= len(shape) or shape[dimension] % count:
            raise ValueError(
                f"batch argument {name} has shape {shape}; its "
                f"dimension {dimension} must be a multiple of the {count} workers on axis "
                f"{axis.name!r}, or its entry in batch_specs P(), to be whole on every worker"
            )
