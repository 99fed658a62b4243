"""Validation at the public boundary: what may be passed, and what the defaults mean."""

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from dynamiq_jax._compat import (
    AxisNames,
    Groups,
    axis_size,
    axis_tuple,
    is_constant,
    is_transposed,
    plainly_varies,
    replicated,
    tracks_varying,
    vmapped,
)
from dynamiq_jax.buckets import Bucket, Grouping, Leaf, ScaleAxis
from dynamiq_jax.methods import DynamiQ, Limits, MatrixMethod, Method, ShardedMethod
from dynamiq_jax.topologies import (
    Hierarchical,
    Topology,
    across_hosts,
    automatic,
    fast_links,
    with_transport,
)

AnyTopology = Topology | Hierarchical
ByPath = Callable[[str, jax.ShapeDtypeStruct], Method | None]
"""``(path, leaf) -> method``: how a leaf is compressed, such as that of path "layers/0/kernel";
`None`: not at all, it is summed by `jax.lax.psum`."""
AnyMethod = Method | ByPath


class Resolved(NamedTuple):
    """Arguments with their defaults filled in; no topology means XLA's own collectives."""

    method: Method
    topology: AnyTopology | None
    reason: str
    sizes: tuple[int, ...]

    @property
    def n_workers(self) -> int:
        """Workers on all axes."""
        return math.prod(self.sizes)

    @property
    def scale_axis(self) -> ScaleAxis:
        """Along which axis of leaves coordinates follow each other, if the method has a choice."""
        return getattr(self.method, "scale_axis", None)

    def limits(self, *, here: bool = True) -> Limits:
        """What `buckets.group_leaves` needs to know; ``here`` as for `resolve`."""
        return self.method.limits(self.n_workers, fast_links=here and fast_links())

    def of_bucket(self, bucket: Bucket) -> "Resolved":
        """The same for one bucket: a method of matrices learns the shape of its leaf."""
        if not isinstance(self.method, MatrixMethod):
            return self
        (leaf,) = bucket.leaves
        return self._replace(method=cast(Method, self.method.of_matrix(*leaf.matrix)))


def chooses_by_path(method: object) -> bool:
    """Whether it is a `ByPath`."""
    return callable(method) and not isinstance(method, type) and not hasattr(method, "wire_bits")


def resolve(
    method: AnyMethod | None,
    topology: AnyTopology | None,
    sizes: tuple[int, ...],
    *,
    hierarchies: bool = True,
    here: bool = True,
) -> Resolved:
    """Fills in defaults for axes of ``sizes``, and refuses what does not go together.

    Args:
      method: `None` is ``DynamiQ()``.
      topology: `None` chooses by `dynamiq_jax.topologies.choice`.
      sizes: workers on every axis, the outermost first.
      hierarchies: whether they can serve.
      here: whether the workers are JAX's devices; else the choice is `assumed`'s.
    """
    check_kinds(method, topology)
    method = DynamiQ() if method is None else cast(Method, method)
    if topology is None and method.native_by_default:
        reason = "native collectives, the method's default"
    elif topology is None:
        topology, reason = automatic(sizes if hierarchies else (math.prod(sizes),), here=here)
    else:
        reason = "as passed"
    if isinstance(topology, Hierarchical):
        topology = _two_levels(topology, sizes, allowed=hierarchies)
    if topology is not None:
        topology, engines = with_transport(topology, here=here)
        reason = f"{reason}; by copy engines, since {engines}" if engines else reason
    if isinstance(topology, Hierarchical):
        assert topology.outer is not None
        topology.outer.check(math.prod(sizes[:-1]))
        method.check(math.prod(sizes[:-1]), topology.outer)
        if topology.inner is not None:
            if method.needs_state:
                raise NotImplementedError(
                    f"method={method!r} keeps a state, and the halves that Hierarchical(inner=...) "
                    "needs keep none; pass inner=None, or a method without error feedback"
                )
            topology.inner.check(sizes[-1])
            _check_sharded(method, "the halves that Hierarchical(inner=...) needs")
    else:
        if topology is not None:
            topology.check(math.prod(sizes))
        method.check(math.prod(sizes), topology)
    return Resolved(method, topology, reason, sizes)


def sharded(resolved: Resolved) -> tuple[ShardedMethod, Topology | None]:
    """The method and the topology for the halves of an all-reduce."""
    _check_sharded(resolved.method, "psum_scatter and all_gather")
    if resolved.method.needs_state:
        raise NotImplementedError(
            f"method={resolved.method!r} keeps a state, and psum_scatter and all_gather keep none; "
            "pass a method without error feedback"
        )
    assert not isinstance(resolved.topology, Hierarchical)
    return cast(ShardedMethod, resolved.method), resolved.topology


def _check_sharded(method: Method, what: str) -> None:
    if not hasattr(method, "reduce_scatter"):
        raise NotImplementedError(
            f"method={method!r} does not do {what}; pass dq.DynamiQ(), or reduce with dq.psum over "
            "a topology without them"
        )


def _two_levels(topology: Hierarchical, sizes: tuple[int, ...], *, allowed: bool) -> AnyTopology:
    """The hierarchy with its outer topology filled in; a level of one worker needs none."""
    if not allowed:
        raise ValueError(
            "topology=Hierarchical() serves psum and pmean; for psum_scatter and all_gather pass "
            "dq.Direct(), dq.Butterfly() or dq.Ring() and one axis at a time"
        )
    if len(sizes) < 2:
        raise ValueError(
            f"topology=Hierarchical() needs two axes and got {len(sizes)}; pass "
            "axis_name=('node', 'gpu'), the axis of the fast links last"
        )
    n_outer = math.prod(sizes[:-1])
    outer = topology.outer or across_hosts(n_outer)
    if sizes[-1] == 1:
        return outer
    return Hierarchical(inner=topology.inner, outer=outer)


def axis_counts(n_workers: int | tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of all axes, from that of one or of several."""
    given = tuple(n_workers) if isinstance(n_workers, tuple | list) else (n_workers,)
    try:
        sizes = tuple(map(operator.index, given))
    except TypeError:
        sizes = None
    if sizes is None or any(isinstance(size, bool) for size in given):
        axis = next((size for size in given if isinstance(size, str)), "data")
        raise ValueError(
            f"n_workers={n_workers!r} is not a number of workers; pass an int, or one for each "
            f"axis, such as mesh.shape[{axis!r}], or inside a map jax.lax.axis_size({axis!r})"
        )
    if not sizes or min(sizes) < 1:
        raise ValueError(f"n_workers={n_workers} must be at least 1")
    return sizes


def check_kinds(method, topology) -> None:
    """Refuses arguments of the wrong kind, with the remedy."""
    if method is not None and (isinstance(method, type) or not hasattr(method, "wire_bits")):
        raise ValueError(f"method={method!r} is not a method; pass for example dq.DynamiQ(bits=5)")
    if topology is None or isinstance(topology, Hierarchical):
        return
    members = ("schedule", "stages", "check", "chunks_per_worker", "balance", "transport")
    missing = [name for name in members if not hasattr(topology, name)]
    if isinstance(topology, type) or missing:
        lacks = f" (it lacks {', '.join(missing)})" if 0 < len(missing) < len(members) else ""
        raise ValueError(
            f"topology={topology!r} is not a topology{lacks}; pass for example dq.Ring()"
        )


def check_axis(axis_name, axis_index_groups=None) -> AxisNames:
    """The axis name, several or none as a tuple, or groups of its workers."""
    if isinstance(axis_name, Groups):
        return axis_name
    if isinstance(axis_name, list):
        axis_name = tuple(axis_name)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise NotImplementedError(
            f"axis_name={axis_name!r}: expected the name of a mapped axis (a str), or a tuple of "
            "names; positional axes of jax.lax.psum are not supported"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; pass each once")
    axis_name = names[0] if len(names) == 1 else names
    if axis_index_groups is None or not names:
        return axis_name
    return _groups_of(axis_name, axis_index_groups)


def _groups_of(axis_name, axis_index_groups) -> Groups:
    groups = tuple(tuple(int(worker) for worker in group) for group in axis_index_groups)
    n_workers = math.prod(axis_sizes(axis_name, "the collective"))
    if sorted(worker for group in groups for worker in group) != list(range(n_workers)):
        raise ValueError(
            f"axis_index_groups={groups} must cover all indices exactly once, and axis "
            f"{axis_name!r} has those from 0 to {n_workers - 1}; pass a partition of these"
        )
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"axis_index_groups={groups} has groups of {sizes} workers; pass groups that are all "
            "the same size"
        )
    return Groups(axis_name, groups)


def check_groups(axis_name: AxisNames, *, all_reduce: bool) -> None:
    """Refuses groups of workers where `jax.lax` knows none."""
    if not isinstance(axis_name, Groups):
        return
    asked = f"axis_index_groups={axis_name.groups}"
    remedy = "give each group an axis of its own and pass its name, as axis_name='gpu' of axes "
    remedy += "('node', 'gpu')"
    if vmapped(axis_name):
        raise NotImplementedError(f"{asked}: jax.vmap has no groups of workers; {remedy}")
    if all_reduce and tracks_varying(axis_name):
        raise NotImplementedError(
            f"{asked}: under jax.shard_map with check_vma=True no sum is replicated within groups "
            f"alone; pass check_vma=False, or {remedy}"
        )


def check_state(state, first: Callable[[], tuple], method: Method, n_workers: int) -> list:
    """The states of all buckets, empty ones where the caller keeps none.

    Args:
      state: what the caller passed.
      first: makes `init_state`'s state of one worker.
      method: what the state is of.
      n_workers: how many reduce.
    """
    expected = jax.eval_shape(first)
    n_buckets = len(expected)
    if state is None:
        if method.needs_state and n_buckets and n_workers > 1:
            raise ValueError(
                f"method={method!r} is only right with its state: call dq.reduce(tree, axis_name, "
                "method=method, state=dq.init_state(tree, n_workers, method=method)) and keep the "
                "state that it returns for the next step"
            )
        return [()] * n_buckets
    state = tuple(state) if isinstance(state, list) else state  # as checkpoints may return it
    if not isinstance(state, tuple) or len(state) != n_buckets:
        found = len(state) if isinstance(state, tuple) else repr(type(state).__name__)
        raise ValueError(
            f"state is for {found} buckets and the tree has {n_buckets}; pass what "
            "dq.init_state(tree, n_workers, method=..., topology=...) gave for the same arguments"
        )
    wanted, given = ([jnp.shape(x) for x in jax.tree.leaves(t)] for t in (expected, state))
    if jax.tree.structure(expected) != jax.tree.structure(state) or wanted != given:
        raise ValueError(
            f"state has leaves of shapes {given}, and method={method!r} keeps {wanted} of this "
            "tree on each worker; pass what dq.init_state(tree, n_workers, method=..., "
            "topology=...) gave for the same arguments, one worker's part if it is stacked"
        )
    return list(state)


def axis_sizes(axis_name: AxisNames, collective: str = "the reduction") -> tuple[int, ...]:
    """Workers on every axis; groups count as one axis.

    Raises:
      NameError: an axis is not mapped where ``collective`` is called.
    """
    if isinstance(axis_name, Groups):
        return (axis_size(axis_name),)
    try:
        return tuple(lax.axis_size(name) for name in axis_tuple(axis_name))
    except NameError as error:
        raise NameError(
            f"Found an {error}. To fix this, please call {collective} under `jax.shard_map`, "
            "`jax.pmap` or `jax.vmap` with an axis of this name."
        ) from None


Fixed = dict[int, Literal["constant", "replicated", "native"]]
"""Leaves that are not compressed whatever their size, by index, and why."""


def fixed_leaves(leaves: list[Leaf], values, axis_name: AxisNames) -> Fixed:
    """Leaves whose value JAX knows to be the same on all workers, and those for `jax.lax` alone.

    The latter vary over some of the axes, are "reduced" or "unreduced", types that only it can pass
    on, or are traced to be transposed.
    """
    tracked = tracks_varying(axis_name)
    fixed: Fixed = {}
    for leaf, value in zip(leaves, values, strict=True):
        if is_constant(value):
            fixed[leaf.index] = "constant"
        elif is_transposed(value):
            fixed[leaf.index] = "native"
        elif tracked and not plainly_varies(value, axis_name):
            same = replicated(value, axis_name)
            fixed[leaf.index] = "replicated" if same else "native"
    return fixed


def check_varying(grouping: Grouping, fixed: Fixed, axis_name: AxisNames, n_workers: int) -> None:
    """Refuses leaves that would be compressed, and are known to be equal on all workers."""
    found = _replicated(grouping, fixed)
    if found:
        raise ValueError(
            f"{_described(found)} do not vary over axis {axis_name!r}: all {n_workers} workers "
            f"hold the same value, which a psum would multiply by {n_workers}. Gradients of "
            f"replicated parameters are already summed under check_vma=True: {_CAST_FIRST}"
            f"jax.lax.pcast(params, {axis_name!r}, to='varying')"
        )


_CAST_FIRST = "differentiate with dq.value_and_grad, or cast the parameters first with "
NOTABLE, LARGE = 4096, 65536
"""Coordinates of leaves that look like parameters, and of leaves that are worth compressing."""


def warn_of_uncompressed(
    grouping: Grouping, fixed: Fixed, axis_name: AxisNames, resolved: Resolved
) -> None:
    """Warns of large leaves that are not compressed, where the caller may not expect that.

    They are equal on all workers, or a limit that the caller did not set keeps them from being
    compressed. For the latter, they hold more than a tenth of what could be compressed.
    """
    n = resolved.n_workers
    equal = [leaf for leaf in _replicated(grouping, fixed) if leaf.size >= NOTABLE]
    if equal and n > 1:
        warnings.warn(
            f"{_described(equal)} do not vary over axis {axis_name!r}: all {n} workers hold the "
            "same value, so that the mean is that value and nothing is compressed. If these are "
            "gradients of replicated parameters, JAX has summed them over the axis already "
            f"(check_vma=True), and unless the loss was averaged over it they are {n} times the "
            f"mean: {_CAST_FIRST}jax.lax.pcast(params, {axis_name!r}, to='varying')",
            stacklevel=4,
        )
    method = getattr(resolved.method, "method", resolved.method)  # within ErrorFeedback
    names = ("min_bucket_size", "min_bucket_bytes")
    if n == 1 or any(getattr(method, name, None) is not None for name in names):
        return
    small = [
        (leaf, reason)
        for leaf, reason in grouping.exact
        if leaf.size >= LARGE and "min_bucket" in reason and leaf.index not in fixed
    ]
    moved = sum(leaf.nbytes for bucket in grouping.buckets for leaf in bucket.leaves)
    native = sum(leaf.nbytes for leaf, _ in small)
    if native > (moved + native) / 10:
        leaves, reasons = zip(*small, strict=True)
        warnings.warn(
            f"{_described(leaves)} ({native:,} bytes) are summed by jax.lax.psum, since there is a "
            f"{reasons[0]}. dq.explain(tree, {n}) tells of every leaf which way it goes; pass "
            "DynamiQ(min_bucket_bytes=0) to compress small buckets, too, or set one of these "
            "limits to what you want",
            stacklevel=4,
        )


def _replicated(grouping: Grouping, fixed: Fixed) -> list[Leaf]:
    """Leaves that would be compressed if JAX did not know that all workers hold the same."""
    leaves = (leaf for bucket in grouping.buckets for leaf in bucket.leaves)
    return [leaf for leaf in leaves if fixed.get(leaf.index) == "replicated"]


def _described(leaves: Sequence[Leaf]) -> str:
    """The first leaf, and how many more there are."""
    first = leaves[0]
    return f"leaf {first.name} ({first.dtype.name}{list(first.shape)}) and {len(leaves) - 1} more"
