"""Optimizer states that differ between workers: how to create, place and restore them.

The last section is about wrappers of optax that use gradients before the reduction that they wrap.
Such a wrapper sees each worker's own gradients. Its results and its state then differ between
workers, where a trainer expects the same on all.
"""

import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dynamiq_jax.core.axis import Axis, AxisName, axis_names, is_outside
from dynamiq_jax.core.checks import axis_sizes, check_is_mesh
from dynamiq_jax.core.warned import warn
from dynamiq_jax.reduction.worker_gradients import has_terms
from dynamiq_jax.tree.leaves import Serializable, check_nodes, name_of, shown

Tree = TypeVar("Tree")
Name = tuple[str, ...]


class Part(Serializable):
    """A part of an optimizer's state that knows its sharding over a mesh.

    Attributes:
      later: fields that the states of earlier versions do not have. `restore_state` starts them as
        `init` does.
      former: fields that states of earlier versions have, and this one does not.
    """

    later: ClassVar[tuple[str, ...]] = ()
    former: ClassVar[tuple[str, ...]] = ()

    def specs(self) -> Any:
        """A tree like the part, of PartitionSpecs."""
        raise NotImplementedError

    def shapes(self) -> dict[tuple[Any, ...], tuple[int, ...]]:
        """The shapes, without zeros at their ends, of leaves that may have some; by their paths."""
        return {}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value",),
    meta_fields=("axis_name", "largest"),
)
@dataclasses.dataclass(frozen=True)
class PerWorker(Part):
    """A part of an optimizer's state that differs between workers.

    Attributes:
      value: a tree whose leaves have a leading axis of all workers; of size 1 inside a map.
      axis_name: the axis, or axes, of the workers.
      largest: whether each of another number of workers gets the largest value of all; otherwise
        the value is reset.
    """

    value: Any
    axis_name: AxisName
    largest: bool = False

    def specs(self) -> Any:
        """See `Part`."""
        return jax.tree.map(lambda _: PartitionSpec(self.axis_name), self)

    def own(self) -> Any:
        """Inside a map: this worker's value; refuses a value that has other workers' parts."""
        for x in jax.tree.leaves(self.value):
            if jnp.shape(x)[:1] != (1,):
                raise ValueError(
                    f"opt_state has an array {jnp.shape(x)} inside of the map, where a worker has "
                    "its own part alone, which has length 1 along the first axis; pass "
                    "dq.optax.state_specs(opt_state) as the specs of opt_state to jax.shard_map, "
                    f"or make the state for jax.pmap by {_pmapped(self.axis_name)}; a state of "
                    "another number of workers becomes one of these by "
                    "dq.optax.restore_state(opt_state, optimizer.init(params))"
                )
        return jax.tree.map(lambda x: x[0], self.value)

    def after(self, value: Any) -> "PerWorker":
        """Inside a map: the same part with ``value`` as this worker's value."""
        value = jax.tree.map(lambda x: x[None], Axis(axis_names(self.axis_name)).to_varying(value))
        return dataclasses.replace(self, value=value)


def _pmapped(axis_name: AxisName) -> str:
    return f"jax.pmap(optimizer.init, axis_name={axis_name!r})(flax.jax_utils.replicate(params))"


def init(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Runs ``optimizer.init(params)``; each worker's part is computed on that worker.

    Inside of `jax.jit` and `jax.eval_shape` the state is a value of the surrounding program.

    Args:
      optimizer: an optimizer that contains `all_reduce` or `sharded`, at any depth.
      params: arrays with the shapes of one worker's gradients, or `jax.ShapeDtypeStruct`s.
      mesh: the mesh of the training step.

    Returns:
      The state, placed as `state_specs` says. For `jax.ShapeDtypeStruct`s it has only shapes,
      dtypes and shardings, and allocates nothing; restore a checkpoint onto this tree.

    Raises:
      ValueError: parameters whose values the state needs were put on other devices.
    """
    return placed_state(optimizer.init, params, mesh)


def placed_state(start: Callable[[Any], Any], params: Any, mesh: Mesh) -> Any:
    """`init` by the function that an optimizer starts with."""
    check_nodes(params)
    check_is_mesh(mesh)
    leaves = jax.tree.leaves(params)
    traced = any(isinstance(x, Tracer) for x in leaves)
    # `jax.set_mesh` is not allowed while JAX traces.
    around = jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if traced else jax.set_mesh(mesh)
    with around:
        shapes = jax.eval_shape(start, params)
        shardings = jax.tree.map(functools.partial(NamedSharding, mesh), _specs(shapes))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
        try:
            # Compiled, so that no device ever holds the whole state.
            return jax.jit(start, out_shardings=shardings)(params)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            raise ValueError(
                f"params are not on the {mesh.size} devices of the mesh; pass "
                "jax.device_put(params, jax.NamedSharding(mesh, jax.P()))"
            ) from error


def state_specs(opt_state: Tree) -> Tree:
    """Returns a `PartitionSpec` for every leaf of an optimizer's state, for `jax.shard_map`.

    Leaves of `PerWorker` get ``P(axis_name)``, leaves of `sharded` get the specs of their arrays,
    and all other leaves get ``P()``.

    Args:
      opt_state: the state, or its shapes (`jax.ShapeDtypeStruct`s); also an `nnx.Optimizer`, whose
        specs are then ``nnx.state(dq.optax.state_specs(optimizer))``.

    Returns:
      A tree like ``opt_state``, of specs.

    Raises:
      ValueError: ``opt_state`` has the arrays of `sharded` or `all_reduce` without their types, as
        `nnx.state` of an optimizer has, so that it does not tell how they are sharded.
    """
    if _is_untyped(opt_state, map(name_of, _paths(opt_state))):
        raise ValueError(
            f"opt_state does not say {_WHICH}; in the place of nnx.state(optimizer) pass the "
            "nnx.Optimizer: nnx.state(dq.optax.state_specs(optimizer))"
        )
    return _specs(opt_state)


_WHICH = "which leaves depend on the number of workers"


def _paths(tree: Any) -> Iterable[tuple]:
    return (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def _is_untyped(tree: Any, names: Iterable[Name]) -> bool:
    """Whether leaves have the names of parts, and the tree has no `Part`: Flax makes dicts of them.

    A variable's last key is "value", also that of somebody else's "memory".
    """
    own = {("sent", "step"), ("memory", "value")}
    return not _parts(tree) and any(own & {*pairwise(name[:-1])} for name in names)


def _specs(opt_state: Tree) -> Tree:
    def spec(part: Any) -> Any:
        return part.specs() if isinstance(part, Part) else PartitionSpec()

    return jax.tree.map(spec, opt_state, is_leaf=lambda x: isinstance(x, Part))


def restore_state(saved: Any, fresh: Tree) -> Tree:
    """Returns ``saved`` for the workers of ``fresh``; a warning says what was reset.

    If the number of workers is unchanged, this is ``saved``, bit for bit. If it has changed, the
    memories of methods are reset, since they differ between workers. Fields that states of an
    earlier version do not have, such as ``norm`` of `ShardedState`, also start from their initial
    values. Leaves that `sharded` pads may
    end with another number of zeros, or with none, for another number of workers or in states of
    earlier versions. If a saved leaf has no place, an error names it.

    Args:
      saved: the state that was saved: a tree like ``fresh``, or the nested dicts and lists that
        ``orbax.checkpoint`` returns if it does not know the type of the tree, or a dict whose keys
        are leaves' keys joined by slashes. For an `nnx.Optimizer` also its `nnx.state`.
      fresh: the result of `init` for the same optimizer and parameters on the new workers, or an
        `nnx.Optimizer` on them; the result takes the shardings of its leaves.

    Returns:
      A state like ``fresh``, with its shardings and dtypes.

    Raises:
      ValueError: two leaves of a tree have the same name; or a leaf is missing, has no place in
        ``fresh``, or has another shape, and is neither a leaf of `PerWorker` nor a field that
        earlier versions do not have, nor differs only by zeros.
    """
    old = _in_words(_by_name(saved), _by_name(fresh))
    parts, treedef = jax.tree_util.tree_flatten_with_path(
        fresh, is_leaf=lambda x: isinstance(x, PerWorker)
    )
    done: list[Any] = []
    notes, later, unpadded = [], _later(fresh), _unpadded(fresh)
    for path, part in parts:
        leaves, inner = jax.tree_util.tree_flatten_with_path(part)
        names = [name_of((*path, *within)) for within, _ in leaves]
        now = [leaf for _, leaf in leaves]
        then = [old.get(name) for name in names]
        # Another number of workers pads otherwise: the shapes agree only after this.
        if len(names) == 1 and names[0] in unpadded and then[0] is not None:
            then = [_padded_anew(then[0], unpadded[names[0]], now[0].shape)]
        pairs = list(zip(then, now, strict=True))
        if all(x is not None and jnp.shape(x) == jnp.shape(y) for x, y in pairs):
            values = [_as(like, x) for x, like in pairs]
        elif then[0] is None and names[0] in later:
            values = [_zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in now]
            notes.append(f"{shown(later[names[0]])} was not saved and starts anew")
        elif not isinstance(part, PerWorker):
            has = "is missing" if then[0] is None else f"has {jnp.shape(then[0])}"
            remedy = "pass the optimizer and the parameters that it was saved with"
            if _is_untyped(fresh, map(name_of, _paths(fresh))):
                remedy = (
                    f"fresh does not say {_WHICH}; in the place "
                    "of nnx.state(optimizer) pass the nnx.Optimizer itself"
                )
            raise ValueError(
                f"opt_state: leaf {shown(names[0])} {has} in what was saved, and this optimizer "
                f"has {jnp.shape(now[0])}; {remedy}"
            )
        elif part.largest and all(
            x is not None and jnp.shape(x)[1:] == y.shape[1:] for x, y in pairs
        ):
            values = [
                _as(y, np.broadcast_to(np.max(_on_host(x), axis=0), y.shape)) for x, y in pairs
            ]
        elif any(isinstance(x, jax.ShapeDtypeStruct) for x in now):
            raise ValueError(
                f"opt_state: {shown(names[0])} starts anew, and this state has its shape alone; "
                "pass the state that dq.optax.init makes of arrays"
            )
        else:
            values, workers = now, f"{now[0].shape[0]} workers"
            note = f"was not saved and starts anew for {workers}"
            shapes = [jnp.shape(x) for x in then if x is not None]
            if len(shapes) == len(now):
                note = f"was reset, from {shapes[0][0]} to {workers}"
            notes += [] if part.largest else [f"{shown(name_of(path))} {note}"]
        done.append(jax.tree.unflatten(inner, values))
    # Fields that are gone may still be in what was saved.
    former = {(*name_of(path), field) for path, part in _parts(fresh) for field in part.former}
    is_former = lambda name: any(name[:n] in former for n in range(len(name) + 1))
    _check_places([name for name in old if not is_former(name)], parts)
    if notes:
        warn("opt_state: " + "; ".join(dict.fromkeys(notes)))
    return jax.tree.unflatten(treedef, done)


def _check_places(saved: list[Name], parts: list[tuple[tuple, Any]]) -> None:
    """Refuses saved leaves without a place; memories may have more leaves on other workers."""
    places, memories = set(), []
    for path, part in parts:
        if isinstance(part, PerWorker):
            memories.append("/".join((*name_of(path), "value", "")))
        leaves, _ = jax.tree_util.tree_flatten_with_path(part)
        places.update(name_of((*path, *within)) for within, _ in leaves)
    # With the slash at the end, "memory" is no beginning of "memory_of_another".
    inside = lambda name: "/".join((*name, "")).startswith(tuple(memories))  # also if joined
    spare = [shown(name) for name in saved if name not in places and not inside(name)]
    if spare:
        listed = ", ".join(spare[:4]) + (f" and {len(spare) - 4} more" if len(spare) > 4 else "")
        raise ValueError(
            f"opt_state: {len(spare)} of the {len(saved)} leaves that were saved have no place in "
            f"this optimizer's state of {len(places)}: {listed}; pass the optimizer and the "
            "parameters that it was saved with, or take these leaves out of what was saved"
        )


def _as(like: Any, x: Any) -> Any:
    """A saved leaf with the dtype and the place of ``like``, which may also be a number."""
    if isinstance(like, bool | int | float | complex):  # as `TrainState.step` before the first step
        return type(like)(x)
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(x, like.dtype)
    if isinstance(like, jax.Array) and not like.committed:  # JAX may still move it to a mesh
        whole = x if isinstance(x, Tracer) or x is like else jax.device_get(x)
        return jnp.asarray(whole, like.dtype)
    return jax.device_put(jnp.asarray(x, like.dtype), like.sharding)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)


def _parts(fresh: Any) -> list[tuple[tuple, Part]]:
    """The parts of a state, by their paths."""
    is_part = lambda x: isinstance(x, Part)
    leaves = jax.tree_util.tree_leaves_with_path(fresh, is_leaf=is_part)
    return [(path, part) for path, part in leaves if is_part(part)]


def _later(fresh: Any) -> dict[Name, Name]:
    """The fields of leaves that states of earlier versions do not have; all by their names."""
    key, leaves_of = jax.tree_util.GetAttrKey, jax.tree_util.tree_leaves_with_path
    return {
        name_of((*path, key(field), *own)): name_of((*path, key(field)))
        for path, part in _parts(fresh)
        for field in part.later
        for own, _ in leaves_of(getattr(part, field))
    }


def _unpadded(fresh: Any) -> dict[Name, tuple[int, ...]]:
    """The shapes of leaves that may have zeros at their ends, without these."""
    pairs = ((path, part.shapes()) for path, part in _parts(fresh))
    return {name_of((*path, *own)): shape for path, found in pairs for own, shape in found.items()}


def _on_host(x: Any) -> np.ndarray:
    """The whole array, in every process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental import multihost_utils  # only this case needs it

        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _padded_anew(x: Any, own: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """A leaf of shape ``own`` with the zeros of another ``shape``; as it is, if it is not such."""
    found = jnp.shape(x)
    if found == shape or len(found) != len(own):
        return x
    if any(length < least for length, least in zip(found, own, strict=True)):
        return x
    x = _on_host(x)
    # Padding is at the ends alone, so the leaf is a corner of the array.
    leaf = x[tuple(map(slice, own))]
    if np.count_nonzero(x) != np.count_nonzero(leaf):  # these are no zeros
        return x
    return np.pad(leaf, [(0, now - length) for now, length in zip(shape, own, strict=True)])


def _by_name(tree: Any) -> dict[Name, Any]:
    """The leaves of a tree; refuses one with two leaves of one name."""
    found: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = name_of(path)
        if name in found:
            raise ValueError(
                f"opt_state: two leaves have the name {shown(name)}, and leaves are restored by "
                "name; give the children of a node different keys"
            )
        found[name] = leaf
    return found


def _in_words(saved: dict[Name, Any], fresh: dict[Name, Any]) -> dict[Name, Any]:
    """Saved leaves by the names of ``fresh``, also if their words were joined by slashes.

    A variable of Flax NNX is a node with the child "value", which either tree may lack.
    """
    counts = Counter(map("/".join, saved))
    found = {"/".join(name): name for name in fresh}

    def own(name: Name) -> Name:
        joined = "/".join(name)
        # Two saved leaves with one joined name must not take the same place.
        if name in fresh or counts[joined] > 1:
            return name
        forms = (joined, f"{joined}/value", joined.removesuffix("/value"))
        return next((found[form] for form in forms if form in found), name)

    return {own(name): leaf for name, leaf in saved.items()}


def known_sizes(
    axis: Axis, what: str = "", mesh: Mesh | AbstractMesh | None = None
) -> tuple[tuple[int, ...] | None, bool]:
    """The workers on every axis, if known, and whether a surrounding map has the axis.

    Outside of maps they are those of ``mesh``, by default of `jax.set_mesh`. If ``what`` names a
    function that needs them, raises ValueError if they are not known.
    """
    try:
        return axis_sizes(axis), True
    except NameError:  # outside of any map
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if all(name in mesh.shape for name in axis.names):
        return tuple(mesh.shape[name] for name in axis.names), False
    if what:
        raise ValueError(
            f"{what} keeps a part of every worker's own, and optimizer.init does not know how many "
            f"workers axis {axis.name!r} has; call dq.optax.init(optimizer, params, mesh), or put "
            "params on the mesh: jax.device_put(params, jax.NamedSharding(mesh, jax.P())), or, if "
            "jax.jit traces init, call jax.set_mesh(mesh) before, or for jax.pmap: "
            f"{_pmapped(axis.name)}"
        )
    return None, False


# --- Wrappers of optax ----------------------------------------------------------------------------


_FOLDER = os.path.join(os.path.dirname(optax.__file__), "")
_SCAN = "To reduce once per window, add up its gradients in a scan and call update once"
_AFTER = "Pass optax.chain(dq.optax.all_reduce(...), {0}(inner, ...))"
_INSIDE = "Pass dq.optax.sharded({0}(inner, ...), ...)"


class _Wrapper(NamedTuple):
    """A wrapper of optax around `all_reduce` or `sharded`."""

    module: str
    why: str
    """Its effect there."""
    after: str
    """The remedy for `all_reduce`."""
    inside: str
    """The remedy for `sharded`."""
    untyped: Literal["trains", "warns", "raises"] = "raises"
    """The consequence where JAX has no types for what differs between workers."""


_WRAPPERS = {
    "MultiSteps": _Wrapper(
        "optax",
        "adds up each worker's own gradients, in a state that is typed as the same on all workers",
        f"{_AFTER}. {_SCAN}",
        f"{_INSIDE}. {_SCAN}",
        untyped="trains",
    ),
    "apply_if_finite": _Wrapper(
        "optax",
        "skips steps by each worker's own gradients, so that some workers would wait for others",
        _AFTER,
        "Leave it out: dq.optax.sharded skips steps whose gradients are not finite",
        untyped="warns",  # it trains as long as gradients are finite
    ),
    "conditionally_mask": _Wrapper(
        "optax.transforms",
        "returns zeros in some steps, which are typed as each worker's own, like its gradients",
        _AFTER,
        _INSIDE,
        untyped="trains",
    ),
    "conditionally_transform": _Wrapper(
        "optax.transforms",
        "returns each worker's own gradients in some steps",
        _AFTER,
        _INSIDE,
    ),
    "mechanize": _Wrapper(
        "optax.contrib",
        "scales updates by each worker's own gradients",
        _AFTER,
        f"It needs whole gradients, which dq.optax.all_reduce has. {_AFTER}",
    ),
    "sam": _Wrapper(
        "optax.contrib",
        "climbs along each worker's own gradients, so that parameters would differ",
        _AFTER,
        f"{_INSIDE}, with an adv_optimizer of single coordinates such as optax.sgd",
    ),
}
_AFTER_REDUCTION = "Pass optax.chain(dq.optax.all_reduce(...), optax.{0}(...), inner)"
_AFTER_UPDATES = (
    "Put it after dq.optax.sharded, with compression=dq.Policy(..., parameters=dq.F32())"
)
_CLIPS = {
    "clip_by_global_norm": "Pass dq.optax.sharded(inner, ..., max_norm=...) without it",
    "clip": "Pass dq.optax.sharded(optax.chain(optax.{0}(...), inner), ...)",
    "clip_by_block_rms": _AFTER_UPDATES,
    "adaptive_grad_clip": _AFTER_UPDATES,
}
"""Clips, and the remedies for `sharded`."""
_PASS_ON = {"masked", "partition", "inject_hyperparams", "with_extra_args_support"}
"""Functions of optax around a transformation that leave its updates as they are."""


def check_wrappers(axis: Axis, tree: Any, function: str) -> None:
    """Refuses wrappers around `init` or ``update`` of ``function``, "all_reduce" or "sharded".

    Args:
      axis: the workers.
      tree: the parameters or gradients, which say whether the call is outside of maps.
      function: whose remedy the error has.

    Raises:
      ValueError: a wrapper uses each worker's own gradients.
    """
    _warn_of_clips(function)
    name = _around()
    if name is None:
        return
    wrapper = _WRAPPERS[name]
    outside = is_outside(axis, tree) or has_terms(tree)
    typed = outside or (axis.mapped and axis.tracked)
    then = "raises" if typed else wrapper.untyped
    if then == "trains" or (then == "warns" and not axis.mapped):  # `init` need not warn, too
        return
    full = f"{wrapper.module}.{name}"
    remedy = (wrapper.inside if function == "sharded" else wrapper.after).format(full)
    message = f"{full} is around dq.optax.{function}: it {wrapper.why}. {remedy}"
    if then == "raises":
        raise ValueError(message)
    warn(message)


def check_deferred() -> None:
    """Refuses what would change the updates of ``deferred=True``, around them or later in a chain.

    They are zeros, and the next step's differences know of no change. The state cannot tell either:
    so this looks at the functions of optax that are on the stack.
    """
    for name, local in _running():
        if name in _PASS_ON:
            changes = []
        elif name in ("chain", "named_chain"):
            _, changes = _neighbours(name, local)
        else:
            changes = [name]
        if names := [x for x in changes if x not in ("identity", "zero_nans")]:
            raise ValueError(
                f"{', '.join(names)} would change the updates of dq.optax.sharded(..., "
                "deferred=True), which are zeros: the differences come in the next step. Pass "
                f"dq.optax.sharded(optax.chain(inner, {names[0]}(...)), ...), or leave out deferred"
            )


def _warn_of_clips(function: str) -> None:
    """Warns of a clip that is before `all_reduce` or `sharded` in a chain."""
    for name, local in _running():
        # `init` of a chain is on the stack without these variables.
        if name not in ("chain", "named_chain") or not {"update_fns", "name"} & local.keys():
            continue
        # A clip after the reduction sees the mean, as it should.
        before, _ = _neighbours(name, local)
        for clip in filter(_CLIPS.__contains__, before):
            remedy = _CLIPS[clip] if function == "sharded" else _AFTER_REDUCTION
            warn(
                f"optax.{clip} is before dq.optax.{function} in a chain, and clips each worker's "
                f"own gradient, not the mean. {remedy.format(clip)}"
            )


def _neighbours(name: str, local: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The functions of optax before and after the running one in the update of a chain."""
    if name == "chain":
        members = list(local["update_fns"])
        at = members.index(local["fn"])
    else:
        members = [own.update for _, own in local["transforms"]]
        at = [own for own, _ in local["transforms"]].index(local["name"])
    names = [_root(x) for x in members]
    return names[:at], names[at + 1 :]


def _root(update: Any) -> str:
    """The function of optax that made an ``update``."""
    name = update.__qualname__.partition(".")[0]
    if name == "with_extra_args_support":
        cells = [cell.cell_contents for cell in update.__closure__ or ()]
        own = [x.update for x in cells if isinstance(x, optax.GradientTransformation)]
        return _root(own[0]) if own else name
    return name


def _around() -> str | None:
    """The innermost of these wrappers whose `init` or ``update`` is on the stack."""
    # A wrapper calls the transformation directly, or under `lax.cond`, which traces a branch below.
    return next((name for name, _ in _running() if name in _WRAPPERS), None)


def _running() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The functions of optax that are on the stack, the innermost first, and their variables.

    They call an update with gradients and its own state, and say nothing else: types are as without
    them, the state around ours is theirs, and extra arguments are the user's.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FOLDER):
            yield frame.f_code.co_qualname.partition(".")[0], frame.f_locals
        frame = frame.f_back
