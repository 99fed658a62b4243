"""A loss: which arguments are differentiated, how its batch is split, and what it returns.

*Wanted*: the arguments that `value_and_grad` differentiates, and the results that it returns.
*Batches*: how the arguments of a loss are split over the workers of Auto data axes. *Auxiliary
results* of losses on Auto axes: one word for each leaf says how workers combine it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import Compression
from dynamiq_jax.core.axis import Axis, key_words
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.constraints import reduced_from_nothing
from dynamiq_jax.reduction.explicit_sums import gather_whole
from dynamiq_jax.reduction.reduction import Reduction, warn_of_gather, weigh
from dynamiq_jax.tree.leaves import (
    axes_above_one,
    axes_of,
    describe_leaves,
    flat_specs,
    misfit_of,
    n_parts,
    names_of,
    placement_of,
    restrict_spec,
)

# --- Parameters and results -----------------------------------------------------------------------


class Wanted(NamedTuple):
    """The parameters that are differentiated and the results, on axes of either type."""

    total: Reduction
    argnums: int | tuple[int, ...]
    has_aux: bool
    metrics: bool
    unreduced: bool
    ungathered: bool
    allow_int: bool = False
    gathers: Compression | None = None
    """How shards travel that are gathered before the loss; `None`: natively."""

    def whole(self, shards: Any, specs: Sequence[P], mesh: Any, key: Array | None) -> Any:
        """Whole leaves of shards, which `gathers` compresses; others pass.

        Shards are global arrays, as everywhere outside of maps, and have no derivatives.
        """
        total = dataclasses.replace(self.total, gathers=self.gathers)
        over = axes_above_one(total.axis.names, mesh.shape)
        return gather_whole(total.placed(specs, over=over), mesh, shards, specs, key_words(key))

    @property
    def positions(self) -> "_Positions":
        """Which positional arguments are parameters."""
        return _Positions(self.argnums)

    def joined(self, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """``function`` of parameters and of ``(other positional arguments, keywords)``.

        With ``allow_int`` these end with the parameters' integers.
        """
        if not self.allow_int:
            return self.positions.joined(function)
        whole = () if self.ungathered else self.total.axis.names
        return _with_integers(self.positions, whole, function)

    def apart(self, found: Any) -> tuple[Array, Any]:
        """The loss as an array, and aux, of what the loss function returns; refuses other forms."""
        if self.has_aux and not (isinstance(found, tuple | list) and len(found) == 2):
            raise TypeError(
                f"has_aux=True, and the loss function returns {_form(found)}; return (loss, aux)"
            )
        value, aux = found if self.has_aux else (found, None)
        if isinstance(value, tuple | list | Mapping) or value is None:
            raise TypeError(
                f"the loss is {_form(value)}; return a scalar, or (loss, aux) with has_aux=True"
            )
        value = jnp.asarray(value)
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"the loss has shape {value.shape} and dtype {value.dtype}; return a scalar of "
                "floating-point numbers, such as the mean over all examples"
            )
        return value, aux

    def check(self, weight: Callable[..., Any] | None) -> None:
        """Refuses what does not go together."""
        if weight is not None and not callable(weight):
            raise ValueError(
                f"weight={weight!r} is no function; pass one of the loss's arguments, such as "
                "lambda params, batch: batch['mask'].sum()"
            )
        if self.total.op == "sum" and weight is not None:
            raise ValueError(
                "op='sum' and weight=: weights are for the mean of means; leave one of them out"
            )
        if self.allow_int and self.unreduced:
            raise ValueError(
                "unreduced=True and allow_int=True: gradients of integers have dtype float0, which "
                "no reduction takes; pass integers in an argument of the loss that argnums= does "
                "not name"
            )


def _form(value: Any) -> str:
    """The type of a result, in words, and its length."""
    sized = isinstance(value, tuple | list | Mapping)
    return f"a {type(value).__name__}" + (f" of {len(value)}" if sized else "")


class _Positions(NamedTuple):
    """The positional arguments that are parameters, by one index or several, also negative ones."""

    argnums: int | tuple[int, ...]

    def among(self, count: int) -> list[int]:
        """The indices of the parameters, for this number of arguments."""
        numbers = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        # -1 and the last number are the same argument.
        if len({i % count for i in numbers if -count <= i < count}) < len(numbers):
            raise ValueError(
                f"argnums={self.argnums!r}, and the loss got {count} positional arguments; pass "
                "each number once, and parameters by position"
            )
        return [i % count for i in numbers]

    def split(self, args: tuple) -> tuple[Any, tuple]:
        """The parameters, and the other arguments."""
        numbers = self.among(len(args))
        params = tuple(args[i] for i in numbers)
        others = tuple(x for i, x in enumerate(args) if i not in numbers)
        return params[0] if isinstance(self.argnums, int) else params, others

    def joined(self, function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """``function`` of parameters and ``(other positional arguments, keywords)``."""

        def run(params: Any, data: tuple[tuple, dict[str, Any]]) -> Any:
            params = (params,) if isinstance(self.argnums, int) else params
            args = list(data[0])
            numbers = self.among(len(params) + len(args))
            # From the first on, so that later positions are those of the whole list.
            for i in sorted(numbers):
                args.insert(i, params[numbers.index(i)])
            return function(*args, **data[1])

        return run


def apart(params: Any) -> tuple[Any, Any]:
    """The leaves with gradients, and the other leaves, in trees with `None` for the rest."""
    moves = lambda x: jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
    return (
        jax.tree.map(lambda x: x if moves(x) else None, params),
        jax.tree.map(lambda x: None if moves(x) else jnp.asarray(x), params),
    )


def together(tree: Any, rest: Any) -> Any:
    """The tree that `apart` split into these two."""
    return jax.tree.map(lambda x, y: y if x is None else x, tree, rest, is_leaf=lambda x: x is None)


def _with_integers(
    positions: _Positions, axes: tuple[str, ...], function: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    """A ``function`` of parameters and of data that end with the parameters' integers.

    Integers that are sharded over these axes, according to their types, are gathered.
    """
    run = positions.joined(function)

    def whole(x: Any) -> Any:
        found = jax.typeof(x).sharding
        if not axes_of(found.spec) & {*axes}:
            return x
        return jax.reshard(
            x, restrict_spec(found.spec, [n for n in found.mesh.axis_names if n not in axes])
        )

    return lambda params, data: run(together(params, jax.tree.map(whole, data[2])), data[:2])


# --- Batches --------------------------------------------------------------------------------------


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
    except (TypeError, ValueError):  # builtins may have no signature
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
    of_leaves: list[Told] = []
    for (name, value), spec in zip(own, told, strict=True):
        try:
            flat = flat_specs(spec, value, axis.names, untold=untold)
        except ValueError as error:
            raise ValueError(f"batch_specs of the loss's argument {name!r}: {error}") from None
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
        of_leaves += [
            Told(name + jax.tree_util.keystr(path), None if s == untold else s)
            for path, s in zip(paths, flat, strict=True)
        ]
    return of_leaves


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
    # Lengths of the batch, by which closed arrays are recognised as examples.
    rows = {jnp.shape(x)[0] for x, spec in pairs if {*names_of((*spec, None)[0])} & {*axis.names}}
    closed = _placed_closed([row for row in arrays if row[0].closed], rows, mesh, axis)
    specs = iter(arguments), iter(closed)
    # A spec is the user's word that workers take a key as it is.
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
            # Others show that the batch is split, so this array is whole on purpose, or by mistake
            # if it has as many rows.
            if batch and place is not None and not over:
                _warn_of_rows(name, shape, batch, axis)
                spec = P()
            else:
                _warn_of_place(name, place, counting, axis)
                # Examples have one number of rows; several numbers make a warning.
                lengths.setdefault(shape[0], shape)
        own = spec if spec is not None else P(axis.name) if is_untold else P()
        _check_divides(name, shape, own, mesh, axis)
        # It is split over data axes where it lies, and the loss takes it whole.
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
    # Without arguments that are split, closed arrays of one length are the batch.
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


# --- Auxiliary results ----------------------------------------------------------------------------


def words_of(aux_tree: Any, told: Any, op: Op, rows: Collection[int]) -> list[str]:
    """The word of every leaf of one worker's aux, which has these numbers of ``rows``.

    Without a word, scalars of floating-point numbers are reduced like the loss. Integers are
    summed and arrays of rows are joined, with a warning.
    """
    paths = jax.tree_util.tree_leaves_with_path(aux_tree)
    try:
        given = _spread(told, aux_tree)
    except ValueError:  # of trees that do not match, which the new message locates
        raise ValueError(
            f"aux={told!r} does not fit the loss's aux: {misfit_of(told, aux_tree)}; pass a word "
            "for every leaf, one for all, or a dict of some keys"
        ) from None
    words, guessed = [], {}
    for (path, x), word in zip(paths, given, strict=True):
        kind = jax.typeof(x)
        if word is None and kind.shape[:1] and kind.shape[0] in rows:
            guessed[jax.tree_util.keystr(path)] = word = "rows"
        elif word is None and kind.shape == () and jnp.issubdtype(kind.dtype, jnp.integer):
            guessed[jax.tree_util.keystr(path)] = word = "sum"
        elif word is None and kind.shape == () and jnp.issubdtype(kind.dtype, jnp.inexact):
            word = op
        if word not in ("mean", "sum", "rows", "same"):
            raise ValueError(
                f"aux leaf {jax.tree_util.keystr(path)} is {kind} on every worker, and aux="
                f"{word!r} does not say what it is for all: pass value_and_grad(aux=...), a tree "
                "like it of 'mean', 'sum', 'rows' (every worker's, one after the other), or 'same' "
                "(on all workers)"
            )
        words.append(word)
    if guessed:
        warn(
            f"aux has no words for leaves that are no scalars of floating-point numbers: {guessed} "
            "is what they are taken for. Pass value_and_grad(aux=...) with these words, or 'same' "
            "for what all workers have"
        )
    return words


def _spread(told: Any, tree: Any) -> list[Any]:
    """The word of every leaf of ``tree``; `None` where ``told``, a prefix of it, has none."""
    if told is None or isinstance(told, str):
        return [told] * len(jax.tree.leaves(tree))
    if isinstance(told, Mapping) and isinstance(tree, Mapping):
        if unknown := [key for key in told if key not in tree]:
            raise ValueError(f"{unknown[0]!r} is not a key of aux")
        told = {key: told.get(key) for key in tree}
    is_branch = lambda x: x is not told and x is not tree
    words, parts = (jax.tree.flatten(x, is_leaf=is_branch) for x in (told, tree))
    if words[1] != parts[1]:
        raise ValueError(f"{words[1]} is not {parts[1]}")
    pairs = zip(words[0], parts[0], strict=True)
    return [word for own, part in pairs for word in _spread(own, part)]


def reduce_aux(aux: Any, words: list[str], share: Array | None, axis: Axis) -> tuple[Any, Any]:
    """Leaves of aux that are the same on all workers, and rows; `None` where the other has one."""
    leaves, treedef = jax.tree.flatten(aux)
    pairs = [(x, word, word == "rows") for x, word in zip(leaves, words, strict=True)]
    alike = (None if row else reduce_value(x, word, share, axis) for x, word, row in pairs)
    rows = (axis.to_varying(x) if row else None for x, _, row in pairs)
    return treedef.unflatten(alike), treedef.unflatten(rows)


def reduce_value(x: Any, word: str, share: Array | None, axis: Axis) -> Array:
    """One value of all workers; sums and means of low precision are taken in f32."""
    x = axis.to_varying(jnp.asarray(x))
    if word == "same":
        return axis.assume_invarying(x)
    # A collective in bf16 would round after every addition.
    low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    wide = x.astype(jnp.float32) if low else x
    if word == "sum":
        return axis.psum(wide).astype(x.dtype)
    return axis.pmean(weigh(wide, share)).astype(x.dtype)


def warn_of_nothing(program: Any, shapes: tuple[Any, tuple[Any, Any], Any], axis: Axis) -> None:
    """Warns of aux that is reduced from arrays without entries, if the loss is not.

    ``program`` returns the value, aux as from `reduce_aux`, and more; ``shapes`` is a tree like its
    results.
    """
    empty = reduced_from_nothing(program)
    value, aux, _ = jax.tree.structure(shapes).unflatten(empty)
    paths = [path for part in aux for path, own in jax.tree_util.tree_leaves_with_path(part) if own]
    if not paths or value:
        return
    names = [jax.tree_util.keystr(path) for path in paths]
    warn(
        f"aux leaves {names[:4]} are sums or means over no entries on every worker of axis "
        f"{axis.name!r}, and such a mean is NaN: a worker has its own examples alone, of which a "
        "slice by the size of the whole batch leaves none. Return all rows with the word 'rows', "
        "and slice them after the call",
    )
