"""Gradients on meshes of Auto axes: the loss runs mapped over the data axes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis, knows_devices, telling_shardings
from dynamiq_jax.core.compat import assume_invarying, varying_axes
from dynamiq_jax.core.failures import REFUSALS, raised_by_jax
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.constraints import REMEDY, Recorded, lowers_otherwise, record
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.reduction import Reduction, share_of, warn_of_gather, weigh
from dynamiq_jax.reduction.worker_gradients import terms_of
from dynamiq_jax.training.loss import (
    ARRAYS,
    Told,
    Wanted,
    is_key,
    placed_batch,
    reduce_aux,
    reduce_value,
    warn_of_nothing,
    words_of,
)
from dynamiq_jax.training.scans import UNREDUCED, FoundError, Scans, warn_of_scan
from dynamiq_jax.tree.leaves import (
    axes_above_one,
    axes_of,
    constrained,
    describe_leaves,
    flat_specs,
    n_parts,
    names_of,
    part,
    placement_of,
    restrict_spec,
    split_of,
)


class StaticArguments(NamedTuple):
    """The arguments of the loss that are not differentiated, but for the values of arrays."""

    structure: Any
    constants: tuple[tuple[type, str, Hashable] | None, ...]
    """The type, a number's text and the value of each leaf, `None` of an array: 1 equals 1.0 and
    True, and 0.0 equals -0.0, for which programs differ."""

    @classmethod
    def of(cls, data: Any) -> tuple["StaticArguments", list[Any]]:
        """Splits ``data`` into what is known while programs are compiled, and its arrays."""
        leaves, structure = jax.tree.flatten(data)
        constants = []
        for x in leaves:
            if not isinstance(x, ARRAYS) and type(x).__hash__ is None:
                raise ValueError(
                    f"an argument of the loss is {x!r}, a {type(x).__name__}: what is not an array "
                    "is a constant of the program and needs a hash; pass a tuple or a frozenset, "
                    "or close the loss over it"
                )
            text = repr(x) if isinstance(x, float | complex) else ""
            constants.append(None if isinstance(x, ARRAYS) else (type(x), text, x))
        arrays = [x for x in leaves if isinstance(x, ARRAYS)]
        return cls(structure, tuple(constants)), arrays

    def join(self, arrays: list[Any]) -> Any:
        """The arguments, with these arrays."""
        found = iter(arrays)
        leaves = (next(found) if own is None else own[2] for own in self.constants)
        return self.structure.unflatten(leaves)


class _Known(NamedTuple):
    """Static facts of a call, the ones for which a program is compiled."""

    told: StaticArguments
    placed: tuple[P, ...]
    """How every parameter is sharded."""
    split: tuple[P, ...]
    """How every array among the other arguments is split."""
    folded: tuple[bool, ...]
    """Which of these are keys into which workers fold their numbers."""
    asks: bool
    """Whether the program may ask for its devices (`core.axis.knows_devices`)."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AutoGrad:
    """How to differentiate a loss under a map over Auto data axes, and how to sum its gradients.

    Specs and aux are as for `value_and_grad`; loss and weight take ``(params, data)``, and
    ``batch_specs`` gives the name and the spec of every leaf of data (`batches.leaf_specs`).
    With ``wanted.unreduced`` the gradients of all workers are returned stacked, as
    `WorkerTerms`.
    """

    loss: Callable[[Any, Any], Any]
    mesh: Mesh | AbstractMesh
    wanted: Wanted
    specs: Any
    batch_specs: Callable[[Any], list[Told]]
    aux: Any
    weight: Callable[[Any, Any], Any] | None

    @property
    def axis(self) -> Axis:
        """The data axes."""
        return self.wanted.total.axis

    @property
    def counting(self) -> tuple[str, ...]:
        """The data axes of several devices."""
        return axes_above_one(self.axis.names, self.mesh.shape)

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes of several devices."""
        names = [name for name in self.mesh.axis_names if name not in self.axis.names]
        return axes_above_one(names, self.mesh.shape)

    @property
    def manual(self) -> set[str]:
        """The axes of the map."""
        return {*self.mesh.axis_names} - {*self.others}

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """`_mapped` as one program, which is traced once for all calls with the same facts."""
        return jax.jit(self._mapped, inline=True, static_argnames="known")

    def __call__(
        self, params: Any, data: Any, *, key: Array | None = None, state: State | None = None
    ) -> Callable[[], Any]:
        """Checks the arguments, and returns the function that runs."""
        axes, shape = self.axis.names, self.mesh.shape
        told, arrays = StaticArguments.of(data)
        split, folded = placed_batch(data, self.batch_specs(data), self.mesh, self.axis)
        sizes = tuple(shape[name] for name in axes)
        n_workers, shapes = math.prod(sizes), map(jnp.shape, jax.tree.leaves(state))
        if wrong := [own for own in shapes if own[:1] != (n_workers,)]:
            raise ValueError(
                f"state has a leaf of shape {wrong[0]}, whose leading axis is not that of the "
                f"{n_workers} workers; pass dq.Compression(method).init_state(params, "
                f"{sizes if len(sizes) > 1 else n_workers}, stacked=True)"
            )
        hidden = {name: shape[name] for name in self.others}
        placed = _placed(params, self.specs, self.mesh, hidden)
        # Tracers hide how they are sharded. A warning follows at lowering, if it turns out that
        # they are.
        if self.specs is None and self.counting:
            params = self._telling_shards(params)
        placed = tuple(restrict_spec(spec, axes + self.others) for spec in placed)
        if any(split_of(spec, self.counting) for spec in placed):
            self.wanted.total.check_scatter(state, self.wanted.metrics)
            if self.wanted.unreduced:
                raise NotImplementedError(
                    f"parameters are sharded over the data axes {axes}, and with unreduced=True "
                    "every worker would keep whole gradients; leave it out, or replicate "
                    "the parameters over these axes"
                )
        # Facts that change the program and are no arrays: each of them has a program of its own.
        known = _Known(told, placed, split, folded, knows_devices())
        return functools.partial(self.compiled, params, key, state, arrays, known=known)

    def _telling_shards(self, params: Any) -> Any:
        """Parameters of a traced program, of which JAX tells how they are sharded as it lowers."""
        leaves, treedef = jax.tree.flatten(params)
        if not leaves or not all(isinstance(x, Tracer) for x in leaves):
            return params
        note = _Shards(tuple((x.path, x.nbytes) for x in describe_leaves(params)), self.counting)
        return treedef.unflatten(telling_shardings(note, leaves))

    def _mapped(self, params: Any, key: Any, state: Any, arrays: list, *, known: _Known) -> Any:
        """The value and the gradients of global arrays."""
        axis, others, placed = self.axis, self.others, known.placed
        tree = jax.tree.structure(params)
        # Leaves are cut over data axes by `mine`, and over the others by `opened`.
        mine = [_apart(spec, axis.names) for spec in placed]
        opened = [restrict_spec(spec, others) for spec in placed]
        total = self.wanted.total.with_specs(tree.unflatten(opened))
        total = total.placed(mine, over=self.counting, opened=opened)
        params = self._gathered(params, placed, opened, key)
        of_workers = P(axis.name)
        of_grads = tree.unflatten(restrict_spec(spec, axis.names) for spec in mine)
        # Unreduced gradients have a leading axis of workers; reduced ones lie as parameters do.
        of_found: Any = Reduced(of_workers if self.wanted.unreduced else of_grads, of_workers, P())  # type: ignore[arg-type]

        def traced(recorded: Recorded | None) -> Any:
            mapped = jax.shard_map(
                functools.partial(self._of_worker, known, total, recorded),
                mesh=self.mesh,
                axis_names=self.manual,
                in_specs=(P(), P(), of_workers, list(known.split)),
                out_specs=(P(), (P(), of_workers), of_found),
            )
            # The program comes first: checks read it, and the loss is traced once.
            return jax.make_jaxpr(mapped, return_shape=True)(*given)

        given = params, key, state, arrays
        types = self._types_of_worker(known, params, arrays)
        try:
            program, shapes = traced(None)
            # JAX would refuse this one when it lowers it, where nobody can catch the error.
            if lowers_otherwise(program):
                program, shapes = traced(self._recorded(known.told, types, None))
        except _RefusedError as refused:
            program, shapes = traced(self._recorded(known.told, types, refused.__cause__))
        if self.wanted.has_aux and self.counting:
            warn_of_nothing(program, shapes, axis)
        results = jaxpr_as_fun(program)(*jax.tree.leaves(given))
        value, aux, found = jax.tree.structure(shapes).unflatten(results)
        if others:
            leading = (axis.name,) if self.wanted.unreduced else ()
            # The map knows nothing of other axes, and the compiler is free to gather over them.
            specs = [P(*leading, *spec) for spec in placed]
            found = found._replace(tree=constrained(found.tree, self.mesh, specs))
        if self.wanted.has_aux:
            # Aux comes as two trees, of what is alike and of rows: each leaf is in one of them.
            is_none = lambda x: x is None
            value = value, jax.tree.map(lambda a, b: b if a is None else a, *aux, is_leaf=is_none)
        if self.wanted.unreduced:
            return value, terms_of(found.tree, self.mesh, axis.names, opened)
        return value, found if self.wanted.metrics or state is not None else found.tree

    def _gathered(
        self, params: Any, placed: tuple[P, ...], opened: list[P], key: Array | None
    ) -> Any:
        """Parameters that are whole over the data axes; warns of many bytes."""
        leaves, own = zip(describe_leaves(params), placed, opened, strict=True), {*self.counting}
        gathered = [part(x, rest, self.mesh.shape) for x, p, rest in leaves if axes_of(p) & own]
        remedy = "differentiate under jax.shard_map and call dq.fsdp in each layer"
        warn_of_gather(gathered, remedy)
        if gathered and self.wanted.gathers is not None:
            params = self.wanted.whole(params, placed, self.mesh, key)
        # Without a constraint the compiler would gather over all axes.
        return constrained(params, self.mesh, opened) if gathered and self.others else params

    def _of_worker(
        self,
        known: _Known,
        total: Reduction,
        recorded: Recorded | None,
        params: Any,
        key: Any,
        state: Any,
        arrays: list,
    ) -> tuple[Array, tuple[Any, Any], Reduced]:
        """The value and aux of all workers, and the gradients' sum or this worker's term of it."""
        axis, op, told = self.axis, total.op, known.told
        # Else JAX would sum the gradients itself, exactly.
        params = axis.to_varying(params)
        pairs = zip(arrays, known.folded, strict=True)
        # Each worker draws numbers of its own, as for other rows of a batch.
        arrays = [jax.random.fold_in(x, axis.index) if folds else x for x, folds in pairs]
        reduced = frozenset[int]()
        if recorded is not None:
            (value, aux), grads, weight = _run_recorded(recorded, params, arrays)
        else:
            scans = Scans(total, key, self._alone(known, state), mapped=True)
            try:
                results, reduced = self._in_scans(scans, told, params, arrays)
            except REFUSALS as error:
                # Of types, such as a constant as first carry, or a key beside varying arguments.
                if not raised_by_jax(error):
                    raise
                raise _RefusedError from error
            (value, aux), grads, weight = results
        share = None if weight is None else share_of(weight, axis)
        splits = zip(arrays, known.split, strict=True)
        rows = {x.shape[0] for x, spec in splits if {*names_of((*spec, None)[0])} & {*axis.names}}
        words = words_of(aux, self.aux, op, rows)
        self._warn_of_types(told, recorded, params, arrays, (value, aux), words)
        terms = _equal_losses(value, axis, share)
        # If a psum in the loss made it one loss of several workers, their gradients are its terms:
        # these add up, and the mean would divide by their number.
        if op == "mean":
            grads = jax.tree.map(lambda x: weigh(x, share) if terms == 1 else terms * x, grads)
        if not self.wanted.unreduced:
            own = jax.tree.map(lambda x: x[0], state)
            told_rest = {"key": key, "state": own, "metrics": self.wanted.metrics}
            found = _reduced_rest(total, grads, reduced, **told_rest)
        else:
            # Terms are added up later, also those of a mean.
            scale = 1 / axis.size if op == "mean" else 1
            found = Reduced(jax.tree.map(lambda x: (scale * x)[None], grads), None, None)
        after = jax.tree.map(lambda x: axis.to_varying(x)[None], found.state)
        aux = reduce_aux(aux, words, share, axis)
        value = reduce_value(value, op, share, axis)
        value = value / terms if op == "sum" else value  # every one of ``terms`` workers had it
        return value, aux, found._replace(state=after)

    def _differentiated(
        self, told: StaticArguments, params: Any, arrays: list
    ) -> tuple[Any, Any, Any]:
        """((value, aux), the gradients, the weight) of one worker."""
        data = told.join(arrays)
        found = lambda params: self.wanted.apart(self.loss(params, data))
        value, grads = jax.value_and_grad(found, has_aux=True)(params)
        # Outside of the derivative: a weight has no gradient.
        weight = None if self.weight is None else self.weight(params, data)
        return value, grads, weight

    def _in_scans(
        self, scans: Scans, told: StaticArguments, params: Any, arrays: list
    ) -> tuple[Any, frozenset[int]]:
        """The results of `_differentiated`, and the leaves whose gradients scans have reduced."""
        try:
            with scans.trace("stops"):
                return self._differentiated(told, params, arrays), frozenset()
        except FoundError:
            pass  # as an error of the next trace has nothing to do with it

        def alone(params: Any, arrays: list) -> Any:
            return self.wanted.apart(self.loss(params, told.join(arrays)))[0]

        reduced = scans.leaves(alone, params, arrays)
        with scans.trace("exchanges" if reduced else "plain"):
            return self._differentiated(told, params, arrays), reduced

    def _alone(self, known: _Known, state: Any) -> str:
        """Why scans in the loss exchange nothing, or ""."""
        reasons = {
            "weight= scales gradients after it; pass op='sum', and divide in the loss": self.weight,
            "a method with a state has nowhere to keep it there": state is not None,
            "metrics=True are those of all gradients": self.wanted.metrics,
            "parameters are sharded over data axes, and gathered before the loss; call jax.grad "
            "under jax.shard_map, and dq.scan(specs=...) in the loss": any(
                split_of(spec, self.counting) for spec in known.placed
            ),
        }
        if self.wanted.unreduced:
            return UNREDUCED
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def _types_of_worker(self, known: _Known, params: Any, arrays: list) -> Any:
        """The types of the parameters and of one worker's part of the other arrays."""

        def own(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            kind = type_of(x)
            counts = [n_parts(names_of(entry), self.mesh.shape) for entry in spec]
            counts += [1] * (len(kind.shape) - len(counts))
            pairs = zip(kind.shape, counts, strict=True)
            return kind.update(shape=tuple(length // count for length, count in pairs))

        pairs = zip(arrays, known.split, strict=True)
        return jax.tree.map(type_of, params), [own(x, spec) for x, spec in pairs]

    def _recorded(
        self, told: StaticArguments, types: Any, error: BaseException | None
    ) -> Recorded | None:
        """The loss and its derivative, traced where the data axes are automatic.

        If that does not go, raises JAX's error, which the map is no reason for; without an error
        returns `None`.
        """
        names = sorted(self.manual)
        scans = Scans(self.wanted.total, None, mapped=True)
        try:
            function = functools.partial(self._differentiated, told)
            with scans.trace("plain"):
                recorded = record(function, types, self.mesh, self.axis, names)
            # Outside of the map scans reduce nothing.
            if scans.calls:
                warn_of_scan(
                    "the loss is traced outside of a map, since JAX refuses something in it there, "
                    f"such as a sharding constraint: {error and error.__cause__ or error}"
                )
        except Exception as other:
            if error is None:
                return None
            error.add_note(
                f"The loss runs under a map over {names}. Traced outside of it, it "
                f"raises {type(other).__name__}: {other}. If it constrains arrays, {REMEDY}"
            )
            raise error from other
        return recorded

    def _warn_of_types(
        self,
        told: StaticArguments,
        recorded: Recorded | None,
        params: Any,
        arrays: list,
        results: tuple[Any, Any],
        words: list[str],
    ) -> None:
        """Warns of a loss without examples, and of aux that is "same" and of each worker's own.

        The loss is traced once more if its types leave room for either.
        """
        axis = Axis(self.counting)
        if not self.counting:
            return
        value, aux = results[0], jax.tree_util.tree_leaves_with_path(results[1])
        # The loss varies only because parameters are typed so: it may have no examples at all.
        unsplit = all(map(axis.replicates, arrays)) and not axis.replicates(value)
        pairs = zip(aux, words, strict=True)
        doubtful = [word == "same" and not axis.replicates(x) for (_, x), word in pairs]
        if not unsplit and not any(doubtful):
            return
        if recorded is None:
            known = same_everywhere(lambda p, x: self.loss(p, told.join(x)), params, arrays, axis)
        else:
            none = jax.tree.map(lambda _: frozenset(), params)
            # Parameters count as the same on all workers here, which they are.
            own = recorded.varying(none, list(map(varying_axes, arrays)))[0]
            known = [names.isdisjoint(axis.names) for names in jax.tree.leaves(own)]
        if unsplit and known is not None and known[0]:
            warn(
                f"all workers on axis {axis.name!r} compute the same loss: no argument is split "
                "over them. Arrays that the loss closes over are whole on every worker; pass the "
                "batch as an argument",
            )
        is_same = known[1:] if known is not None else [False] * len(aux)
        rows = zip(aux, doubtful, is_same, strict=True)
        own = [jax.tree_util.keystr(path) for (path, _), doubt, ok in rows if doubt and not ok]
        if own:
            warn(
                f"aux='same' of leaves {own[:4]}: JAX's types do not tell that all workers have "
                "the same, as of statistics of each worker's own examples, and copies on devices "
                f"may differ. Average them in the loss, by axis_name={axis.name!r} of a BatchNorm "
                "or by jax.lax.pmean, or pass another word",
            )


def same_everywhere(
    function: Callable[..., Any], params: Any, arrays: Any, axis: Axis
) -> list[bool] | None:
    """For each result of ``function(params, arrays)``, whether all workers have the same by type.

    Here it knows this for the parameters, although they are typed as varying so that their
    gradients are terms. A result that depends on a worker's own examples, number or keys is not the
    same, unless a `psum` or the like has made it so. `None` if the function cannot be traced with
    parameters of that type, such as a scan with a parameter as its first carry.
    """
    is_same: list[bool] = []

    def run(params: Any, arrays: Any) -> None:
        own = jax.tree.map(axis.assume_invarying, params)
        results = jax.tree.leaves(function(own, arrays))
        is_same.extend(axis.replicates(x) for x in results)

    try:
        jax.make_jaxpr(run)(params, arrays)
    except (TypeError, ValueError):
        return None
    return is_same


class _Shards(NamedTuple):
    """Warns of parameters that data axes shard, where no specs tell it while JAX traces."""

    leaves: tuple[tuple[str, int], ...]
    """The path and the bytes of every parameter."""
    axes: tuple[str, ...]

    def __call__(self, found: list[frozenset[str]]) -> None:
        pairs = zip(self.leaves, found, strict=True)
        # Called by JAX as it lowers, when shardings are known.
        shards = [leaf for leaf, own in pairs if own & {*self.axes}]
        if not shards:
            return
        names = ", ".join(path for path, _ in shards[:4])
        warn(
            f"{len(shards)} parameters ({names}{', ...' * (len(shards) > 4)}) are sharded over the "
            f"data axes {self.axes} outside of jax.jit, and no specs= tell it inside: every device "
            f"gathers {sum(nbytes for _, nbytes in shards):,} bytes, and gets whole gradients. "
            "Pass value_and_grad(specs=jax.tree.map(lambda x: x.sharding.spec, params)), or "
            "specs=P() if that is meant",
        )


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    """The type of an array, without its sharding."""
    own = jax.typeof(x)
    return jax.ShapeDtypeStruct(own.shape, own.dtype, weak_type=own.weak_type)


def _reduced_rest(total: Reduction, grads: Any, done: frozenset[int], **told: Any) -> Reduced:
    """The reduced gradients, of which scans in the backward pass have reduced those ``done``."""
    if not done:
        key, state, metrics = told["key"], told["state"], told["metrics"]
        return total.reduce(grads, key, state, metrics=metrics)
    leaves, treedef = jax.tree.flatten(grads)
    rest = [i for i in range(len(leaves)) if i not in done]
    # `None` in the place of what scans have reduced: paths of the others stay what they are.
    of_rest = lambda found: treedef.unflatten(None if i in done else x for i, x in enumerate(found))
    specs = total.placement.specs
    if rest:
        own = total.with_specs(of_rest(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))))
        found = jax.tree.leaves(own.some(rest).reduce(of_rest(leaves), told["key"]).tree)
        for i, x in zip(rest, found, strict=True):
            leaves[i] = x
    # Scans return the same bits on all workers, and types do not show it.
    leaves = [total.axis.assume_invarying(x) if i in done else x for i, x in enumerate(leaves)]
    return Reduced(treedef.unflatten(leaves), None, None)


class _RefusedError(Exception):
    """JAX refuses a loss under the map; its cause is JAX's error."""


def _run_recorded(recorded: Recorded, params: Any, arrays: list) -> tuple[Any, Any, Any]:
    """((value, aux), the gradients, the weight) of one worker, by a recorded derivative.

    Value and aux are typed as under the map. Outside of maps the derivative of a `psum` is one of
    the sum of all workers' losses. So gradients are divided by how many of these are one.
    """
    results, grads, weight = recorded.run(params, arrays)
    names = recorded.axis.names
    own = list(map(varying_axes, arrays))
    # Parameters are typed as varying, for their gradients' sake. A choice by them is the same.
    every, none = (jax.tree.map(lambda _, x=x: frozenset(x), params) for x in (names, ()))
    typed_so = recorded.varying(every, own, choices=False)[0], recorded.varying(none, own)[0]
    varies = jax.tree.map(frozenset.union, *typed_so)

    def typed(x: Array, own: frozenset[str]) -> Array:
        return assume_invarying(x, tuple(name for name in names if name not in own))

    value, aux = jax.tree.map(typed, results, varies)
    same = [name for name in names if name not in varies[0]]
    count = math.prod(map(lax.axis_size, same))
    grads = jax.tree.map(lambda x: x / count, grads) if count > 1 else grads
    return (value, aux), grads, weight


def check_closure(constants: Sequence[Any]) -> None:
    """Refuses a loss that uses arrays of the program around it, which no argument replaces."""
    used = [x for x in constants if isinstance(x, Tracer)]
    found = [str(jax.typeof(x)) for x in used if jnp.ndim(x) or is_key(x)]
    if found:
        raise ValueError(
            f"the loss closes over {len(found)} arrays of the traced program around it "
            f"({', '.join(found[:4])}) in a place that cannot be found, such as a function of "
            "jax.jit or a global variable, and every worker would use all of each. Pass them as "
            "arguments: the leading axis of an argument is split over workers, and its entry P() "
            "in batch_specs leaves it whole. Keys become each worker's own then"
        )


def _equal_losses(value: Array, axis: Axis, share: Array | None) -> int:
    """How many workers have the same loss, by a `psum` in it: their gradients are terms."""
    same = [name for name in axis.names if name not in varying_axes(value)]
    count = math.prod(map(lax.axis_size, same))
    if count > 1 and share is not None:
        raise ValueError(
            f"weight= is for a loss of each worker's own examples, and this one is the same on the "
            f"{count} workers of axes {tuple(same)}, as a psum or pmean in it makes it; leave "
            "weight= out, or the reduction"
        )
    return count


def _placed(
    params: Any, specs: Any, mesh: Mesh | AbstractMesh, hidden: dict[str, int]
) -> tuple[P, ...]:
    """How every parameter is sharded over the mesh; over hidden axes tracers do not show it."""
    leaves = jax.tree.leaves(params)
    if specs is None and hidden and any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            f"how parameters are sharded over the automatic axes {hidden} cannot be seen inside "
            "jax.jit; pass value_and_grad(specs=jax.tree.map(lambda x: x.sharding.spec, params)), "
            "or specs=P() if they are replicated"
        )
    # An array that is not on this mesh yet goes there whole.
    found = (placement_of(x, mesh) or P() for x in leaves)
    placed = tuple(found if specs is None else flat_specs(specs, params, mesh.axis_names))
    for leaf, spec in zip(describe_leaves(params), placed, strict=True):
        part(leaf, spec, mesh.shape)  # refuses what does not fit
    return placed


def _apart(spec: P, axes: tuple[str, ...]) -> P:
    """The spec without the data axes of dimensions that others split, too.

    Over these the compiler gathers the leaf, and splits its gradient: the devices of one worker
    hold a slice in parts, and the parts of all slices, one after the other, are out of order.
    """
    shared = ({*names_of(entry)} - {*axes} for entry in spec)
    entries = zip(spec, shared, strict=True)
    return P(*(tuple(n for n in names_of(e) if n in own or not own) for e, own in entries))
