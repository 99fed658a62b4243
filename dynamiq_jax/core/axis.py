"""The workers of a call: their axes, JAX's collectives among them, their mesh, and their seeds.

*Axis*: the workers of a collective. *Rounding*: its seeds, the same on all workers, from a key or
from what all know. *Meshes*: which mesh a call is on, whether its axes are Explicit, and its
devices. While a function under `jax.shard_map` is traced, JAX does not say which devices the mesh
has, only how many, nor how arguments are sharded over Auto axes. The rule that lowers a primitive
sees it.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, UInt

from dynamiq_jax.core.compat import (
    assume_invarying,
    concrete_mesh,
    half_reduced_axes,
    is_constant,
    is_mesh_set,
    needs_devices,
    varying_axes,
    vmapped,
)
from pallas_kernels import mix

# --- Axes -----------------------------------------------------------------------------------------


AxisName = str | tuple[str, ...]
"""One mapped axis, or several that count as one; worker indices are in row-major order."""

Varying = Literal["varying", "invarying", "reduced"]
"""JAX's type of a gathered array over the axis; `jax.lax.all_gather` takes it as ``to``."""


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """The workers that reduce together: all of the named axes, or one group of them.

    Worker indices are row-major over several axes; in a group they follow the group's list.

    Attributes:
      names: the mapped axes, the outermost first.
      groups: ``axis_index_groups`` of `jax.lax`: groups of equal size, which cover all workers.
      levels: whether `all_gather` gathers over the outer axes first, then over the inner axis. Then
        each outer link carries the array of one inner worker.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None
    levels: bool = False

    @property
    def name(self) -> AxisName:
        """The names in `jax.lax`'s form: a str for one axis, else a tuple."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def size(self) -> int:
        """The number of workers that reduce together."""
        if self.groups is not None:
            return len(self.groups[0])
        return math.prod(map(lax.axis_size, self.names))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name, as push kernels take them."""
        if self.groups is not None:
            raise NotImplementedError(
                f'transport="push" has no axis_index_groups, and got {self.groups}; '
                'pass transport="permutes" or "collectives"'
            )
        return {name: lax.axis_size(name) for name in self.names}

    @property
    def index(self) -> Array:
        """This worker's index, int32."""
        if self.groups is None:
            return lax.axis_index(self.name)
        place = np.empty(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            place[list(group)] = np.arange(len(group))
        return jnp.asarray(place)[lax.axis_index(self.name)]

    @property
    def inner(self) -> "Axis":
        """The last of several axes."""
        return Axis(self.names[-1:])

    @property
    def outer(self) -> "Axis":
        """All axes but the last."""
        return Axis(self.names[:-1])

    # --- JAX's types ------------------------------------------------------------------------------

    @property
    def tracked(self) -> bool:
        """Whether the surrounding map checks varying axes (shard_map's ``check_vma=True``)."""
        found: list[frozenset[str]] = []
        indices = lambda: map(lax.axis_index, self.names)
        # Traced, so that nothing runs where the caller is not in jit.
        jax.eval_shape(lambda: found.extend(map(varying_axes, indices())))
        tracked = bool(found) and frozenset().union(*found).issuperset(self.names)
        # To ask `vmapped` binds an operation, which JAX cannot lower in every program around.
        own = jax.sharding.get_abstract_mesh().axis_names
        if tracked and not {*own}.issuperset(self.names) and self.vmapped:
            raise NotImplementedError(
                f"axis_name={self.name!r}: inside of jax.shard_map with check_vma=True JAX has no "
                "collectives over axes of jax.vmap; pass check_vma=False to jax.shard_map"
            )
        return tracked

    @property
    def mapped(self) -> bool:
        """Whether the caller runs under a map over all of the axes."""
        try:
            if 1 in [lax.axis_size(name) for name in self.names]:  # of all names
                # Outside of maps JAX tells the size 1, too, where its types leave out such axes.
                jax.eval_shape(lambda: [lax.axis_index(name) for name in self.names])
        except NameError:
            return False
        return True

    @property
    def vmapped(self) -> bool:
        """Whether one of the axes is `jax.vmap`'s, outside of `jax.jit`."""
        return any(map(vmapped, self.names))

    @property
    def several_vmapped(self) -> bool:
        """Whether there are several axes, some `jax.vmap`'s: most batching rules take one only."""
        return len(self.names) > 1 and self.vmapped

    def program(self, compiled: Any) -> Any:
        """A function of `jax.jit`; for several axes of `jax.vmap`, the function that it wraps."""
        return compiled.__wrapped__ if self.several_vmapped else compiled

    def varies(self, x: Any) -> bool:
        """Whether JAX knows that ``x`` varies over every one of the axes."""
        return varying_axes(x).issuperset(self.names)

    def replicates(self, x: Any) -> bool:
        """Whether JAX knows that all workers hold the same ``x``."""
        return (varying_axes(x) | half_reduced_axes(x)).isdisjoint(self.names)

    def to_varying(self, tree: Any) -> Any:
        """``tree`` with every leaf cast to varying over all axes, where JAX tracks that."""

        def cast(x: Any) -> Any:
            missing = tuple(name for name in self.names if name not in varying_axes(x))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree) if self.tracked else tree

    def inexact_to_varying(self, tree: Any) -> Any:
        """`to_varying` of the leaves of floating-point dtypes."""
        moves = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        return jax.tree.map(lambda x: self.to_varying(x) if moves(x) else x, tree)

    def like(self, tree: Any, other: Any) -> Any:
        """``tree``, whose leaves are cast to varying where those of the ``other`` tree vary."""

        def cast(x: Any, y: Any) -> Any:
            missing = tuple(sorted(varying_axes(y) - varying_axes(x)))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree, other)

    def assume_invarying(self, x: Array) -> Array:
        """``x``, which has the same bits on all workers; from here JAX types it as replicated."""
        return x if self.groups is not None else assume_invarying(x, self.names)

    # --- Collectives ------------------------------------------------------------------------------

    def psum(self, tree: Any) -> Any:
        """`lax.psum`; with groups it also runs if JAX tracks varying axes, and sums still vary."""
        if self.groups is None or not self.tracked:
            return lax.psum(tree, **self._grouped)

        def total(x: Any) -> Any:
            if is_constant(x):
                return lax.psum(x, **self._grouped)
            parts = jnp.pad(x.reshape(-1), (0, -x.size % self.size)).reshape(self.size, -1)
            whole = self.all_gather(self.psum_scatter(parts))
            return whole.reshape(-1)[: x.size].reshape(x.shape)

        return jax.tree.map(total, tree)

    def pmean(self, tree: Any) -> Any:
        """`lax.pmean`."""
        return lax.pmean(tree, **self._grouped)

    def pmax(self, tree: Any) -> Any:
        """`lax.pmax`; with groups the result still varies if JAX tracks that."""
        if self.groups is None:
            return lax.pmax(tree, self.name)
        return jax.tree.map(lambda x: jnp.max(self.all_gather(x), axis=0), tree)

    def psum_scatter(self, x: Array) -> Array:
        """The sum of ``x[index]`` over workers."""
        if self.groups is not None or not self.several_vmapped:
            return lax.psum_scatter(x, **self._grouped)
        return lax.psum(x, self.name)[lax.axis_index(self.name)]

    def all_gather(self, x: Array, to: Varying = "varying") -> Array:
        """`lax.all_gather` to a new leading axis; ``to`` has an effect if JAX tracks types."""
        if self.groups is not None:
            return lax.all_gather(x, **self._grouped)
        if self.levels:
            gathered = self.inner.all_gather(self.outer.all_gather(x, to), to)
            return gathered.swapaxes(0, 1).reshape(-1, *x.shape)
        if self.several_vmapped:
            gathered = functools.reduce(lax.all_gather, reversed(self.names), x)
            return gathered.reshape(-1, *x.shape)
        if to != "varying" and (self.varies(x) or self.tracked):
            return lax.all_gather(x, self.name, to=to)
        return lax.all_gather(x, self.name)

    def all_to_all(self, tree: Any) -> Any:
        """Sends ``x[j]`` of every leaf to worker j; ``result[i]`` is from worker i."""
        return lax.all_to_all(tree, **self._grouped, split_axis=0, concat_axis=0, tiled=True)

    def ppermute(self, tree: Any, permutation: list[tuple[int, int]]) -> Any:
        """`lax.ppermute` by (source, destination) pairs of all workers."""
        if self.groups is not None:
            pairs = [(group[s], group[d]) for group in self.groups for s, d in permutation]
            return lax.ppermute(tree, self.name, pairs)
        if not self.several_vmapped:
            return lax.ppermute(tree, self.name, permutation)
        source = jnp.array([s for s, _ in sorted(permutation, key=lambda pair: pair[1])])
        mine = source[lax.axis_index(self.name)]
        return jax.tree.map(lambda x: self.all_gather(x)[mine], tree)

    @property
    def _grouped(self) -> dict[str, Any]:
        """Arguments of `jax.lax`'s collectives that name the workers."""
        return {"axis_name": self.name, "axis_index_groups": self.groups}


def together(*trees: Any) -> tuple[Any, ...]:
    """Passes trees through a barrier: users of one of their arrays wait for all of them.

    JAX lets what passes a barrier vary over all axes over which one of the arrays does.
    """

    def as_before(held: Array, x: Array) -> Array:
        return assume_invarying(held, tuple(sorted(varying_axes(held) - varying_axes(x))))

    def passes(x: Array) -> bool:
        return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    leaves, treedef = jax.tree.flatten(trees)
    moving = list(filter(passes, leaves))
    held = iter(map(as_before, lax.optimization_barrier(moving), moving))
    return treedef.unflatten(next(held) if passes(x) else x for x in leaves)


# --- Rounding -------------------------------------------------------------------------------------


def check_key(key, axis: Axis | None = None) -> None:
    """Refuses keys that are not arrays, and those that JAX knows to vary over the axis.

    The check runs ahead of `jax.jit`, which turns numbers into arrays. Groups of workers may have
    different keys.
    """
    if key is None:
        return
    if not hasattr(key, "dtype"):
        raise ValueError(f"key={key!r} is not a PRNG key; pass jax.random.key(seed)")
    if axis is not None and axis.groups is None and not varying_axes(key).isdisjoint(axis.names):
        raise ValueError(
            f"key varies over axis {axis.name!r}, and workers that round by different keys do not "
            "get the same result; pass the key that was there before jax.lax.axis_index was folded "
            "in, through in_specs=P() of jax.shard_map"
        )


Seed = UInt[Array, " 2"] | UInt[Array, ""]
"""The seed of a collective's rounding, the same on all workers: two 32-bit words of a key; or, if
the caller gave no key, one number that tells its bucket from others."""


def key_words(key: Array | None) -> UInt[Array, " 2"] | None:
    """``uint32[2]`` from a typed or raw PRNG key of any implementation."""
    check_key(key)
    if key is None:
        return None
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.dtype != jnp.uint32 or key.ndim != 1 or key.shape[0] < 2:
        raise ValueError(
            f"key has dtype {key.dtype} and shape {key.shape}; expected one PRNG key, such as "
            "jax.random.key(seed) or jax.random.fold_in(key, step)"
        )
    words = key[:2]
    for i in range(2, key.shape[0], 2):  # longer keys: hash, since their halves may be equal
        words = fold_seed(words, key[i]) ^ fold_seed(words, key[min(i + 1, key.shape[0] - 1)])
    return words


def bucket_seeds(words: UInt[Array, " 2"] | None, tags: Sequence[int]) -> list[Seed]:
    """The seeds of buckets with these `Bucket.tag`, from a key's words if there is a key."""
    if words is None:
        return [jnp.uint32(tag) for tag in tags]
    return list(fold_seeds(words, tags)) if tags else []


def fold_seed(words: Seed, tag) -> Seed:
    """The seed of one part of a collective: ``words``, and the number of the part."""
    if words.ndim == 0:
        return mix(words + mix(jnp.asarray(tag, jnp.uint32) + jnp.uint32(1)))
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), tag)
    )


def fold_seeds(words: UInt[Array, " 2"], tags: Sequence[int]) -> UInt[Array, "tags 2"]:
    """`fold_seed` of every tag, bit for bit, by one hash of a vector.

    A hash is 220 operations of scalars. One for every part would be a fourth of a large program.
    """
    return jax.vmap(fold_seed, (None, 0))(words, jnp.asarray(np.asarray(tags, np.uint32)))


def seed_of(seed: Seed, stats: Float[Array, "*shape"] | None = None) -> UInt[Array, " 2"]:
    """The key's two words; without a key, a hash of the bucket's number and of the statistics."""
    if seed.ndim == 1:
        return seed
    number = jnp.stack([mix(seed), mix(seed * jnp.uint32(0x9E3779B1))])  # 0 changes nothing
    return number if stats is None else number ^ statistics_seed(stats)


def statistics_seed(stats: Float[Array, "*shape"]) -> UInt[Array, " 2"]:
    """A seed that is the same on all workers and new in every step: a hash of the statistics."""
    bits = lax.bitcast_convert_type(stats.astype(jnp.float32), jnp.uint32)
    position = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    first = mix(bits ^ mix(position + jnp.uint32(1)))
    second = mix(bits + mix(position ^ jnp.uint32(0x85EBCA6B)))
    # One sum of both is fewer kernels than two sums.
    return jnp.sum(jnp.stack([first.reshape(-1), second.reshape(-1)]), axis=1, dtype=jnp.uint32)


def rounded_to(dtype: Any, x: Array) -> Array:
    """Rounds ``x`` to the numbers of a floating-point ``dtype``, and keeps the dtype of ``x``.

    XLA may drop a cast to ``dtype`` that a cast back follows, but not this.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


# --- Meshes ---------------------------------------------------------------------------------------


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """`jax.make_mesh`, also for GPUs of several hosts, which that function refuses.

    Devices that fast links connect are one slice (``device.slice_index``): the GPUs of a host, or
    of an NVLink domain. If there are several slices, the outermost axes are between them and the
    innermost axes inside, as far as ``axis_shapes`` allows: ``(4, 8)`` on four hosts of eight GPUs
    has a row for each host, ``(32,)`` has the GPUs of a host side by side. Without several slices
    the result is that of `jax.make_mesh`.

    Args:
      axis_shapes: the size of each axis, the outermost first. One size may be -1: as many as there
        are devices for.
      axis_names: their names.
      axis_types: as for `jax.make_mesh`; `None`: all axes are Explicit.
      devices: `None`: `jax.devices()`. If there are more than the axes take, the first ones.

    Returns:
      A mesh with the shape ``axis_shapes``.

    Raises:
      ValueError: the axes take more devices than there are, or several axes are longer than one
        device and the slices have different numbers of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    axis_shapes = _sizes(axis_shapes, len(devices))
    devices = devices[: math.prod(axis_shapes)]
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    if len(slices) <= 1:
        return jax.make_mesh(axis_shapes, axis_names, axis_types, devices=devices)
    types = (AxisType.Explicit,) * len(axis_shapes) if axis_types is None else axis_types
    return Mesh(_of_slices(axis_shapes, devices, slices), tuple(axis_names), axis_types=types)


def _sizes(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes of axes of ``count`` devices or fewer; -1 becomes what the others leave."""
    known = math.prod(size for size in shape if size != -1)
    rest = list(shape).count(-1)
    if rest > 1 or min((size for size in shape if size != -1), default=1) < 1:
        raise ValueError(f"axes {tuple(shape)}: sizes are 1 or more, and one of them may be -1")
    if known > count:
        raise ValueError(
            f"axes {tuple(shape)} take {known} devices or more, but there are {count}: make axes "
            f"whose sizes multiply to {count} or less, or start more processes"
        )
    if rest and count % known:
        raise ValueError(
            f"axes {tuple(shape)}: {count} devices are no multiple of {known}; replace -1 by "
            f"{count // known} or less, or choose other sizes beside it"
        )
    return tuple(count // known if size == -1 else size for size in shape)


def _of_slices(
    shape: tuple[int, ...], devices: Sequence[Any], slices: Counter[int | None]
) -> np.ndarray:
    """Devices of several slices, by slices along the outermost axes."""
    if len({*slices.values()}) == 1:
        between, left = [], len(slices)
        for size in shape:
            between.append(math.gcd(size, left))
            left //= between[-1]
        inside = [size // parts for size, parts in zip(shape, between, strict=True)]
        return create_hybrid_device_mesh(inside, between, devices)
    if sum(size > 1 for size in shape) > 1:
        counts = ", ".join(f"{count} of slice {which}" for which, count in slices.items())
        raise ValueError(
            f"axes {shape} of slices with different numbers of devices ({counts}): use one "
            f"axis, or pass devices= with {min(slices.values())} devices of each slice"
        )
    return np.array(sorted(devices, key=lambda d: (d.slice_index, d.id))).reshape(shape)


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh of `jax.set_mesh`, else of the first leaf with a mesh; it may be empty."""
    meshes = [get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def is_explicit(mesh: AbstractMesh) -> bool:
    """Whether JAX's types say how arrays lie on every axis of the mesh."""
    return not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit}


def meshes_of(tree: Any) -> list[Mesh | AbstractMesh]:
    """The meshes of the leaves that have one; those of tracers have no devices."""
    leaves = (jax.typeof(x) if isinstance(x, Tracer) else x for x in jax.tree.leaves(tree))
    shardings = (getattr(x, "sharding", None) for x in leaves)
    return [x.mesh for x in shardings if isinstance(x, NamedSharding)]


def set_around(mesh: Mesh | AbstractMesh, *, alone: bool) -> contextlib.AbstractContextManager[Any]:
    """The context of maps over a mesh, if that of another mesh is set around them.

    Args:
      mesh: the mesh of the maps.
      alone: whether no map is nested in another, so that each can have the devices of ``mesh``.

    Raises:
      ValueError: JAX would take the set mesh for ``mesh`` when it lowers the maps.
    """
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    around = get_abstract_mesh()
    own, other = ((x.shape, x.axis_types) for x in (abstract, around))
    if around.empty or own == other or around.manual_axes:
        return contextlib.nullcontext()
    if isinstance(mesh, Mesh) and not is_traced(()):
        return jax.set_mesh(mesh)
    if not (alone and isinstance(mesh, Mesh)):
        check_set_mesh(abstract)
    return jax.sharding.use_abstract_mesh(abstract)


def check_set_mesh(mesh: AbstractMesh) -> None:
    """Refuses to trace a map over a mesh without devices where `jax.set_mesh` has another one.

    When JAX lowers the map, it takes the set mesh for its collectives, whatever its shape.
    """

    def counting(x: Mesh | AbstractMesh) -> list[tuple[str, int]]:
        return [(name, size) for name, size in x.shape.items() if size > 1]

    around = get_abstract_mesh()
    if around.empty or counting(around) == counting(mesh):
        return
    around = concrete_mesh()
    if not around.empty and counting(around) != counting(mesh):
        raise ValueError(
            f"the mesh has axes {dict(mesh.shape)}, and jax.set_mesh has set {dict(around.shape)} "
            "around jax.jit: JAX would sum over groups of the latter. Call the jitted function in "
            "jax.set_mesh(mesh)"
        )


def is_traced(tree: Any) -> bool:
    """Whether JAX traces the call: a leaf is a tracer, or a `jax.jit` is around it."""
    leaves = [*jax.tree.leaves(tree), jnp.zeros(())]
    return any(isinstance(x, Tracer) for x in leaves)


def auto_mesh_of(
    axis: Axis, tree: Any, told: Mesh | AbstractMesh | None = None
) -> Mesh | AbstractMesh | None:
    """The mesh with these axes whose axes are all Auto, outside of maps; `None`: there is none.

    It is the first such among ``told``, that of `jax.set_mesh`, and those of the leaves. While JAX
    traces, it may have no devices.
    """
    traced = is_traced(tree)
    meshes: list[Any] = [told, get_abstract_mesh() if traced else jax.sharding.get_mesh()]
    for mesh in [*meshes, *meshes_of(tree)]:
        if mesh is not None and not mesh.empty and {*axis.names} <= {*mesh.axis_names}:
            kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
            if all(kind == AxisType.Auto or mesh.shape[name] == 1 for name, kind in kinds):
                return mesh
    return None


def is_outside(axis: Axis, tree: Any) -> bool:
    """Whether a collective is called outside of maps, on an Explicit mesh that has its axes."""
    if axis.groups is not None or axis.mapped:
        return False
    mesh = mesh_of(tree)
    return is_explicit(mesh) and set(axis.names) <= set(mesh.axis_names)


def set_of_leaves(axis: Axis, tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets the Explicit mesh that arrays are on if none is set: `jnp.zeros` is on no other."""
    if is_traced(tree) or not get_abstract_mesh().empty or not is_outside(axis, tree):
        return contextlib.nullcontext()
    return jax.set_mesh(next(x for x in meshes_of(tree) if isinstance(x, Mesh) and not x.empty))


def resharded(x: Any, mesh: AbstractMesh, spec: P) -> Array:
    """``x``, sharded by ``spec``; an array whose type has this spec is unchanged."""
    if isinstance(x, Array) and not jax.typeof(x).sharding.mesh.empty:
        if jax.typeof(x).sharding.spec == spec:
            return x
    return jax.reshard(x, NamedSharding(mesh, spec))


# --- Facts that JAX tells when it lowers a program ------------------------------------------------


def by_device_order(ordered: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> Any:
    """``ordered(*args)`` if the mesh has the devices 0, 1, ... in this order, else ``otherwise``.

    Both functions are traced, and only one is in the program. They must return trees of arrays of
    the same types, and have no side effects. ``otherwise`` is chosen where the devices are not
    known (an `AbstractMesh`, or a JAX of which this library does not know how to ask), where the
    program is exported to other devices, and under `jax.vmap`.
    """
    try:
        is_set = is_mesh_set()
        if is_set:
            needs_devices(_chosen_for_set_mesh)
    except (ImportError, RuntimeError):  # a version of JAX that does not say it
        return otherwise(*args)
    leaves, treedef = jax.tree.flatten(args)
    programs, shapes = {}, None
    for name, function in (("ordered", ordered), ("otherwise", otherwise)):
        flat = lambda *xs, function=function: function(*treedef.unflatten(xs))
        programs[name], shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    # JAX limits programs that need devices to one mesh, so only those of `jax.set_mesh` are such.
    chosen = _chosen_for_set_mesh if is_set else _chosen
    return jax.tree.unflatten(jax.tree.structure(shapes), chosen.bind(*leaves, **programs))


def knows_devices() -> bool:
    """Whether a program that is traced now may ask for its devices: a key for `jax.jit`.

    JAX reuses the trace of an inner `jax.jit` for all meshes that differ only in devices, also for
    an `AbstractMesh`, which has none, and for which JAX refuses a program that asks for them.
    """
    try:
        return is_mesh_set()
    except (ImportError, RuntimeError):  # as in `by_device_order`
        return False


def in_order(devices: np.ndarray) -> bool:
    """Whether a mesh's array has the devices 0, 1, ... in row-major order."""
    return [device.id for device in devices.flat] == list(range(devices.size))


def _run(*args: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return jaxpr_as_fun(otherwise)(*args)


def _types(*_: Any, ordered: Any, otherwise: Any) -> list[Any]:
    return list(otherwise.out_avals)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, ordered: Any, otherwise: Any) -> Any:
    results = jax.vmap(jaxpr_as_fun(otherwise), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


def _lower(context: Any, *args: Any, ordered: Any, otherwise: Any, for_set_mesh: bool) -> Any:
    module = context.module_context
    mesh = getattr(getattr(module, "axis_context", None), "mesh", None)
    exported = getattr(getattr(module, "lowering_parameters", None), "for_export", True)
    # JAX may have traced a part of the program before a mesh was set, and would lower it once.
    once = is_mesh_set() and not for_set_mesh
    known = isinstance(mesh, Mesh) and in_order(mesh.devices)
    program = ordered if known and not exported and not once else otherwise
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *args)


def _primitive(*, for_set_mesh: bool) -> Primitive:
    """The primitive of the choice, with its rules."""
    primitive = Primitive("dynamiq_by_device_order")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_types)
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, functools.partial(_lower, for_set_mesh=for_set_mesh))
    return primitive


_chosen = _primitive(for_set_mesh=False)
_chosen_for_set_mesh = _primitive(for_set_mesh=True)


# --- Shardings of a program's arguments -----------------------------------------------------------


def telling_shardings(note: Callable[[list[frozenset[str]]], None], values: Sequence[Any]) -> Any:
    """``values``; when JAX lowers the program, ``note`` gets the mesh axes that shard each of them.

    They are known of arguments of `jax.jit` that reach this call unchanged, if their shardings are.
    Others have no axes. ``note`` must be hashable.
    """
    return _telling.bind(*values, note=note)


def _axes_of_argument(value: Any) -> frozenset[str]:
    """The axes that shard a value of MLIR, if it is an argument of the program."""
    try:
        attributes = value.owner.owner.attributes["arg_attrs"][value.arg_number]
        # As <@mesh, [{"data"}, {}], replicated={"model"}>: the last brackets have the dimensions.
        dimensions, _, _ = str(attributes["sdy.sharding"]).rpartition("[")[2].partition("]")
        return frozenset(re.findall(r'"([^"]+)"', dimensions))
    except (AttributeError, IndexError, KeyError, TypeError):
        return frozenset()


def _lower_telling(context: Any, *values: Any, note: Any) -> Any:
    del context
    note([_axes_of_argument(value) for value in values])
    return values


def _telling_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, note: Any) -> Any:
    return _telling.bind(*primals, note=note), list(tangents)


_telling = Primitive("dynamiq_telling_shardings")
_telling.multiple_results = True
_telling.def_impl(lambda *values, note: list(values))
_telling.def_abstract_eval(lambda *types, note: list(types))
batching.primitive_batchers[_telling] = lambda values, dims, *, note: (list(values), list(dims))
ad.primitive_jvps[_telling] = _telling_jvp
mlir.register_lowering(_telling, _lower_telling, cacheable=False)  # the operands count
