"""Sharded updates (ZeRO-1): every worker updates its slices of the parameters.

All workers hold the same *copy* of the parameters. The owner of a slice holds an f32 *master* of it
and the inner optimizer's state for it. Gradients are scattered to the owners. An owner updates its
masters and encodes their difference from the copy. All workers, including the owner, add the
decoded difference to the copy. The error of an encoding is part of the next difference: this is
error feedback without a separate memory.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression.compression import (
    AnyPolicy,
    Compression,
    as_compression,
    as_parameters,
)
from dynamiq_jax.compression.shards import divisions, gathers_of
from dynamiq_jax.core.axis import (
    Axis,
    AxisName,
    auto_mesh_of,
    check_key,
    fold_seed,
    is_explicit,
    is_outside,
    is_traced,
    key_words,
    mesh_of,
    meshes_of,
    resharded,
    set_around,
    set_of_leaves,
    together,
)
from dynamiq_jax.core.checks import Op, axis_sizes, check_axis, check_is_mesh, checked
from dynamiq_jax.core.fingerprint import assert_same_on_workers
from dynamiq_jax.core.warned import warn
from dynamiq_jax.former import formerly
from dynamiq_jax.jaxprs.elementwise import on_slices, whole_arrays
from dynamiq_jax.jaxprs.owners import Owners
from dynamiq_jax.optax.outside import on_auto_axes, on_explicit_axes
from dynamiq_jax.optax.state import (
    Part,
    PerWorker,
    check_deferred,
    check_wrappers,
    known_sizes,
    placed_state,
)
from dynamiq_jax.reduction.reduction import Pending, Reduction, errors_return, own_slice, sent_of
from dynamiq_jax.reduction.worker_gradients import has_terms, is_terms
from dynamiq_jax.tree.leaves import (
    Padding,
    axes_of,
    constrained,
    describe_leaves,
    flat_specs,
    name_of,
    names_of,
    padding_of,
    placement_of,
    shown,
    split_of,
    whole_shape,
)


class Sent(NamedTuple):
    """The copy as the last update left it: masters follow what changes it afterwards."""

    step: PerWorker
    """The value of ``step`` after that update, int32[n] for n workers. Copies of another step, as
    in a new state, say nothing."""
    copies: Any
    """This worker's slices of the copy, in the parameters' dtypes; `None` if differences are
    deferred, since the copy then moves after the update."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("step", "skipped", "masters", "inner", "sent", "pending"),
        *("norm", "skipped_in_a_row"),
    ),
    meta_fields=("splits", "padding"),
)
@dataclasses.dataclass(frozen=True)
class ShardedState(Part):
    """The state of `sharded` in ``opt_state``.

    Outside of maps, and in checkpoints, arrays have their whole shapes, sharded over the workers.
    Inside a map they are this worker's slices.

    Attributes:
      step: the number of updates so far, including skipped ones, int32.
      skipped: the number of updates that were skipped, since the gradient was not finite, int32.
      masters: the parameters in f32, padded; `unpadded` removes the zeros.
      inner: the inner optimizer's state for the masters, padded in the same way.
      sent: the copy's slices after the last update, padded like masters; see `Sent`.
      splits: how mesh axes split every leaf of ``(masters, inner)``.
      padding: the zeros at the end of each of these leaves.
      pending: with ``deferred=True``, the differences that the next step gathers, else `None`.
      norm: the norm of the last update's mean gradient over all parameters, before clipping, f32;
        infinite or NaN if that update was skipped, and 0 before the first update.
      skipped_in_a_row: the number of consecutive updates that were skipped last, int32; 0 after an
        update that was not skipped. Like ``norm`` it is `None` in a state of an earlier version,
        which continues without both; `restore_state` adds them.
    """

    later = "norm", "skipped_in_a_row", "sent"
    former = ("gaps",)

    step: Any
    skipped: Any
    masters: Any
    inner: Any
    sent: Sent
    splits: tuple[P, ...]
    padding: tuple[Padding, ...]
    pending: Pending | None = None
    norm: Any = None
    skipped_in_a_row: Any = None

    def specs(self) -> "ShardedState":
        """See `Part`."""
        treedef = jax.tree.structure((self.masters, self.inner))
        masters, inner = treedef.unflatten(self.splits)
        # Copies have a tree of their own: nnx.state takes one variable only once.
        copies = None if self.sent.copies is None else treedef.unflatten(self.splits)[0]
        sent = Sent(self.sent.step.specs(), copies)
        told = {"masters": masters, "inner": inner, "sent": sent}
        alike = "step", "skipped", "pending", "norm", "skipped_in_a_row"  # on all workers
        told |= {name: jax.tree.map(lambda _: P(), getattr(self, name)) for name in alike}
        return dataclasses.replace(self, **told)

    def shapes(self) -> dict[tuple[Any, ...], tuple[int, ...]]:
        """See `Part`."""
        key, copies = jax.tree_util.GetAttrKey, self.sent.copies
        fields = [("masters", self.masters), ("inner", self.inner), ("sent/copies", copies)]
        paths = [
            ((*map(key, names.split("/")), *path), x.shape)
            for names, tree in fields
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        ]
        again = self.padding[: len(jax.tree.leaves(copies))]
        pairs = zip(paths, (*self.padding, *again), strict=True)
        return {path: padding.shape_of(shape) for (path, shape), padding in pairs}

    def unpadded(self) -> Any:
        """Returns the masters in the parameters' own shapes; call it outside of maps."""
        leaves, treedef = jax.tree.flatten(self.masters)
        padding = self.padding[: len(leaves)]
        return treedef.unflatten(
            p.cut(_whole_along(x, p.dimension) if p.zeros else x)
            for p, x in zip(padding, leaves, strict=True)
        )


def _whole_along(x: Array, dimension: int) -> Array:
    """``x``, on Explicit axes not sharded along a dimension, whose new length may not divide."""
    sharding = jax.typeof(x).sharding
    # On Auto axes the compiler pads by itself.
    if not is_explicit(sharding.mesh):
        return x
    entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    entries[dimension] = None
    return resharded(x, sharding.mesh, P(*entries))


@formerly(differences=as_parameters)
def sharded(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    max_norm: float | None = None,
    key: Array | None = None,
    specs: Any = None,
    check_every: int = 0,
    deferred: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that each worker updates its slices (ZeRO-1).

    Clip by norm with ``max_norm=``: a clip before this transformation would use the norm of each
    worker's own gradients. The transformation replaces `all_reduce` and the optimizer after it.
    ``update`` takes every worker's own gradients and the parameters. It scatters the gradients'
    mean, updates the masters of this worker's slices, gathers differences of parameters, and
    returns updates for `optax.apply_updates`, with the same bits on all workers. Masters, the
    inner state and slices of the copy take 1/n of the memory, and the update takes 1/n of the work.

    **Masters follow parameters that change between updates**: a master moves by as much as its copy
    has moved since the last update. So you may load weights, swap in an average, clip or project;
    and what is around this transformation, or after it in a chain, may scale, withhold or replace
    its updates. Updates are decoded differences, so what is not linear in them, such as a clip or a
    ratio of norms, sees their errors: put it inside, or pass ``compression=dq.Policy(gradients=...,
    parameters=dq.F32())``. A small change keeps the error of the last encoding, which the next
    difference brings; a change of more than 16 times this error, and `set_masters`, replace the
    master.

    A leaf is split along the first dimension that is a multiple of the number of workers; a leading
    dimension below 256, which may count layers, is tried last. If there is no such dimension, one
    that is longer than that number is padded with zeros: the one that needs the fewest zeros for
    its length. Padding is in masters, in the inner state and on the wire; parameters keep their
    shapes. `dynamiq_jax.explain` names padded leaves. Leaves that are not compressed (small or
    excluded ones) and leaves without a dimension to split stay whole: their gradients are
    all-reduced, and all workers update them in the same way.

    To scatter gradients during the backward pass, use `dq.fsdp` or `dq.overlapped`
    with the parameters as ``copies``, and differentiate with respect to ``state.masters``.
    ``update`` then takes gradients that are already reduced and have the shapes of masters, not of
    parameters.

    **Deferred differences** (``deferred=True``, the order of DeAR): the update does not gather, and
    its updates of split leaves are zeros. The next step applies the differences, and passes the
    current parameters to ``update``. `dq.overlapped` gathers the differences of each function while
    the previous function runs:

        specs = dq.optax.state_specs(state)

        def loss(masters):
            options = {"specs": specs.masters, "copies": params, "pending": state.pending}
            return dq.overlapped(functions, masters, x, "data", **options)

        (loss, params), grads = jax.value_and_grad(loss, has_aux=True)(state.masters)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    `gathered` returns the current parameters, for evaluation and for steps without a pipeline. To
    resume, restore a state together with its parameters. Masters do not follow changed parameters
    after the first update: call `set_masters`.

    * Under `jax.shard_map` gradients vary over the axis, as for `dynamiq_jax.psum`. Outside of maps
      they are terms: ``dq.value_and_grad(loss, axis_name=axis_name, unreduced=True)``. On a mesh of
      Auto axes ``init`` and ``update`` may run inside of `jax.jit` or outside.
    * A step whose gradient has an infinite or undefined norm only changes ``step``, ``skipped``,
      ``skipped_in_a_row`` and ``norm`` of the state.
    * Create the state with `init` of this module, which never holds all of it on one device. Its
      ``masters`` are the model in f32; parameters may have any floating-point dtype of up to 32
      bits. Updates of 8-bit parameters are f32, which `optax.apply_updates` refuses to add to them:
      add in f32 and cast. `restore_state` converts the state to another number of workers.

    Args:
      inner: an optimizer whose update of a coordinate depends only on this coordinate, such as
        `optax.adamw`, `optax.lion` or `optax.sgd`, or only on its matrix, such as
        `optax.contrib.muon`. Its program is traced for whole parameters in f32; updates run its
        elementwise operations on slices. Matrices travel to owners and back in bf16, or in f32 if
        parameters travel exactly: 32/n or 64/n bits per coordinate for n workers. Extra arguments
        of ``update``, such as a loss, must be the same on all workers.
      axis_name: as for `dynamiq_jax.psum`; if there are several axes, the outermost first.
      compression: how gradients travel, as for `dynamiq_jax.psum`, without memory; or a
        `dynamiq_jax.Policy`, whose ``parameters`` say how differences of parameters travel, as for
        `dynamiq_jax.all_gather`. Default: ``DynamiQ(bits=2.5, dither=True)`` for differences, with
        the limits of gradients; if gradients travel in `BF16` or `F32`, the same method. With
        ``DynamiQ.plan=None`` differences have no plan over links of any kind, and gradients only
        beside a backward pass, as in `dynamiq_jax.overlapped`.
      max_norm: the largest norm of the mean gradient over all parameters; a larger gradient is
        scaled down to it, as `optax.clip_by_global_norm` does. `None`: no limit.
      key: a PRNG key for the rounding, the same on all workers; the index of the step is folded
        into it. Default: ``jax.random.key(0)``.
      specs: how other mesh axes split the parameters: PartitionSpecs, a tree like the parameters or
        a prefix of it. On Explicit axes the default are the types, and outside of `jax.jit` on Auto
        axes the shardings of the arrays that ``init`` gets; else other axes do not split them.
      check_every: the number of steps after which workers compare a hash of their copies, with an
        error at run time if they differ. 0: never.
      deferred: whether differences are gathered at the start of the next step.
      mesh: a mesh of Auto axes, for trainers without a map. It is needed only if ``init`` is traced
        and neither `jax.set_mesh` nor the parameters tell the mesh.

    Returns:
      A transformation whose ``update(grads, state, params)`` returns updates, a tree like
      ``params``, and a new `ShardedState`.

    Raises:
      ValueError: ``params`` are missing or not of floating-point dtypes of up to 32 bits; they or
        the gradients have other leaves than masters, or another order; ``inner`` mixes matrices or
        depends on positions; a method has memory; gradients are terms over other axes, or
        other axes split them otherwise than the masters; the call is outside of maps, and there is
        no mesh; or a wrapper of optax around this transformation uses each worker's own gradients.
    """
    axis = check_axis(axis_name)
    _check_arguments(inner, max_norm, check_every, deferred, mesh)
    inner, gathers = optax.with_extra_args_support(inner), gathers_of(compression, copied=True)
    options: dict[str, Any] = {"gathers": gathers, "copied": True, "to": "invarying"}
    total = Reduction(axis, as_compression(compression), "mean", **options)
    check_key(key, axis)
    step = _Update(inner, total, max_norm, key, check_every)
    # One program for all calls of the same facts and types, also where nothing is jitted around.
    run_outside = jax.jit(
        lambda facts, *args: facts.run(step, *args), static_argnums=0, inline=True
    )

    def auto_mesh(tree: Any) -> Mesh | AbstractMesh | None:
        """The mesh outside of maps if its axes are Auto."""
        found = None if axis.mapped else auto_mesh_of(axis, tree, mesh)
        return found if found is mesh or not is_outside(axis, tree) else None

    def init(params) -> Any:
        check_wrappers(axis, params, "sharded")
        around = auto_mesh(params)
        start = _Start(inner, total, specs, deferred, around)
        if around is None:
            with set_of_leaves(axis, params):
                return start(params)
        # A traced state is placed by the program around it; a concrete one is made on its devices
        # below.
        if not isinstance(around, Mesh) or is_traced(params):
            with set_around(around, alone=True):
                return start(params)
        placed = lambda x: placement_of(x, around) or P()
        # Inside of the program that makes the state, tracers hide these shardings.
        own = jax.tree.map(placed, params) if specs is None else specs
        return placed_state(lambda x: start._replace(specs=own)(x), params, around)

    def update(updates, state, params=None, **extra) -> Any:
        if params is None:
            raise ValueError(
                "sharded needs the parameters, which are the copy that it keeps close to its "
                "masters; call optimizer.update(grads, opt_state, params)"
            )
        check_wrappers(axis, (updates, params), "sharded")
        _check_state(state, deferred=deferred)
        if deferred:
            check_deferred()
        _check_alike("params", params, state)
        _check_alike("gradients", updates, state, is_leaf=is_terms)
        if axis.mapped and not has_terms(updates):
            moved = (True,) * len(jax.tree.leaves(updates))
            return step(updates, state, params, extra, op="mean", moved=moved)
        around = auto_mesh(params)
        if around is None and not has_terms(updates) and is_outside(axis, (updates, params)):
            facts = on_explicit_axes(axis, updates, params)
        else:
            facts, updates = on_auto_axes(axis, updates, state, params, around)
        return run_outside(facts, updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_arguments(inner: Any, max_norm: Any, check_every: Any, deferred: Any, mesh: Any) -> None:
    """Refuses arguments of `sharded` that it would misunderstand."""
    if not all(callable(getattr(inner, name, None)) for name in ("init", "update")):
        raise ValueError(f"inner={inner!r} is not an optimizer; pass for example optax.adamw(1e-3)")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0; pass None for no limit")
    if checked("check_every", check_every, int, 0) < 0:
        raise ValueError(f"check_every={check_every} must not be negative; pass 0 for never")
    checked("deferred", deferred, bool, False)
    if mesh is not None:
        check_is_mesh(mesh)


# --- Which worker has what ------------------------------------------------------------------------


def _places(
    params: Any,
    axis: Axis,
    sizes: tuple[int, ...],
    compression: Compression,
    given: list[P],
    inside: bool,
    mesh: Mesh | AbstractMesh,
) -> list[P]:
    """How each parameter's master is split: by other mesh axes, and along one dimension by ours.

    ``given`` has the spec of every parameter.
    """
    n = math.prod(sizes)
    leaves, held, split_by, taken = describe_leaves(params), [], [], []
    for leaf, spec in zip(leaves, given, strict=True):
        # 8-bit parameters pass: f32 holds each of their values.
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize > 4:
            raise ValueError(
                f"leaf {leaf.path} is {leaf.dtype.name}, and its master would be float32, which "
                "does not hold it; cast it to a floating-point type of 32 bits at most, or give "
                "it an optimizer of its own"
            )
        if own := axes_of(spec) & {*axis.names}:
            raise ValueError(
                f"leaf {leaf.path} is sharded over {sorted(own)}, which are workers of "
                f"axis_name={axis.name!r}: every worker needs the whole copy; replicate it over "
                "them, or train with dq.fsdp(specs=...) and a plain optimizer"
            )
        entries = [names_of(entry) for entry in spec] + [()] * (len(leaf.shape) - len(spec))
        parts = [math.prod(mesh.shape[name] for name in names) for names in entries]
        # One device's part over the other axes; ours split one of its dimensions into n.
        shape = tuple(x if inside else x // k for x, k in zip(leaf.shape, parts, strict=True))
        held.append(dataclasses.replace(leaf, shape=shape))
        split_by.append(entries)
        taken.append([d for d, k in enumerate(parts) if k > 1])
    whole, placed = [], []
    divided = divisions(compression, held, taken, sizes)
    for leaf, entries, (large, dimension) in zip(leaves, split_by, divided, strict=True):
        if large and dimension is not None:
            entries[dimension] += axis.names
        elif large:
            whole.append(leaf)
        placed.append(P(*(names or None for names in entries)))
    nbytes = sum(leaf.nbytes for leaf in whole)
    # A few such leaves, as of odd embeddings, cost little; a tenth of all undoes the saving.
    if nbytes > sum(leaf.nbytes for leaf in leaves) / 10:
        names = ", ".join(f"{leaf.path} {leaf.shape}" for leaf in whole[:4])
        warn(
            f"{len(whole)} leaves of {nbytes:,} bytes have no dimension that the {n} workers of "
            f"axis {axis.name!r} can split, and every worker updates all of them: {names}; make "
            f"one a multiple of {n}, or longer than {n} and not split by other axes",
        )
    return placed


def _splits_of_state(state: Any, params: Any, placed: list[P]) -> list[P]:
    """How the inner optimizer's state is split: leaves of a parameter's shape like the parameter.

    If parameters of this shape are split differently, the path decides: a state's leaf is split
    like the parameter whose path is the end of the leaf's path.
    """
    leaves = zip(jax.tree_util.tree_leaves_with_path(params), placed, strict=True)
    named = [(path, x.shape, spec) for (path, x), spec in leaves]
    splits = []
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        like = [(own, spec) for own, shape, spec in named if shape == x.shape]
        if len({spec for _, spec in like}) > 1:
            like = [(own, spec) for own, spec in like if path[len(path) - len(own) :] == own]
        splits.append(like[0][1] if like else P())
    return splits


# --- The first state ------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The shapes of the whole masters and of their inner state, and how mesh axes split them."""

    masters: Any
    inner: Any
    splits: tuple[P, ...]
    """The spec of every leaf of ``(masters, inner)``."""
    padding: tuple[Padding, ...]
    """The zeros at the end of each of these leaves."""
    counts: Mapping[str, int]
    """The number of slices that every axis makes of an array that `_Start` has."""

    @property
    def placed(self) -> tuple[P, ...]:
        """The specs of the masters."""
        return self.splits[: len(jax.tree.leaves(self.masters))]


class _Start(NamedTuple):
    """The state before the first update, by the arguments of `sharded`."""

    inner: optax.GradientTransformationExtraArgs
    total: Reduction
    specs: Any
    deferred: bool
    mesh: Mesh | AbstractMesh | None
    """The mesh outside of maps if its axes are Auto."""

    def __call__(self, params: Any) -> ShardedState:
        """This worker's part of the state inside of a map, and the whole state outside."""
        axis, compression = self.total.axis, self.total.compression
        sizes, inside = known_sizes(axis, "sharded", self.mesh)
        assert sizes is not None
        mesh = get_abstract_mesh() if inside else self.mesh or mesh_of(params)
        told = self._told_specs(params, mesh, inside)
        placed = _places(params, axis, sizes, compression, told, inside, mesh)
        if self.mesh is not None:
            # Otherwise the masters' sharding spreads to the parameters that the program makes, and
            # every step gathers them exactly.
            params = constrained(params, self.mesh, told)
        # Copies even of f32: the state is donated, and parameters stay the user's.
        masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        layout = self._layout(masters, placed, sizes, inside)
        if inside:
            masters, inner = self._slices(masters, layout)
        else:
            masters, inner = self._wholes(masters, layout, params)
        # An array for each, though all are zeros: states are donated.
        step, skipped, in_a_row = (jnp.zeros((), jnp.int32) for _ in range(3))
        norm = jnp.zeros((), jnp.float32)
        sent = Sent(self._no_step(params, 1 if inside else math.prod(sizes), inside), None)
        pending = None
        if self.deferred:
            pending = Pending(jnp.zeros((), bool), jnp.zeros(2, jnp.uint32), self.total)
        else:
            copied = lambda master, x: jnp.array(master, x.dtype, copy=True)
            sent = sent._replace(copies=jax.tree.map(copied, masters, params))
        told = sent, layout.splits, layout.padding, pending, norm, in_a_row
        return ShardedState(step, skipped, masters, inner, *told)

    def _told_specs(self, params: Any, mesh: Mesh | AbstractMesh, inside: bool) -> list[P]:
        """How other axes split the parameters."""
        explicit = self.mesh is None and is_outside(self.total.axis, params)
        if self.specs is None and not inside and explicit:
            return [P(*jax.typeof(x).sharding.spec.partitions) for x in jax.tree.leaves(params)]
        return flat_specs(self.specs, params, mesh.axis_names)

    def _layout(
        self, masters: Any, placed: list[P], sizes: tuple[int, ...], inside: bool
    ) -> _Layout:
        """The whole shapes, specs and padding of the masters and of the inner state."""
        axis = self.total.axis
        names = frozenset().union(*map(axes_of, placed))
        # Outside of maps arrays are whole, so no axis makes slices of them.
        counts = {name: lax.axis_size(name) if inside else 1 for name in names}
        # Inside a map parameters are whole but for other axes than ours.
        others = {name: 1 if name in axis.names else count for name, count in counts.items()}
        whole = whole_arrays(masters, placed, others, [Padding()] * len(placed))
        like = jax.eval_shape(self.inner.init, whole)
        splits = (*placed, *_splits_of_state(like, whole, placed))
        workers = dict(zip(axis.names, sizes, strict=True))
        pairs = zip(jax.tree.leaves((whole, like)), splits, strict=True)
        padding = tuple(padding_of(x.shape, p, workers) for x, p in pairs)
        return _Layout(whole, like, splits, padding, counts)

    def _state_of(self, layout: _Layout, masters: Any) -> Any:
        """The inner optimizer's state for slices of masters."""
        placed, own = layout.placed, layout.splits[len(layout.placed) :]
        whole, counts = (layout.masters,), layout.counts
        results = layout.inner, own
        return on_slices(self.inner.init, (masters,), whole, placed, results, counts)

    def _slices(self, masters: Any, layout: _Layout) -> tuple[Any, Any]:
        """This worker's slices of the masters and of the inner state, inside of a map."""
        axis, placed = self.total.axis, layout.placed
        leaves, treedef = jax.tree.flatten(masters)
        triples = zip(leaves, placed, layout.padding[: len(placed)], strict=True)
        found = [own_slice(x, split_of(p, axis.names), axis, zeros) for x, p, zeros in triples]
        masters = treedef.unflatten(found)
        leaves, treedef = jax.tree.flatten((masters, self._state_of(layout, masters)))
        triples = zip(leaves, layout.splits, layout.padding, strict=True)
        return treedef.unflatten(
            # The inner optimizer may start from other numbers than zeros; padding must be zeros.
            axis.to_varying(zeros.cleared(x, axis)) if split_of(p, axis.names) else x
            for x, p, zeros in triples
        )

    def _wholes(self, masters: Any, layout: _Layout, params: Any) -> tuple[Any, Any]:
        """The whole masters and the whole inner state, padded, outside of maps."""
        state = self.inner.init(masters)
        # Refuses what slices cannot have, before the first update would.
        jax.eval_shape(functools.partial(self._state_of, layout), masters)
        leaves, treedef = jax.tree.flatten((masters, state))
        leaves = [zeros.padded(x) for zeros, x in zip(layout.padding, leaves, strict=True)]
        if self.mesh is not None:
            leaves = constrained(leaves, self.mesh, layout.splits)
        elif is_outside(self.total.axis, params):  # types say where leaves are, as `splits` do
            mesh = mesh_of(params)
            leaves = [resharded(x, mesh, p) for x, p in zip(leaves, layout.splits, strict=True)]
        return treedef.unflatten(leaves)

    def _no_step(self, params: Any, count: int, inside: bool) -> PerWorker:
        """The step of `Sent` before the first update."""
        axis = self.total.axis
        # No step has this number, so the copies of a new state say nothing.
        step = jnp.full(count, -1, jnp.int32)
        if inside:
            step = axis.to_varying(step)
        elif self.mesh is not None:
            step = constrained(step, self.mesh, [P(axis.name)])
        elif is_outside(axis, params):
            step = resharded(step, mesh_of(params), P(axis.name))
        return PerWorker(step, axis.name, largest=True)


# --- One update -----------------------------------------------------------------------------------


def _slices(wholes: list[Array], total: Reduction) -> list[Array]:
    """This worker's slices of whole leaves."""
    triples = zip(wholes, total.placement.splits, total.placement.padding, strict=True)
    return [own_slice(x, split, total.axis, padding) for x, split, padding in triples]


def _some(tree: Any, values: dict[int, Array]) -> Any:
    """A tree like ``tree`` with some of its leaves, by their indices."""
    treedef = jax.tree.structure(tree)
    return treedef.unflatten(map(values.get, range(treedef.num_leaves)))  # `None`: no leaf


class _Leaves(NamedTuple):
    """The leaves of the parameters in one update, and how axes split their masters."""

    treedef: Any
    copies: list[Array]
    """The whole parameters."""
    slices: list[Array]
    """This worker's slices of them."""
    placed: list[P]
    """The spec of every master."""
    total: Reduction
    """The reduction of the gradients, which has the splits and the padding of the leaves."""
    sizes: Mapping[str, int]
    """The sizes of the axes in these specs."""

    def followed(self, state: ShardedState, sent_at: Array) -> Any:
        """The masters, which move by as much as their copies did since update ``sent_at``."""
        axis, masters = self.total.axis, jax.tree.leaves(state.masters)
        # `first`: no update has moved masters yet; all of them, if any, were skipped.
        first = state.step == state.skipped
        known = axis.assume_invarying(sent_at) == state.step
        if state.pending is None:
            sent = jax.tree.leaves(state.sent.copies)
        else:  # the copy of a split leaf has moved since, and the others are rounded masters
            leaves = zip(self.slices, masters, self.total.placement.splits, strict=True)
            sent = [copy if split else master.astype(copy.dtype) for copy, master, split in leaves]
            known = jnp.ones((), bool)
        found = zip(masters, self.slices, sent, strict=True)
        return self.treedef.unflatten(_followed(*x, known, first) for x in found)

    def sent(self, state: ShardedState, added: list[Array]) -> tuple[Sent, list[Array]]:
        """The copy after an update of ``state``, and the differences that users add to it.

        They add in place, leaf by leaf: XLA would keep a copy that is read later, so each waits for
        the slice of its leaf alone. Deferred ones wait for nothing: they are constants.
        """
        if state.pending is not None:
            return state.sent, added
        # A state made with f32 parameters keeps its dtypes where the copies are bf16: the second
        # step is not compiled again, and may be in a scan. f32 represents every bf16.
        wide = [x.dtype for x in jax.tree.leaves(state.sent.copies)]
        of = zip(self.slices, _slices(added, self.total), wide, strict=True)
        copies = [_sum(x, y).astype(jnp.promote_types(x.dtype, dtype)) for x, y, dtype in of]
        # One barrier for each leaf: users add that leaf's update after its copy is taken.
        pairs = list(map(together, copies, added))
        copies = self.treedef.unflatten(copy for copy, _ in pairs)
        return Sent(state.sent.step.after(state.step + 1), copies), [x for _, x in pairs]

    def exact_differences(self, masters: Any) -> list[Array]:
        """The differences of leaves that are not split, which all workers know, and zeros."""
        splits = self.total.placement.splits
        leaves = zip(jax.tree.leaves(masters), self.copies, splits, strict=True)
        return [
            jnp.zeros(x.shape, x.dtype) if split else master - x.astype(jnp.float32)
            for master, x, split in leaves
        ]


class _Update(NamedTuple):
    """One update inside a map, by the arguments of `sharded`."""

    inner: optax.GradientTransformationExtraArgs
    total: Reduction
    max_norm: float | None
    key: Array | None
    check_every: int

    def __call__(
        self,
        updates: Any,
        state: ShardedState,
        params: Any,
        extra: Mapping[str, Any],
        *,
        op: Op,
        moved: tuple[bool, ...],
    ) -> tuple[Any, ShardedState]:
        """The copy's updates, and the next state; JAX has summed leaves that have not ``moved``."""
        # From the state as it came: the lines below replace its masters.
        held, sent_at = jax.tree.leaves(state.masters), state.sent.step.own()
        given = self._leaves(state, held, params, op)
        state = dataclasses.replace(state, masters=given.followed(state, sent_at))
        key = jax.random.fold_in(jax.random.key(0) if self.key is None else self.key, state.step)
        # Two roundings of one step must not share noise.
        for_gradients, for_differences = jax.random.split(key)

        terms = jax.tree.leaves(updates)
        if self._are_slices(terms, held, params):
            means = [x.astype(jnp.float32) for x in terms]
        else:
            means = self._means(terms, params, given.total, for_gradients, moved)
        pairs = zip(given.total.placement.padding, means, strict=True)
        means = [p.cleared(x, given.total.axis) for p, x in pairs]  # of their noise
        norm = _norm(means, given.placed)
        # One number says it for all leaves and workers, so that all of them skip the same steps.
        finite = jnp.isfinite(norm)
        gradients = given.treedef.unflatten(self._clipped(means, norm))
        masters, inner = self._stepped(state, gradients, given, extra)
        masters, inner = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (masters, inner),
            (state.masters, state.inner),
        )
        pending = state.pending
        if pending is None:
            exactly = given.total.gathers_exactly(describe_leaves(params))
            found = self._differences(masters, given, exactly, for_differences)
        else:
            pending.check_taken()
            found = given.exact_differences(masters)
            words = key_words(for_differences)
            # After a skipped step nothing has moved, and the next one must add nothing.
            pending = dataclasses.replace(pending, ready=finite, words=words)
        # A choice, not a product with 0: NaN times 0 is NaN.
        added = [jnp.where(finite, x, jnp.zeros_like(x)) for x in found]
        own = {"masters": masters, "inner": inner, "pending": pending}
        own["sent"], added = given.sent(state, added)
        return given.treedef.unflatten(added), _counted(state, finite, norm, **own)

    def _leaves(self, state: ShardedState, masters: list[Array], params: Any, op: Op) -> _Leaves:
        """The leaves of the parameters; checks their shapes and, at times, that they are equal."""
        copies, treedef = jax.tree.flatten(params)
        placed = jax.tree.leaves(state.specs().masters)
        total = dataclasses.replace(self.total, op=op)
        total = total.placed(placed, padding=state.padding[: len(placed)])
        self._check_copies(params, masters, total)
        own = _slices(copies, total)
        if self.check_every:
            compare = functools.partial(assert_same_on_workers, axis=total.axis, what="the copy")
            lax.cond(state.step % self.check_every == 0, compare, lambda _: None, copies)
        sizes = {name: lax.axis_size(name) for name in frozenset().union(*map(axes_of, placed))}
        return _Leaves(treedef, copies, own, placed, total, sizes)

    def _clipped(self, means: list[Array], norm: Array) -> list[Array]:
        """The gradient, scaled down to the largest norm if its norm is larger."""
        if self.max_norm is None:
            return means
        # In the order of operations of optax.clip_by_global_norm.
        return [jnp.where(norm < self.max_norm, x, x / norm * self.max_norm) for x in means]

    def _stepped(
        self, state: ShardedState, gradients: Any, given: _Leaves, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The masters and the inner state after a step of the inner optimizer."""
        placed = given.placed
        like = whole_arrays((state.masters, state.inner), state.splits, given.sizes, state.padding)
        # Matrices travel in f32 if differences of parameters travel exactly.
        exactly = given.total.gathers_exactly(describe_leaves(state.masters))
        steps, inner = on_slices(
            lambda g, s, p: self.inner.update(g, s, p, **extra),
            (gradients, state.inner, state.masters),
            (like[0], like[1], like[0]),
            (*placed, *state.splits[len(placed) :], *placed),
            (like, state.splits),
            given.sizes,
            owners=Owners(given.total.axis, all(exactly)),
        )
        masters = jax.tree.map(lambda x, u: x + u.astype(jnp.float32), state.masters, steps)
        leaves, both = jax.tree.flatten((masters, inner))
        pairs = zip(state.padding, leaves, strict=True)
        # An update need not be 0 where the gradient and the master are.
        return both.unflatten(p.cleared(x, given.total.axis) for p, x in pairs)

    def _check_copies(self, params: Any, masters: list[Array], total: Reduction) -> None:
        sizes = dict(zip(total.axis.names, axis_sizes(total.axis, "sharded"), strict=True))
        leaves = describe_leaves(params), masters, total.placement.splits, total.placement.padding
        for x, own, split, padding in zip(*leaves, strict=True):
            whole = padding.shape_of(whole_shape(own.shape, split, sizes))
            if x.shape != whole:
                raise ValueError(
                    f"params: leaf {x.path} has shape {x.shape}, and its master is a slice of "
                    f"{whole}; pass whole parameters on every worker, which are the copy"
                )

    def _are_slices(self, terms: list[Array], masters: list[Array], params: Any) -> bool:
        """Whether gradients are already reduced, with the shapes of this worker's masters.

        If no leaf is split, they count as terms: the mean does not change equal gradients.
        """
        leaves = describe_leaves(params)
        found, own, wholes = ([x.shape for x in values] for values in (terms, masters, leaves))
        # First: without split leaves both shapes are the same.
        if found == wholes:
            return False
        if found == own:
            return True
        a = next(i for i, x in enumerate(found) if x != wholes[i])
        b = next(i for i, x in enumerate(found) if x != own[i])
        one, other = leaves[a].path, leaves[b].path
        raise ValueError(
            f"gradients: leaf {one} has shape {found[a]}, which is not the parameter's, "
            f"{wholes[a]}, and leaf {other} has {found[b]}, which is not this worker's slice, "
            f"{own[b]}; pass whole gradients of all leaves, as jax.grad of the parameters gives "
            "them, or slices of all, as jax.grad of state.masters does through "
            "dq.fsdp(specs=..., copies=...)"
        )

    def _means(
        self,
        terms: list[Array],
        params: Any,
        total: Reduction,
        key: Array,
        moved: tuple[bool, ...],
    ) -> list[Array]:
        """This worker's slices of the gradient, f32."""
        axis, splits = total.axis, total.placement.splits
        some = {i: x for i, (x, is_moved) in enumerate(zip(terms, moved, strict=True)) if is_moved}
        # Without types, or with one worker, replicated terms cannot be told from others.
        tracked = axis.tracked and axis.size > 1
        for i, x in some.items() if tracked else ():
            if splits[i] and axis.replicates(x):
                name = describe_leaves(params)[i].path
                raise ValueError(
                    f"the gradient of leaf {name} is the same on all {axis.size} workers "
                    f"of axis {axis.name!r}: JAX has summed gradients of replicated "
                    "parameters already (check_vma=True). Differentiate with respect to "
                    f"jax.lax.pcast(params, {axis.name!r}, to='varying')"
                )
        sums = total.some(some).scatter(_some(params, some), key)
        reduced = dict(zip(some, jax.tree.leaves(sums), strict=True))
        whole = enumerate(zip(terms, splits, total.placement.padding, strict=True))
        own = (
            reduced[i] if i in reduced else own_slice(x, split, axis, padding)
            for i, (x, split, padding) in whole
        )
        return [x.astype(jnp.float32) for x in own]

    def _differences(
        self, masters: Any, given: _Leaves, exactly: list[bool], key: Array
    ) -> list[Array]:
        """The differences of the masters from the copy: decoded, or exact for leaves not split.

        Where the wire has the copy's dtype, ``exactly``, rounded masters are gathered themselves.
        """
        total, values = given.total, jax.tree.leaves(masters)
        found = given.exact_differences(masters)
        own = {
            i: sent_of(values[i], given.slices[i], exactly[i])
            for i, split in enumerate(total.placement.splits)
            if split
        }
        with errors_return():
            gathered = total.some(own).gather(_some(masters, own), key)
        for i, whole in zip(own, jax.tree.leaves(gathered), strict=True):
            # In f32: the difference of two bf16 numbers need not be one.
            wide = (x.astype(jnp.float32) for x in (whole, given.copies[i]))
            found[i] = operator.sub(*wide) if exactly[i] else whole
        return found


def _check_state(state: Any, *, deferred: bool) -> None:
    """Refuses a state of another optimizer; its `pending`, not the option, rules the update."""
    if not isinstance(state, ShardedState):
        raise ValueError(
            f"opt_state is a {type(state).__name__} and not the state of dq.optax.sharded; pass "
            "optimizer.init(params) of this optimizer, which also shards what it keeps"
        )
    if (state.pending is not None) != deferred:
        raise ValueError(
            f"opt_state was made with deferred={not deferred}, and this optimizer has "
            f"deferred={deferred}; pass deferred={not deferred}, or begin with "
            "optimizer.init(dq.optax.gathered(params, opt_state))"
        )


def _check_alike(
    what: str,
    tree: Any,
    state: ShardedState,
    *,
    by_name: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Refuses a tree whose leaves are not those of the masters, in their order.

    An `OrderedDict` or a dataclass may have a dict's leaves in another order. Nodes without names
    number their leaves: so as many leaves of other names pass, unless ``by_name``.
    """
    given, own = (
        [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_leaf)]
        for x in (tree, state.masters)
    )
    if given == own:
        return
    if not by_name and len(given) == len(own) and sorted(given) != sorted(own):
        return
    pairs = itertools.zip_longest(given, own)
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    told = ["none" if x is None else shown(x) for x in (one, other)]
    raise ValueError(
        f"{what} have {len(given)} leaves, and the masters in opt_state have {len(own)}; the first "
        f"that differ are {told[0]} and {told[1]}. Pass {what} with the leaves of the parameters "
        "that this state was made for, in the same order; for a leaf without a gradient pass zeros"
    )


def _counted(state: ShardedState, finite: Array, norm: Array, **own: Any) -> ShardedState:
    """The next state: it has its ``own`` new fields, and counts the update or its skipping."""
    in_a_row = state.skipped_in_a_row
    return dataclasses.replace(
        state,
        step=state.step + 1,
        skipped=state.skipped + (1 - finite.astype(jnp.int32)),
        # `None` in a state of an earlier version, which keeps its structure.
        norm=None if state.norm is None else norm,
        skipped_in_a_row=None if in_a_row is None else jnp.where(finite, 0, in_a_row + 1),
        **own,
    )


def _followed(master: Array, copy: Array, sent: Array, known: Array, first: Array) -> Array:
    """The master, moved by as much as its copy has moved since it was ``sent``, if that is known.

    Before the first update, a master whose rounded value equals its copy is kept: it may have more
    bits.
    """
    value, before = copy.astype(jnp.float32), sent.astype(jnp.float32)
    error, moved_by = master - before, value - before
    # Loaded weights, and zeros of pruned ones, are kept to the bit: the error would be one of what
    # was there before. Below 16 errors it is worth keeping, as where half of an update is applied.
    # A copy that is, or was, infinite or NaN tells no distance.
    small = jnp.abs(moved_by) <= 16 * jnp.abs(error)
    moved = jnp.where(small & ~first, value + error, value)
    changed = jnp.where(first, master.astype(copy.dtype) != copy, known & (copy != sent))
    return jnp.where(changed, moved, master)


def _sum(copy: Array, update: Array) -> Array:
    """A parameter after `optax.apply_updates`, in its dtype."""
    wide = copy.astype(jnp.float32) + update.astype(jnp.float32)
    return wide.astype(copy.dtype)


def _states(opt_state: Any) -> list[ShardedState]:
    """The states of `sharded` in an optimizer's state; there must be at least one."""
    is_part = lambda x: isinstance(x, ShardedState)
    parts = [x for x in jax.tree.leaves(opt_state, is_leaf=is_part) if is_part(x)]
    if not parts:
        raise ValueError(
            "opt_state has no state of dq.optax.sharded, which has the masters; pass what "
            "dq.optax.init or update returned"
        )
    return parts


def gathered(params: Any, opt_state: Any, mesh: Mesh | None = None) -> Any:
    """Returns the current parameters, for an optimizer with ``deferred=True``.

    Adds the differences of the last update, which `dq.overlapped` would add in the next step. Use
    it for evaluation, for checkpoints that other programs read, and at the start of steps without a
    pipeline. Training can continue from ``params`` or from the result; with ``params`` it has the
    same bits as without this call.

    Outside of maps it compiles once for arrays of the same shapes, dtypes and shardings, and a
    function as ``differences`` is not called again.

    If ``params`` is a list or tuple, its entries are the functions' parameters, as for
    `dq.overlapped`, and the result has the same bits as there. Any other tree is gathered at once.

    Args:
      params: the parameters after the last step.
      opt_state: their optimizer state, which contains one state of `sharded`, at any depth.
      mesh: the mesh of the training step, outside of maps. Default: the mesh of the state's arrays,
        or of `jax.set_mesh`.

    Returns:
      A tree like ``params``, with the same bits on all workers. Without ``deferred=True`` nothing
      is pending, and the result is ``params``.

    Raises:
      ValueError: there is no state of `sharded`, or more than one, or no mesh is known; or the
        leaves of the parameters are not those of the masters.
    """
    state, *others = _states(opt_state)
    if others:
        raise ValueError(
            f"opt_state has {1 + len(others)} states of dq.optax.sharded; call gathered for each, "
            "with its part of the parameters"
        )
    if (pending := state.pending) is None:
        return params
    _check_alike("params", params, state)
    axis, specs = pending.total.axis, state.specs()
    if axis.mapped:
        return _current(params, state)
    # What the user says comes first, then where arrays are, then what is set.
    known = [*([] if mesh is None else [mesh]), *meshes_of(state.masters), get_abstract_mesh()]
    around = next((m for m in known if axis.names[0] in m.axis_names), None)
    if around is None:
        raise ValueError(
            f"gathered found no mesh that has axis {axis.name!r}; pass mesh=, that of the step"
        )

    def whole(spec: P) -> P:  # as other axes than ours split the parameters
        entries = [tuple(x for x in names_of(e) if x not in axis.names) for e in spec]
        return P(*(names or None for names in entries))

    placed = jax.tree.map(whole, specs.masters)
    leaves, treedef = jax.tree.flatten((placed, specs))
    with set_around(around, alone=True):
        return _gather(around, tuple(leaves), treedef)(params, state)


@functools.lru_cache(maxsize=8)  # it keeps functions among ``differences`` alive
def _gather(mesh: Mesh, leaves: tuple[P, ...], treedef: Any) -> Callable[[Any, Any], Any]:
    """`_current` in a map, compiled once for all calls with arrays of equal types."""
    placed, specs = treedef.unflatten(leaves)
    maps = {"in_specs": (placed, specs), "out_specs": placed, "check_vma": False}
    return jax.jit(jax.shard_map(_current, mesh=mesh, **maps))


def _current(params: Any, state: ShardedState) -> Any:
    """The parameters with the differences of their masters, function by function; inside a map."""
    assert state.pending is not None
    trees, found = (params, state.masters, state.specs().masters), []
    treedef = jax.tree.structure(params)
    parts = zip(*trees, strict=True) if isinstance(params, list | tuple) else [trees]
    for number, (copies, masters, spec) in enumerate(parts):
        words = fold_seed(state.pending.words, number)  # as the pipeline's
        found += jax.tree.leaves(state.pending.current(masters, copies, words, spec))
    return treedef.unflatten(found)


def set_masters(opt_state: Any, params: Any) -> Any:
    """Returns a state in which the masters of `sharded` are ``params``.

    Call it after you changed parameters outside of updates, to keep all of their bits: without it
    masters follow only larger changes. The inner optimizer's state does not change.

    Args:
      opt_state: a state that contains a state of `sharded`, at any depth; inside of a map, or
        outside.
      params: the parameters as for `update`: whole, in any floating-point dtype.

    Returns:
      A state like ``opt_state``, with f32 masters.

    Raises:
      ValueError: there is no state of `sharded`, or the structure or the shapes of the parameters
        differ from those of its masters.
    """
    is_part = lambda x: isinstance(x, ShardedState)
    _states(opt_state)  # refuses a state without masters

    def one(part: Any) -> Any:
        return _with_masters(part, params) if is_part(part) else part

    return jax.tree.map(one, opt_state, is_leaf=is_part)


def warn_of_skipped(opt_state: Any, *, in_a_row: int = 3) -> int:
    """Warns if `sharded` has skipped the last steps, since their gradients were not finite.

    Call it outside of `jax.jit`, on any process or on all. It waits for the step that returned
    ``opt_state``; if the trainer reads the loss there anyway, this costs no time.

    Args:
      opt_state: a state that contains one or more states of `sharded`, at any depth.
      in_a_row: the number of consecutive skipped steps that causes a `UserWarning`; at least 1.

    Returns:
      The number of consecutive steps that were skipped last, 0 if the last step was not. With
      several states of `sharded`, the largest of these numbers.

    Raises:
      ValueError: ``in_a_row`` is below 1, JAX traces the call, there is no state of `sharded`, or
        the state is from an earlier version.
    """
    if in_a_row < 1:
        raise ValueError(f"in_a_row={in_a_row} must be at least 1")
    counts = [(state.skipped_in_a_row, state.norm) for state in _states(opt_state)]
    leaves = jax.tree.leaves(counts)
    if any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            "warn_of_skipped needs the numbers in opt_state, and was called while JAX traces a "
            "function; call it with the state that the compiled step returns. Inside of the step "
            "opt_state.skipped_in_a_row is the number"
        )
    if len(leaves) < 2 * len(counts):
        raise ValueError(
            "opt_state does not count skipped steps in a row: an earlier version has made it; "
            "pass it through dq.optax.restore_state"
        )
    found, norm = max(pair for count in counts for pair in _pairs(*count))
    if found >= in_a_row:
        warn(
            f"the last {found} steps were skipped, since their gradients were not finite (the "
            f"norm of the last one is {norm}), and parameters stay as they are. Lower the learning "
            "rate, pass max_norm= to dq.optax.sharded, and look at the loss: it may be infinite or "
            "NaN for all parameters",
        )
    return found


def _pairs(count: Any, norm: Any) -> Iterator[tuple[int, float]]:
    """The counts and norms on this process; under `jax.vmap` one for each member."""

    def numbers(x: Any) -> list[Any]:
        if isinstance(x, Array):
            shards = x.addressable_shards
            # Only what this process can read: no collective runs outside of the step.
            parts = [shard.data for shard in (shards[:1] if x.is_fully_replicated else shards)]
        else:
            parts = [x]
        return [number for part in parts for number in np.ravel(part).tolist()]

    return zip(numbers(count), numbers(norm), strict=True)


def _with_masters(state: ShardedState, params: Any) -> ShardedState:
    axis = check_axis(state.sent.step.axis_name)
    masters, treedef = jax.tree.flatten(state.masters)
    leaves, count = describe_leaves(params), len(masters)
    placed, padding = state.splits[:count], state.padding[:count]
    _check_alike("params", params, state, by_name=True)

    def own(leaf: Any, x: Array, master: Array, spec: P, padding: Padding) -> Array:
        # An array of its own, as in `init`: states are donated, and so may be the parameters.
        value = padding.padded(jnp.array(x, jnp.float32, copy=True))
        if axis.mapped:
            value = own_slice(value, split_of(spec, axis.names), axis, Padding())
        if value.shape != master.shape:
            padded = f", {padding.zeros} zeros included" if padding.zeros else ""
            raise ValueError(
                f"params: leaf {leaf.path} has shape {leaf.shape}, and its master "
                f"{master.shape}{padded}; pass whole parameters"
            )
        if axis.mapped:
            return value
        # Concrete arrays go where the former master is.
        if not isinstance(master, Tracer):
            return jax.device_put(value, master.sharding)
        around = auto_mesh_of(axis, master)
        return value if around is None else constrained(value, around, [spec])

    own_leaves = zip(leaves, jax.tree.leaves(params), masters, placed, padding, strict=True)
    masters = treedef.unflatten(own(*x) for x in own_leaves)
    pending = state.pending
    if pending is not None:  # the parameters are the copy: no differences are left to gather
        pending = dataclasses.replace(pending, ready=jnp.zeros_like(pending.ready))
    sent = state.sent
    if sent.copies is not None:  # the parameters as updates get them
        own_copy = lambda x, like: jnp.array(x, like.dtype, copy=True)
        sent = sent._replace(copies=jax.tree.map(own_copy, masters, sent.copies))
    return dataclasses.replace(state, masters=masters, pending=pending, sent=sent)


def _norm(slices: list[Array], placed: list[P]) -> Array:
    """The norm of all parameters' gradients, summed over the axes that split slices."""
    # By names in their order, which a set would change: the sum's groups of devices are those of
    # the other collectives, in all processes. Else XLA may run both at once, and neither ends.
    squares: dict[tuple[str, ...], Array] = {}
    for x, spec in zip(slices, placed, strict=True):
        axes = tuple(name for entry in spec for name in names_of(entry))
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.square(x))
    sums = [lax.psum(x, axes) if axes else x for axes, x in squares.items()]
    return jnp.sqrt(sum(sums, jnp.float32(0)))
