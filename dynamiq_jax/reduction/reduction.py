"""Sums over workers of leaves that may be sharded: data parallelism, FSDP, HSDP and ZeRO-1.

`AllReduce` is the rule by which the engine sums one device's leaves. `Reduction` is a whole tree's
sum: if some of the data axes split a leaf, its terms are scattered over these axes, and the results
are all-reduced over the other axes. `Reduction.gather` gathers the shards.

`Pending` has differences of parameters that travel at the start of the next step
(`dq.optax.sharded`). An update changes the masters and keeps the copy. The next step adds the
differences to the copy, function by function, each before the function runs::

    update t       masters m(t+1) from m(t); the copy stays c(t); `Pending` has the key of step t
    step t + 1     c(t+1) = c(t) + decoded(m(t+1) - c(t)) of function 0, then function 0 runs
                   c(t+1) of function 1 arrives beside it, then function 1 runs, ...
    update t + 1   takes c(t+1) as the parameters

So all functions run with c(t+1), as if the differences had travelled at the end of update t. The
state does not hold differences: masters and copy determine them.
"""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from dynamiq_jax.compression.agreement import compare_first
from dynamiq_jax.compression.compression import Compression, first_states
from dynamiq_jax.compression.shards import Dimensions, Shards
from dynamiq_jax.core.axis import (
    Axis,
    AxisName,
    Seed,
    Varying,
    by_device_order,
    check_key,
    fold_seed,
    key_words,
    knows_devices,
)
from dynamiq_jax.core.checks import Op, axis_sizes, check_groups
from dynamiq_jax.core.compat import trace_number, varying_axes
from dynamiq_jax.core.warned import warn
from dynamiq_jax.engine.run import (
    Fixed,
    Values,
    check_varying,
    fixed_leaves,
    run,
    warn_of_equal,
    with_tangent,
)
from dynamiq_jax.methods import BF16, F32, Method, State
from dynamiq_jax.methods.base import Call, check_choice
from dynamiq_jax.methods.metrics import (
    BucketMetrics,
    Metrics,
    PayloadFacts,
    Reduced,
    bucket_metrics,
    of_all_parts,
    summarise,
)
from dynamiq_jax.plan.plan import Native, Plan
from dynamiq_jax.reduction.scatter_gather import gather_over, natively, scatter_over
from dynamiq_jax.topologies import Topology
from dynamiq_jax.tree.leaves import (
    Bucket,
    Leaf,
    Padding,
    Placement,
    Serializable,
    Split,
    Surroundings,
    axes_of,
    bucket_axes,
    concatenate,
    describe_leaves,
    flat_specs,
    n_parts,
    names_of,
    padding_of,
    part,
    split,
    surroundings,
    told_specs,
    whole_shape,
)

# --- All-reduces of one device --------------------------------------------------------------------


class Inner(NamedTuple):
    """A call that reduces, in the backward pass, the gradients of what it is passed."""

    caller: str
    names: tuple[str, ...]
    """The axes that it reduces over."""
    op: Op
    shards: frozenset[str]
    """The axes over which its parameters are shards."""


Note = Callable[[Any, Inner], Any]
"""(parameters, the call that they are passed to) -> the same parameters."""

_note: contextvars.ContextVar[Note | None] = contextvars.ContextVar("note", default=None)

HEARD = 3
"""The number of traces in which such calls are heard: in one that JAX takes up from elsewhere they
would not be. `training.explicit_axes` has 1 and 2."""


@contextlib.contextmanager
def noting(note: Note) -> Iterator[None]:
    """A block in which parameters whose gradients are reduced in the backward pass go by this."""
    around = _note.get()
    token = _note.set(note if around is None else lambda x, inner: note(around(x, inner), inner))
    try:
        with trace_number(trace_number.value or HEARD):
            yield
    finally:
        _note.reset(token)


def noted(params: Any, total: "Reduction", caller: str, specs: Any = None) -> Any:
    """Parameters whose gradients are reduced in the backward pass, as `noting` wants them."""
    note = _note.get()
    if note is None:
        return params
    told = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    shards = frozenset(name for spec in told if isinstance(spec, P) for name in axes_of(spec))
    return note(params, Inner(caller, total.axis.names, total.op, shards))


def check_state(state: Any, expected: tuple, plan: Plan) -> list:
    """The states of all buckets, of ``expected`` shapes; empty where the caller keeps none."""
    n_buckets = len(expected)
    methods = list(dict.fromkeys(bucket.route.method for bucket in plan.buckets))
    if state is None:
        if (method := plan.needs_state) is not None:
            raise ValueError(
                f"method={method!r} needs a state: call dq.reduce(tree, axis_name, "
                "compression=method, state=dq.Compression(method).init_state(tree, n_workers)) and "
                "carry the state that it returns to the next step. The function that "
                "dq.value_and_grad returns takes state=, too, made with stacked=True"
            )
        return [()] * n_buckets
    state = tuple(state) if isinstance(state, list) else state  # as checkpoints may return it
    remedy = "pass what dq.Compression(method, ...).init_state(tree, n_workers) gave for the same"
    if not isinstance(state, tuple) or len(state) != n_buckets:
        found = len(state) if isinstance(state, tuple) else repr(type(state).__name__)
        raise ValueError(
            f"state is for {found} buckets and the tree has {n_buckets}; {remedy} arguments"
        )
    wanted, given = ([jnp.shape(x) for x in jax.tree.leaves(t)] for t in (expected, state))
    if jax.tree.structure(expected) != jax.tree.structure(state) or wanted != given:
        raise ValueError(
            f"state has leaves of shapes {given}, and method={methods[0]!r} keeps {wanted} of this "
            f"tree on each worker; {remedy} arguments, one worker's part if it is stacked"
        )
    return list(state)


# --- Rule -----------------------------------------------------------------------------------------


def weighted(
    values: list[Array],
    leaves: list[Leaf],
    fixed: Fixed,
    op: Op,
    weight: Array | float,
    axis: Axis,
) -> list[Array]:
    """Scales leaves that differ between workers so that their plain mean is the weighted mean."""
    if op != "mean":
        raise ValueError(f"weight goes with op='mean', and op={op!r}; multiply the leaves instead")
    if jnp.shape(weight) != ():
        raise ValueError(f"weight has shape {jnp.shape(weight)}; pass one number for each worker")
    wrong = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if wrong:
        raise ValueError(
            f"weight: leaf {wrong[0].name} is {wrong[0].dtype.name}, which has no weighted mean; "
            "reduce such leaves apart, or cast them to f32"
        )
    share = share_of(weight, axis)
    # What is equal on all workers is its own mean, whatever the weights are.
    alike = {i for i, why in fixed.items() if why != "native"}
    return [x if i in alike else weigh(jnp.asarray(x), share) for i, x in enumerate(values)]


def share_of(weight: Array | float, axis: Axis) -> Array:
    """This worker's weight divided by the mean weight; 0 if all are 0, NaN if one is invalid."""
    weight = axis.to_varying(jnp.asarray(weight, jnp.float32))
    weight = jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)
    # The largest weight becomes 1, so that no sum overflows. The mean does not depend on it.
    largest = axis.pmax(jnp.nan_to_num(lax.stop_gradient(weight)))
    # Compilers may multiply by 1 / largest, which has to be a normal number, too.
    unit = jnp.where(largest > 2.0**64, jnp.float32(2.0**-64), 1.0)
    weight = (weight * unit) / jnp.where(largest > 0, largest * unit, 1.0)
    total = axis.psum(weight)
    # The inner choice keeps the derivative of the outer one from dividing by 0.
    return jnp.where(total == 0, 0.0, weight * (axis.size / jnp.where(total == 0, 1.0, total)))


def weigh(x: Array, share: Array | None) -> Array:
    """``x`` times the share; 0 for a share of 0, whatever ``x`` is."""
    if share is None:
        return x
    wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
    # A choice: NaN of a worker without examples must not get through.
    return jnp.where(share == 0, 0.0, x.astype(wide) * share.astype(wide)).astype(x.dtype)


def exact_of(axis: Axis, op: Op) -> Callable:
    """The exact reduction of a tree."""
    return axis.pmean if op == "mean" else axis.psum


class AllReduce(NamedTuple):
    """The rule of all-reduces."""

    axis: Axis
    op: Op
    metrics: bool = False
    asks: bool = False
    """Whether the program may ask for its devices (`core.axis.knows_devices`)."""

    def native(self, leaves: Sequence[Native], values: Values) -> Values:
        """One call, so that XLA may send all leaves together."""
        indices = [leaf.index for leaf, _, _ in leaves]
        sums = exact_of(self.axis, self.op)([values[i] for i in indices])
        return dict(zip(indices, sums, strict=True))

    def joined(self, bucket: Bucket, values: Values) -> Any:
        """The flat bucket; of one worker its leaves, which need no copy."""
        if self.axis.size == 1:
            return [values[leaf.index] for leaf in bucket.leaves]
        return concatenate(bucket, values)

    def moved(self, x: Any, seed: Seed, state: State, plan: Plan, number: int) -> tuple[Any, Any]:
        """See `Rule`; the facts are `BucketMetrics`."""
        bucket, exact = plan.buckets[number], exact_of(self.axis, self.op)
        if self.axis.size == 1:
            found, facts = exact(x), None  # JAX knows of the results that all workers hold them
            if self.metrics:
                own = dict(zip((leaf.index for leaf in bucket.leaves), found, strict=True))
                facts = bucket_metrics(concatenate(bucket, own), PayloadFacts(error=0.0))
            return found, (state, facts)
        route = bucket.route
        method, divisor = route.runner.of_bucket(bucket), self.axis.size if self.op == "mean" else 1
        push = route.push if self._pushes(plan, number) else None
        way = _Way(self.axis, method, route.flat, divisor, self.metrics, push, self.asks)
        run = self.axis.program(_reduce_bucket)
        # The encoding has no derivative; `with_tangent` gives that of the exact sum.
        total, told = run(*lax.stop_gradient((x, seed, state)), way=way)
        return with_tangent(exact, x, total), told

    def _pushes(self, plan: Plan, number: int) -> bool:
        """Whether a push kernel reduces a bucket.

        JAX's collectives also run over axes of `jax.vmap`; push kernels do not. Several large
        buckets overlap with each other, but not beside a push kernel.
        """
        pushed, axis = plan.buckets[number].route.pushed, self.axis
        if pushed is None or axis.groups is not None or pk.needs_of_push(axis.names) is not None:
            return False
        return sum(bucket.nbytes for bucket in plan.buckets) <= pushed[1]

    def taken_apart(self, result: Any, bucket: Bucket) -> Values:
        """See `Rule`."""
        if self.axis.size == 1:
            return dict(zip((leaf.index for leaf in bucket.leaves), result, strict=True))
        return dict(split(bucket, result))


def reduce_leaves(
    values: Values, key: Array | None, states: list[State], *, plan: Plan, rule: AllReduce
) -> tuple[Values, list[State], Metrics | None]:
    """Sums or means of one device's leaves, the next states, and metrics if the rule has them."""
    values, after, known = run(plan, rule, values, key, states)
    if not rule.metrics:
        return values, after, None
    pairs = zip(known, plan.buckets, strict=True)
    of_leaves = [of_all_parts(facts, bucket.axes) for facts, bucket in pairs]
    moves = plan.moves
    sent = sum(move.sent_bits for move in moves) / 8
    bits = plan.bits_per_coord(sent, sum(move.size for move in moves))
    return values, after, summarise(of_leaves, bits_per_coord=bits, wire_bytes=sent)


class _Way(NamedTuple):
    """How buckets are reduced: the static fields of a `Call`, and the method that gets it."""

    axis: Axis
    method: Method
    topology: Topology | None
    divisor: int
    metrics: bool
    push: Topology | None = None
    """The topology for push kernels, if these are faster."""
    asks: bool = False
    """Whether the program may ask for its devices; a trace that does not is another one."""


# A function of its own in the program: buckets of the same size are traced and lowered once.
@functools.partial(jax.jit, static_argnames="way")
def _reduce_bucket(
    x: Array, seed: Seed, state: State, *, way: _Way
) -> tuple[Array, tuple[State, BucketMetrics | None]]:
    if way.push is not None:
        # Where devices are not in the order that kernels need, JAX's collectives serve.
        alone = way._replace(push=None)
        ways = alone._replace(topology=way.push), alone
        by = (functools.partial(_reduce_bucket, way=one) for one in ways)
        return by_device_order(*by, x, seed, state)
    call = Call(way.axis, way.topology, seed, way.divisor, state, way.metrics)
    outcome = way.method.all_reduce(x, call)
    known = bucket_metrics(outcome.value, outcome.facts) if way.metrics else None
    return outcome.value, (outcome.state, known)


def over_open_axes(run: Callable, around: Surroundings, specs: Any, split_over: list) -> Callable:
    """``run(values, key, states)`` mapped over the open axes, over which leaves are still whole.

    States of buckets whose parts differ have a leading axis of parts.
    """

    def each(f: Callable, states: list[State]) -> list[State]:
        pairs = zip(states, split_over, strict=True)
        return [jax.tree.map(f, state) if axes else state for state, axes in pairs]

    def of_part(values, words, states):
        # A device has one part, so the axis of parts has length 1 here.
        values, states, found = run(values, words, each(lambda x: x[0], states))
        return values, each(lambda x: x[None], states), found

    of_states = [P(axes) if axes else P() for axes in split_over]
    mapped = around.per_part(of_part, (specs, P(), of_states), (specs, of_states, P()))

    def of_whole(values, key, states):
        pairs = zip(states, of_states, strict=True)
        typed = [around.as_typed(state, spec) for state, spec in pairs]
        return mapped(values, key_words(key), typed)

    return of_whole


# --- Trees of leaves that may be sharded ----------------------------------------------------------


def _first(at: Dimensions) -> int:
    return min(at) if isinstance(at, tuple) else at


LARGE_GATHER = 1 << 30
"""Bytes of whole parameters on one device above which a gather before the loss is warned of."""


def warn_of_gather(gathered: list[Leaf], remedy: str, what: str = "parameters") -> None:
    """Warns of a large gather before the loss; the leaves are what one device holds afterwards."""
    nbytes = sum(leaf.nbytes for leaf in gathered)
    if nbytes > LARGE_GATHER:
        warn(
            f"{len(gathered)} sharded {what} are gathered before the loss, "
            f"{nbytes:,} bytes on every device; to hold one layer at a time {remedy}",
        )


GATHERS = 1 << 31
"""Added to a dimension's number for the seed of a gather, whose noise is not the scatter's."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A sum or mean over workers: the leaves, the axes, and how leaves travel."""

    axis: Axis
    compression: Compression
    op: Op
    placement: Placement = Placement()
    """How leaves lie on the mesh; by default they are whole on every worker."""
    gathers: Compression | None = None
    """How shards travel; `None`: nothing is gathered."""
    copied: bool = False
    """Whether all workers hold copies of sharded leaves, so that no loss gathers these (FSDP)."""
    to: Varying = "varying"
    """JAX's type of whole leaves after a gather, as for `all_gather`."""
    overlaps: bool = False
    """Whether reductions run beside a forward or backward pass."""

    def __post_init__(self):
        """Refuses other operations."""
        check_choice("op", self.op, get_args(Op))

    def with_specs(self, specs: Any) -> "Reduction":
        """This reduction with what the user tells of open axes."""
        placement = dataclasses.replace(self.placement, specs=specs)
        return dataclasses.replace(self, placement=placement)

    def placed(self, specs: Sequence[P], **told: Any) -> "Reduction":
        """The sum of leaves that ``specs`` split; ``told`` is as for `Placement.of`."""
        placement = self.placement.of(specs, self.axis.names, **told)
        return dataclasses.replace(self, placement=placement)

    def of_shards(self, params: Any, specs: Any, copies: Any = None) -> tuple["Reduction", Any]:
        """The sum of gradients of ``params``, and the shapes and dtypes of whole leaves.

        Leaves whose ``specs`` name the axis are one worker's shards. If all workers have ``copies``
        of the whole leaves, shards may be padded.
        """
        axis, around = self.axis, surroundings(self.axis)
        known = {*around.sizes, *axis.names}
        told = flat_specs(specs, params, known)
        total = self.with_specs(specs).placed(told)
        splits = total.placement.splits
        opened = (around.specs(params, specs) if any(splits) else None) or [P()] * len(told)
        sizes = dict(zip(axis.names, axis_sizes(axis), strict=True))
        within = {name: around.sizes[name] if name in around.open else 1 for name in known}
        leaves, treedef = jax.tree.flatten(params)
        leaves = zip(describe_leaves(params), leaves, told, splits, strict=True)
        shapes, padding = [], []
        of_copies: list[Any] = [None] * len(told)
        if copies is not None and jax.tree.structure(copies) == treedef:
            of_copies = [jnp.shape(x) for x in jax.tree.leaves(copies)]
        for (leaf, x, spec, where), copy in zip(leaves, of_copies, strict=True):
            part(leaf, spec, within)  # refuses specs that do not fit
            _check_shard(leaf, x, spec, where, axis, around.open)
            whole, zeros = whole_shape(leaf.shape, where, sizes), Padding()
            if copy is not None and len(copy) == len(whole):
                zeros = padding_of(copy, spec, sizes)
                # The shard tells the padded length alone; the copy tells where the leaf ends.
                if whole == zeros.padded_shape(copy):
                    whole = copy
                else:  # another leaf's copy
                    zeros = Padding()
            padding.append(zeros)
            shapes.append(jax.ShapeDtypeStruct(whole, leaf.dtype))
        total = total.placed(told, opened=opened, padding=padding)
        return total, treedef.unflatten(shapes)

    def check_scatter(self, state: State | None, metrics: bool) -> None:
        """Refuses a state and metrics, which scattered sums cannot have."""
        if metrics or state is not None:
            raise NotImplementedError(
                f"parameters are sharded over the data axes {self.axis.names}, and scattering "
                "their gradients keeps no state and has no metrics; pass metrics=False, no state, "
                "and a method without memory, or replicate the parameters over these axes"
            )

    def some(self, places: Collection[int]) -> "Reduction":
        """A reduction of only some of these leaves, by their numbers."""
        return dataclasses.replace(self, placement=self.placement.some(places))

    # --- Where axes may be open -------------------------------------------------------------------

    def reduce(
        self,
        tree: Any,
        key: Array | None = None,
        state: State | None = None,
        *,
        metrics: bool = False,
        weight: Array | float | None = None,
    ) -> Reduced:
        """`dynamiq_jax.reduce` inside of a map; of a leaf that workers split each gets its shard.

        Shards come without states, metrics and weights. Workers may be groups.
        """
        axis, op, compression = self.axis, self.op, self.compression
        if self.placement.is_split:
            return Reduced(self._per_part(self.scatter, tree)(tree, key), None, None)
        sizes = axis_sizes(axis)
        check_key(key, axis)
        values, treedef = jax.tree.flatten(tree)
        around = surroundings(axis)
        specs = self.placement.specs
        leaves = around.leaves(tree, specs)
        told = {"op": op, "specs": specs, "metrics": metrics, "key": key, "state": state}
        told["weight"] = weight
        facts = functools.partial(compression.facts, axis, sizes, leaves, **told)
        compare_first("all-reduce", axis, leaves, facts)
        # A leaf travels in a bucket or exactly; a ``fixed`` one does not, or only JAX sums it.
        fixed = fixed_leaves(leaves, values, axis)
        # A state is one for all steps, so its buckets depend on neither of these.
        without, overlaps = (fixed, self.overlaps) if state is None else ((), True)
        plan = compression.plan(
            leaves, sizes, without=without, overlaps=overlaps, keyed=key is not None
        )
        if len(fixed) < len(leaves):
            check_groups(axis, all_reduce=True)
        # A mean of equal leaves is the leaf itself, which needs no error.
        if op == "sum" or state is not None:
            check_varying(plan, fixed, axis)
        warn_of_equal(plan, fixed, axis)
        # The state of every bucket; parts of it over open axes have a leading axis.
        split_over = [bucket_axes(bucket, around.open) for bucket in plan.buckets]
        counts = [n_parts(axes, around.sizes) for axes in split_over]
        expected = jax.eval_shape(functools.partial(first_states, plan, counts))
        states = check_state(state, expected, plan)
        if weight is not None:
            values = weighted(values, leaves, fixed, op, weight, axis)
        # A mean needs no traffic for leaves that are in no bucket and that JAX knows to be equal.
        compressed = {leaf.index for bucket in plan.buckets for leaf in bucket.leaves}
        for i in fixed.keys() - compressed:
            # JAX multiplies equal leaves by n for a sum.
            moves = op == "sum" or fixed[i] == "native"
            if moves or not jnp.issubdtype(leaves[i].dtype, jnp.inexact):
                values[i] = exact_of(axis, op)(values[i])
        moving = {i: x for i, x in enumerate(values) if i in compressed or i not in fixed}
        rule = AllReduce(axis, op, metrics, knows_devices())
        run = functools.partial(reduce_leaves, plan=plan, rule=rule)
        if plan.buckets and around.open:
            opened = told_specs(tree, self.placement.specs, around, plan.buckets)
            run = over_open_axes(run, around, {i: opened[i] for i in moving}, split_over)
        moved, states, found = run(moving, key, states)
        total = treedef.unflatten(moved.get(i, value) for i, value in enumerate(values))
        return Reduced(total, None if state is None else tuple(states), found)

    def whole(self, shards: Any, key: Array | None = None) -> Any:
        """Whole leaves, from every worker's shards of them."""
        if not self.placement.is_split:
            return shards
        return self._per_part(self.gather, shards)(shards, key)

    def _per_part(self, run: Callable[[Any, Array | None], Any], tree: Any) -> Callable[..., Any]:
        if self.placement.opened is None:
            return run
        specs = jax.tree.structure(tree).unflatten(self.placement.opened)
        return surroundings(self.axis).per_part(run, (specs, P()), specs)

    # --- What one device holds --------------------------------------------------------------------

    @property
    def shards(self) -> Shards:
        """Which leaves are scattered and gathered together, and how."""
        sizes = dict(zip(self.axis.names, axis_sizes(self.axis), strict=True))
        told = self.placement, self.compression, self.gathers, self.copied, self.overlaps
        return Shards(sizes, *told)

    def scatter(self, terms: Any, key: Array | None) -> Any:
        """Sums terms of whole leaves; every device gets its shards of the sums."""
        found, treedef = _named(terms)
        names, words = [*found], key_words(key)
        pairs = zip(self.placement.padding, found.values(), strict=True)
        padded = [padding.padded(x) for padding, x in pairs]
        for alike in self.shards.scattered(describe_leaves(terms)):
            some = {names[i]: padded[i] for i in alike.numbers}
            for exchange in alike.exchanges:
                axis, compression, at = Axis(exchange.axes), exchange.compression, exchange.at
                # HSDP: what was scattered within a group is summed over the groups.
                if exchange.kind == "all-reduce":
                    rest = Reduction(axis, compression, self.op, overlaps=self.overlaps)
                    some = rest.reduce(some, key).tree
                    continue
                if exchange.native is not None:
                    some = natively(exchange, some, op=self.op, to=self.to)
                    continue
                seed = None if words is None else fold_seed(words, _first(at))
                last = alike.exchanges[-1]
                if seed is not None and last.kind == "all-reduce":
                    # Other groups scatter with other noise.
                    seed = fold_seed(seed, lax.axis_index(last.axes))
                some = scatter_over(axis, some, compression, at, op=self.op, key=seed)
            found |= some
        return treedef.unflatten(found.values())

    def gather(self, shards: Any, key: Array | None) -> Any:
        """Gathers every device's shards; all devices get the same bits of whole leaves.

        Leaves that are not split are returned unchanged, and the zeros of padded ones are removed.
        """
        found, treedef = _named(shards)
        names, words = [*found], key_words(key)
        for alike in self.shards.gathered(describe_leaves(shards)):
            some = {names[i]: found[names[i]] for i in alike.numbers}
            for exchange in alike.exchanges:
                axis, at = Axis(exchange.axes), exchange.at
                if exchange.native is not None:
                    some = natively(exchange, some, op=self.op, to=self.to)
                    continue
                # Other noise than that of the scatter over the same dimension, from the same key.
                seed = None if words is None else fold_seed(words, GATHERS + _first(at))
                some = gather_over(axis, some, exchange.compression, at, key=seed, to=self.to)
            found |= some
        pairs = zip(self.placement.padding, found.values(), strict=True)
        return treedef.unflatten(padding.cut(x) for padding, x in pairs)

    def gathers_exactly(self, leaves: list[Leaf]) -> list[bool]:
        """Whether the wire's numbers have the dtype of a leaf, so that its shards keep all bits."""
        methods = self.shards.of_gathers.methods_of(leaves)
        return [
            isinstance(method, BF16 | F32)
            and method.native_dtype(leaf.dtype).itemsize >= leaf.dtype.itemsize
            for method, leaf in zip(methods, leaves, strict=True)
        ]


def _named(tree: Any) -> tuple[dict[str, Array], Any]:
    """The leaves by name, and the structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}, treedef


def _check_shard(
    leaf: Leaf, x: Array, spec: P, where: Split, axis: Axis, opened: Collection[str]
) -> None:
    varying = varying_axes(x)
    for dimension, names in where:
        if axis.tracked and not varying.issuperset(names):
            raise ValueError(
                f"specs: leaf {leaf.name} is sharded over {names}, as {spec} says, and all "
                f"workers hold the same {leaf.shape}; pass jax.shard_map the same specs as "
                "in_specs, or leave the axis out of this leaf's spec"
            )
        entry = names_of(spec[dimension])
        within = [name for name in entry if name not in names]
        if entry != (*within, *names) or {*within} & {*opened}:
            raise ValueError(
                f"specs: dimension {dimension} of leaf {leaf.name} is split over {entry}, and "
                f"what a gather over {names} gives would be out of order; split another "
                f"dimension over {tuple(within)}"
            )


# --- Differences that wait for the next step ------------------------------------------------------


_taken: set[AxisName] = set()
"""The axes over which this process has traced something that takes pending differences."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("ready", "words"), meta_fields=("total",)
)
@dataclasses.dataclass(frozen=True)
class Pending(Serializable):
    """Differences that have not travelled yet, and the seed and the way in which they will.

    Attributes:
      ready: whether masters have moved since the copy was made, bool[].
      words: the words of the key of the last update, uint32[2].
      total: the axis, and how differences travel.
    """

    ready: Array
    words: Array
    total: Reduction

    def check_taken(self) -> None:
        """Warns, while an update is traced, if nothing has ever taken differences over this axis.

        A step takes the differences before its update. So this trace, or an earlier one, has called
        `current`.
        """
        if self.total.axis.name not in _taken:
            warn(
                "nothing takes the pending differences of dq.optax.sharded(..., deferred=True): "
                "parameters would stay as they are; pass pending=state.pending to dq.overlapped, "
                "or call dq.optax.gathered(params, opt_state) at the top of the step",
            )

    def current(self, masters: Any, copies: Any, words: Array, specs: Any) -> Any:
        """The copy with the decoded differences of this worker's masters, the same on all workers.

        ``specs`` say how masters are split. Where the wire has the copy's dtype, rounded masters
        travel in the place of differences. Leaves that are not split take their rounded masters.
        """
        # While JAX traces: `check_taken` is in the same trace, or in a later one.
        _taken.add(self.total.axis.name)
        total, _ = self.total.of_shards(masters, specs, copies)
        held, treedef = jax.tree.flatten(masters)
        found = jax.tree.leaves(copies)
        exactly = total.gathers_exactly(describe_leaves(copies))
        own: list[Array | None] = [None] * len(held)  # `None`: no leaf of the tree below
        place = total.placement
        for i, (where, padding) in enumerate(zip(place.splits, place.padding, strict=True)):
            if where:
                copy = own_slice(found[i], where, total.axis, padding)
                sent = sent_of(held[i], copy, exactly[i])
                # Until an update has moved masters, the copy stays as it is.
                own[i] = jnp.where(self.ready, sent, copy) if exactly[i] else sent
            else:
                # The copy is an update behind if fewer workers, before a restart, split the leaf.
                found[i] = jnp.where(self.ready, sent_of(held[i], found[i], True), found[i])
        places = [i for i, x in enumerate(own) if x is not None]
        with errors_return():
            whole = total.some(places).whole(treedef.unflatten(own), words)
        for i, x in zip(places, jax.tree.leaves(whole), strict=True):
            if not exactly[i]:
                # After a skipped step nothing is due: what differs is the last encoding's error.
                added = jnp.where(self.ready, x, jnp.zeros_like(x))
                x = (found[i] + added).astype(found[i].dtype)
            found[i] = x
        return treedef.unflatten(found)


def sent_of(master: Array, copy: Array, exactly: bool) -> Array:
    """The difference that the owner of a slice sends, in the copy's dtype.

    If the wire has this dtype, ``exactly``, it sends the master itself.
    """
    return (master if exactly else master - copy.astype(jnp.float32)).astype(copy.dtype)


@contextlib.contextmanager
def errors_return() -> Iterator[None]:
    """Silences the warning of large errors: the next differences contain those of this gather."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*error of a super-group")
        yield


def own_slice(x: Array, where: Split, axis: Axis, padding: Padding) -> Array:
    """This worker's slice of a whole leaf, which is padded first."""
    x = padding.padded(x)
    for dimension, _ in where:
        rows = x.shape[dimension] // axis.size
        start = axis.index.astype(jnp.uint32) * rows  # JAX asks of a signed one if it is negative
        x = lax.dynamic_slice_in_dim(x, start, rows, dimension)
    return x
