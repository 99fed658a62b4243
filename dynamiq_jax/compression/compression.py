"""How trees travel, as users say it, and the one place that decides it.

A *route* is how one method sends the buckets of each collective, and in how many bits.
`Compression` has the choices that a user makes once for all collectives of a program;
`Compression.plan` makes a `Plan` of them. `Policy` has a `Compression` for each of gradients,
parameters, activations and cotangents; a function reads the fields that name what it sends.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

import pallas_kernels as pk
from dynamiq_jax.compression import agreement
from dynamiq_jax.core.axis import Axis, AxisName, key_words
from dynamiq_jax.core.checks import Op, Options, axis_counts, check_axis, check_fields, sizes_on
from dynamiq_jax.methods import DynamiQ, Method, State
from dynamiq_jax.methods.base import HopMethod, Limits, check_shards
from dynamiq_jax.methods.dynamiq.crossover import psum_bytes, psum_scatter_bytes
from dynamiq_jax.methods.levels import TwoLevels
from dynamiq_jax.plan.plan import (
    EXCLUDED,
    PADDED,
    REDUCTIONS,
    Kind,
    Native,
    Plan,
    native_share,
)
from dynamiq_jax.topologies import AnyTopology, Direct, Topology
from dynamiq_jax.topologies.links import TransportName, fast_links, slow_by_choice
from dynamiq_jax.topologies.schedules import automatic, check_schedule, with_transport
from dynamiq_jax.tree.leaves import (
    Bucket,
    Leaf,
    bucket_axes,
    describe_leaves,
    group_leaves,
    n_parts,
    placed_leaves,
    with_scale_axes,
)
from pallas_kernels.backend import MOST_WORKERS

if TYPE_CHECKING:
    from dynamiq_jax.compression.explanation import Explanation


# --- Routes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """How buckets are reduced: a method, a topology, and how many workers there are."""

    method: Method
    topology: AnyTopology | None
    """`None`: payloads travel by XLA's collectives."""
    sizes: tuple[int, ...]
    """The number of workers on every axis, the outermost first."""
    runner: Method
    """The method that runs: ``method``, or `TwoLevels` around it."""
    flat: Topology | None
    """The topology of one level; `None` for a hierarchy, whose runner has its own."""
    limits: Limits
    reason: str = field(compare=False)
    """Why this topology was chosen."""
    pushed: tuple[int, int] | None = None
    """The bytes of all buckets of a sum from which, and up to which, push kernels do it; `None`:
    they never do."""
    unpushed: str | None = field(default=None, compare=False, repr=False)
    """Why push kernels do no sums that they could do, in words."""
    defaults: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Defaults that the machine decided, for collectives of all kinds; see `defaults_of`."""

    @property
    def n_workers(self) -> int:
        """The number of workers on all axes."""
        return math.prod(self.sizes)

    @property
    def sum_limits(self) -> Limits:
        """The limits of an all-reduce that may be one push kernel."""
        if self.pushed is None:
            return self.limits
        return self.limits._replace(min_bucket_bytes=self.pushed[0])

    @property
    def push(self) -> Topology | None:
        """The topology by which push kernels do an all-reduce; `None`: they never do."""
        if self.pushed is None:
            return None
        return dataclasses.replace(cast(Topology, self.topology), transport="push", streams=1)

    @property
    def only_pushes(self) -> bool:
        """Whether push kernels send payloads as told; these are no collectives of a program."""
        levels = () if self.topology is None else self.topology.levels(self.sizes)[:2]
        return any(level is not None and level.transport == "push" for level in levels)

    @property
    def pushes(self) -> bool:
        """Whether push kernels may send payloads, or collectives in their place."""
        return self.only_pushes or self.pushed is not None

    def by(self, method: Method) -> "Route":
        """This route with another method."""
        runner = method
        if self.runner is not self.method:
            runner = dataclasses.replace(cast(TwoLevels, self.runner), method=method)
        return dataclasses.replace(self, method=method, runner=runner)

    def bits(self, kind: Kind, bucket: Bucket, *, keyed: bool = False) -> tuple[int, int]:
        """Bits that one worker sends for a bucket, and how many of them on the outer axes.

        The bucket holds what a worker passes to the collective: whole terms, blocks for all
        workers, or for an all-gather one worker's shards. ``keyed``: the call has a key.
        """
        n, part = self.n_workers, -(-bucket.size // self.n_workers)
        if kind == "all-to-all":
            bits = cast(HopMethod, self.method.of_bucket(bucket)).exchange_bits(part, n)
            return bits, bits
        if kind == "all-reduce":
            method, call = self.runner.of_bucket(bucket), (bucket.size, n, self.flat)
            sent, outer = method.wire_bits(*call), method.outer_wire_bits(*call)
            saved = method.seed_bits(*call)
        elif kind == "all-gather":
            sent, outer = self.runner.gather_bits(bucket.size, n)
            saved = self.runner.seed_bits(bucket.size, n, None, "all_gather")
        else:
            sent, outer = self.runner.scatter_bits(part, n, self.flat)
            saved = self.runner.seed_bits(part, n, self.flat, "reduce_scatter")
        return (sent - saved, outer - saved) if keyed else (sent, outer)

    def bits_per_coord(self, kind: Kind, bucket: Bucket) -> float:
        """Wire bits per coordinate of a bucket, of which bf16 takes 16."""
        n = self.n_workers
        size = bucket.size if kind in ("all-reduce", "all-gather") else n * -(-bucket.size // n)
        share = native_share(kind, n) * size
        return self.bits(kind, bucket)[0] / share if share else 0.0

    def limits_of(self, kind: Kind, passed: Mapping[str, int]) -> Limits:
        """The limits of a kind of collective; ``passed`` has those that the user passed.

        On fast links `psum_scatter` starts to pay at larger buckets than `psum`. A measured default
        limit is replaced by the one measured for `psum_scatter`; a limit that the user passed is
        kept. The limits of a gather apply to the whole leaf, of which a worker passes its shard.
        """
        if kind == "all-reduce":
            return self.sum_limits
        limits, n = self.limits, self.n_workers
        least = limits.min_bucket_bytes
        if least and "min_bucket_bytes" not in passed and least == psum_bytes(n):
            least = psum_scatter_bytes(n)
            bucket = max(limits.bucket_bytes, 2 * least)
            limits = limits._replace(min_bucket_bytes=least, bucket_bytes=bucket)
        shards = n if kind == "all-gather" else 1
        return Limits(*(-(-limit // shards) for limit in limits))

    def defaults_of(self, kind: Kind, passed: Mapping[str, int]) -> tuple[str, ...]:
        """Defaults that links and environment of this machine decided, a line for each."""
        shards = self.n_workers if kind == "all-gather" else 1
        least = shards * self.limits_of(kind, passed).min_bucket_bytes
        found = self.defaults
        if least and "min_bucket_bytes" not in passed:
            told = f"buckets below {least >> 20} MiB travel natively, which is faster over NVLink"
            found = *found, told
        if self.pushed is not None and kind == "all-reduce":
            most = self.pushed[1] >> 20
            found = *found, f"sums of up to {most} MiB by one push kernel for each bucket"
        if self.unpushed is not None and kind == "all-reduce":
            found = *found, self.unpushed
        return found

    def check(self, kind: Kind) -> None:
        """Refuses a method that does not do this kind of collective."""
        if kind == "all-to-all":
            check_exchanges(self.method, self.n_workers)
        elif kind != "all-reduce":
            self.sharded()

    def check_buckets(self, kind: Kind) -> None:
        """Refuses a topology that cannot send a bucket, as the executor would."""
        if self.topology is None or kind not in REDUCTIONS:
            return
        inner, outer, n_inner = self.topology.levels(self.sizes)
        for topology, n_workers in ((inner, n_inner), (outer, self.n_workers // n_inner)):
            if topology is not None and n_workers > 1:
                check_schedule(topology, n_workers)

    def sharded(self) -> tuple[Method, Topology | None]:
        """The method that scatters and gathers, which may be `TwoLevels`, and the topology."""
        check_shards(self.method, "psum_scatter and all_gather")
        if self.method.needs_state:
            raise NotImplementedError(
                f"method={self.method!r} keeps a state, and psum_scatter and all_gather keep none; "
                "pass a method without error feedback"
            )
        return self.runner, self.flat


def check_exchanges(method: Method, n_workers: int, name: str = "method") -> None:
    """Refuses methods that cannot encode blocks without an agreement between workers."""
    if not method.exchanges(n_workers):
        raise NotImplementedError(
            f"{name}={method!r}: all_to_all encodes at one width of 2 to 16 bits, without means, "
            "dither, state or lost packets, and not by XLA's own sums; pass dq.DynamiQ(bits=8.5), "
            "dq.contrib.MXFP8() or dq.BF16()"
        )


# --- Compression ----------------------------------------------------------------------------------


ByPath = Callable[[str, jax.ShapeDtypeStruct], Method | None]
"""``(path, leaf) -> method``: the method of a leaf, such as that of path "layers/0/kernel"; `None`
excludes the leaf."""


@dataclass(frozen=True, slots=True)
class Compression(Options):
    """How a tree is reduced: which method compresses which leaf, and how payloads are sent.

        compression = dq.Compression(dq.DynamiQ(bits=4), exclude="norm|bias")
        grads = dq.pmean(grads, "data", compression=compression)

    Every function of this library takes a `Compression` as ``compression``. A bare method means
    ``Compression(method)``.

    Attributes:
      method: as ``compression`` of `psum`, a method or a function that chooses one for every leaf.
      topology: the route of payloads; `None` chooses by `dynamiq_jax.topologies.schedules`.
      transport: how payloads are sent, for a topology that does not say it: "collectives",
        "permutes" or "push", see `dynamiq_jax.topologies.links`. Default: "permutes" in
        programs that `dynamiq_jax.jit` compiles if GPUs can read each other's memory. Over NVLink
        sums of medium size are "push" where kernels run, unless they are beside a backward pass;
        `explain` says up to which size.
      exclude: a regular expression: if a leaf's path contains a match, `jax.lax.psum` sums the leaf
        exactly.
      min_leaf_size: leaves of fewer coordinates are summed exactly. Default: 4096.
      min_bucket_size: buckets of fewer coordinates are summed exactly. Default: 65536. For
        `DynamiQ` it is at least 16 tiles of 8 super-groups for each worker, since the padding of
        smaller buckets takes the bits that compression saves. With ``min_bucket_bytes=0`` it is 0.
      min_bucket_bytes: buckets of fewer bytes are summed exactly. With 0, buckets of any size are
        compressed, unless padding brings them to the 16 bits per coordinate of bf16 (see
        `DynamiQ`). Default: no limit. For `DynamiQ` on GPUs that are all connected by NVLink the
        default is the size that `dynamiq_jax.methods.dynamiq.crossover` has for this number of
        workers, since native psum is faster below it. If you pass ``min_bucket_size``, this default
        does not apply.
      bucket_bytes: leaves up to this size are concatenated to buckets of about this size; a larger
        leaf is a bucket of its own. Default: 32 MiB; for `DynamiQ` 256 MiB, but at least 2
        ``min_bucket_bytes``.
    """

    method: Method | ByPath | None = None
    topology: AnyTopology | None = field(default=None, kw_only=True)
    transport: TransportName | None = field(default=None, kw_only=True)
    exclude: str | None = field(default=None, kw_only=True)
    min_leaf_size: int | None = field(default=None, kw_only=True)
    min_bucket_size: int | None = field(default=None, kw_only=True)
    min_bucket_bytes: int | None = field(default=None, kw_only=True)
    bucket_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self):
        """Checks every field; errors name the value and what to pass."""
        if self.method is not None and not self.by_path:
            check_method(self.method)
        if self.topology is not None and not isinstance(self.topology, AnyTopology):
            raise ValueError(
                f"topology={self.topology!r} is not a topology; pass for example dq.Ring()"
            )
        check_fields(self)
        for name, value in self.limits.items():
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative; pass 0")
        if self.exclude is not None:
            try:
                re.compile(self.exclude)
            except (re.error, TypeError, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"exclude={self.exclude!r:.200} is not a regular expression ({error}); "
                    "pass one, as 'norm|bias'"
                ) from error

    @property
    def limits(self) -> dict[str, int]:
        """The limits that were passed, by name."""
        values = {name: getattr(self, name) for name in Limits._fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def by_path(self) -> bool:
        """Whether a function chooses the method."""
        return chooses(self.method)

    def methods_of(self, leaves: list[Leaf]) -> list[Method | None]:
        """The method of every leaf; `None` for leaves that are excluded."""

        def method_of(leaf: Leaf) -> Method | None:
            if self.exclude is not None and re.search(self.exclude, leaf.path):
                return None
            if not self.by_path:
                return cast(Method | None, self.method) or DynamiQ()
            choose = cast(ByPath, self.method)
            method = choose(leaf.path, jax.ShapeDtypeStruct(leaf.whole, leaf.dtype))
            if method is not None:
                check_method(method)
            return method

        return list(map(method_of, leaves))

    def route(
        self,
        sizes: tuple[int, ...],
        method: Method | None = None,
        *,
        here: bool = True,
        overlaps: bool = False,
    ) -> Route:
        """The route of one method (default: this one's) among workers on axes of ``sizes``.

        ``here`` says whether workers are JAX's devices; otherwise the choice is made as in
        `assumed`. ``overlaps`` says whether other work should run at the same time, which it cannot
        beside a push kernel. Reductions with a state have no push kernels either: these depend on
        the map around, and the state is made outside of it, for the same buckets.
        """
        if method is None:
            method = self.method if isinstance(self.method, Method) else DynamiQ()
        n_workers = math.prod(sizes)
        topology, reason = self.topology, "as passed"
        if topology is None and method.native_by_default:
            reason = "native collectives, the method's default"
        elif topology is None:
            topology, reason = automatic(sizes, here=here)
        if topology is not None:
            found = topology.on(sizes)
            topology, how = with_transport(found, self.transport, n_workers=n_workers, here=here)
            reason = f"{reason}; {how}" if how else reason
        fast, defaults = here and fast_links(), ()
        if here and (setting := slow_by_choice()) is not None:
            defaults = (f"NVLink counts as slow, since the environment has {setting}",)
        if fast and method != method.without_plan():
            method = method.without_plan()
            defaults = ("widths have no plan, which takes longer than it saves over NVLink",)
        runner, flat = method, cast(Topology | None, topology)
        if topology is not None:
            inner, outer, n_inner = topology.levels(sizes)
            if n_inner > 1:
                runner = TwoLevels(method=method, inner=inner, outer=outer, n_inner=n_inner)
                flat = None
        limits = method.limits(self.limits, n_workers, fast_links=fast)
        pushed = unpushed = None
        if fast and not overlaps:
            pushed, unpushed = self._pushed(method, self.topology or topology, n_workers)
        told = limits, reason, pushed, unpushed, defaults
        route = Route(method, topology, sizes, runner, flat, *told)
        runner.check(n_workers, flat)
        return route

    def _pushed(
        self, method: Method, topology: AnyTopology | None, n_workers: int
    ) -> tuple[tuple[int, int] | None, str | None]:
        """See `Route.pushed` and `Route.unpushed`; over fast links, for the topology as passed."""
        if not isinstance(topology, Direct) or topology.streams not in (None, 1):
            return None, None
        if self.transport is not None or (topology is self.topology and topology.transport):
            return None, None
        found, needs = method.pushed(n_workers), pk.needs_of_push()
        several = jax.process_count() > 1
        if found is None:
            also = several and needs is None and n_workers <= MOST_WORKERS
            return None, "between these processes transport='push' also runs" if also else None
        if needs is None and several and not agreement.compares(n_workers):
            # Where one process pushed and another did not, both would wait for ever.
            needs = (
                f"sums among all {jax.device_count()} GPUs, whose processes compare what they have "
                "(DYNAMIQ_JAX_AGREEMENT is not 0)"
            )
        if needs is not None:
            return None, f"no sums by push kernels, which need {needs}"
        limited = {"min_bucket_size", "min_bucket_bytes"} & self.limits.keys()
        return (self.limits.get("min_bucket_bytes", 0), found[1]) if limited else found, None

    def plan(
        self,
        leaves: list[Leaf],
        sizes: tuple[int, ...],
        kind: Kind = "all-reduce",
        *,
        without: Collection[int] = (),
        keyed: bool = False,
        **options: bool,
    ) -> Plan:
        """Decides how leaves, as one device passes them to a collective, travel: the only place.

        Leaves in ``without`` are in no bucket, and `Plan.apart` has the large ones of them. An
        all-reduce leaves them out; other collectives move them natively. ``keyed``: the call has a
        key. Other options are those of `route`.
        """
        methods = self.methods_of(leaves)
        buckets: list[Bucket] = []
        exact: list[tuple[Leaf, str]] = []
        apart: list[Leaf] = []
        defaults: dict[str, None] = {}
        for method in dict.fromkeys(methods):
            own = [leaf for leaf, chosen in zip(leaves, methods, strict=True) if chosen == method]
            if method is None:
                exact += [(leaf, EXCLUDED) for leaf in own if leaf.index not in without]
                continue
            route = self.route(sizes, method, **options)
            route.check(kind)
            defaults |= dict.fromkeys(route.defaults_of(kind, self.limits))
            own = with_scale_axes(own, method.scale_axis)
            limits = route.limits_of(kind, self.limits)._asdict()
            limits["declined"] = {leaf.index: method.declines(leaf) for leaf in own}
            found, small = group_leaves([x for x in own if x.index not in without], **limits)
            exact += small
            if kept := [leaf for leaf in own if leaf.index in without]:
                apart += (x for bucket in group_leaves(kept, **limits)[0] for x in bucket.leaves)
            for bucket in found:
                bits = route.bits_per_coord(kind, bucket) if method.most_bits < math.inf else 0.0
                if bits < method.most_bits:
                    buckets.append(bucket._replace(route=route))
                    continue
                reason = (
                    f"bucket of {bucket.size} among {route.n_workers} workers, {PADDED} "
                    f"{bits:.1f} bits per coordinate >= {method.most_bits:g}"
                )
                exact += [(leaf, reason) for leaf in bucket.leaves]
            if any(bucket.route is route for bucket in buckets):
                route.check_buckets(kind)
        exact.sort(key=lambda entry: entry[0].index)
        if kind != "all-reduce":
            exact += [(leaf, "not compressed") for leaf in leaves if leaf.index in without]
        natives = tuple(Native.of(kind, leaf, why) for leaf, why in exact)
        found = tuple(buckets), natives, tuple(methods), keyed, tuple(apart), tuple(defaults)
        limited = (self.min_bucket_size, self.min_bucket_bytes) != (None, None)
        return Plan(kind, sizes, *found, limited=limited)

    def init_state(
        self,
        tree: Any,
        n_workers: int | tuple[int, ...],
        *,
        stacked: bool = False,
        mesh: Mesh | None = None,
        specs: Any = None,
    ) -> tuple[State, ...]:
        """Makes the state for the first `reduce` of ``tree``, with one entry for every bucket.

        Under `jax.shard_map` the state differs between workers. Inside the map, cast it with
        ``jax.lax.pcast(state, axis_name, to="varying")``. Outside, pass ``stacked=True``, and
        create every worker's part on this worker: call this in a function under `jax.jit` with
        ``out_shardings=NamedSharding(mesh, P(axis_name))``.

        Args:
          tree: arrays or `jax.ShapeDtypeStruct`s, as one worker passes them to `reduce`.
          n_workers: the size of the axis, or of every axis, the outermost first.
          stacked: whether leaves have a leading axis of all workers, as for `value_and_grad`, or
            are those of one worker.
          mesh: the mesh of ``specs``. Default: the mesh of the surrounding `jax.shard_map`.
          specs: PartitionSpecs of the leaves over axes that are not reduced over, if there are any.
            The state of a bucket of split leaves has a leading axis of its parts (after the axis of
            the workers).
        """
        counts = axis_counts(n_workers)
        leaves, sizes = placed_leaves(tree, mesh, specs)
        plan = self.plan(leaves, counts, overlaps=True)
        parts = [n_parts(bucket_axes(bucket, sizes), sizes) for bucket in plan.buckets]
        state = first_states(plan, parts)
        if not stacked:
            return state
        n = math.prod(counts)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), state)

    def explain(
        self,
        tree: Any,
        n_workers: int | tuple[int, ...],
        *,
        verbose: bool = True,
        mesh: Mesh | None = None,
        specs: Any = None,
        rate: str | None = None,
    ) -> "Explanation":
        """Explains `psum` of ``tree`` over ``n_workers``; prints the table unless told not to.

        If there are more workers than JAX has devices, they belong to another cluster. Then the
        explanation assumes several hosts with slow links between them; with several axes, the last
        axis has the devices of a host. The reason says so.

        Args:
          tree: arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
          n_workers: the size of the axis, or of every axis, the outermost first.
          verbose: whether to print.
          mesh: as for `init_state`.
          specs: as for `init_state`; shapes and bytes are then those of one device's parts.
          rate: the rate of a host's link in each direction, such as "25gbit", "25Gb/s" or
            "3.1GB/s". The explanation then has the wire's times, and names the fastest way to
            train. Each host has one worker, unless there are several axes: then the workers of the
            last axis share a host's link.

        Raises:
          ValueError: an argument is invalid.
        """
        from dynamiq_jax.compression.explain import explained  # which imports this module

        explanation = explained(self, tree, n_workers, mesh=mesh, specs=specs, rate=rate)
        if verbose:
            print(explanation)
        return explanation

    def check_agreement(
        self,
        tree: Any,
        mesh: Mesh,
        axis_name: AxisName,
        *,
        key: Array | None = None,
        op: Op = "mean",
        weight: Array | float | None = None,
        specs: Any = None,
    ) -> None:
        """Raises unless all processes would reduce ``tree`` alike; call it once, outside of jit.

        A part of this check is automatic. Several processes compare their first all-reduce,
        `psum_scatter`, `all_gather` and `all_to_all` while these are traced: versions, method,
        topology, ``op``, ``specs``, and whether there are a key, a weight, a state and metrics. A
        difference raises an error on all processes. Different leaves or axes only cause a warning,
        since processes may trace different programs first; so does a process that is missing after
        60 seconds. Trees with only scalars, and maps without some of the devices, are not compared.
        To turn the automatic check off, set the environment variable ``DYNAMIQ_JAX_AGREEMENT=0`` on
        all processes.

        Args:
          tree: parameters or gradients; only names, shapes and dtypes are compared.
          mesh: the mesh of the training step.
          axis_name: as for `psum`.
          key: as for `psum`.
          op: as for `reduce`.
          weight: as for `reduce`; all processes must have one or none, but its value may differ.
          specs: as for `psum`.

        Raises:
          RuntimeError: processes differ (the message names the difference, the processes and both
            values); there is no coordination service; or a process is missing after 600 seconds.
          ValueError, NotImplementedError: as for `psum`, on the processes where `psum` would raise
            it; the other processes report this, too, and do not wait.
        """

        def tell() -> dict[str, str]:
            axis, words = check_axis(axis_name), key_words(key)
            sizes = sizes_on(mesh, axis)
            told = self.facts(axis, sizes, describe_leaves(tree), op=op, weight=weight, specs=specs)
            route = self.route(sizes)
            reasons = "; ".join((route.reason, *route.defaults_of("all-reduce", self.limits)))
            told["topology"] += f" ({reasons})"
            told["key"] = "none" if words is None else str(np.asarray(words).tolist())
            devices = [device.id for device in mesh.devices.flat]
            return told | {"mesh": f"{dict(mesh.shape)} of devices {devices}"}

        agreement.check(tell)

    def facts(
        self,
        axis: Axis,
        sizes: tuple[int, ...],
        leaves: list[Leaf],
        /,
        **options: Any,
    ) -> dict[str, str]:
        """The choices that all processes must share, as text; ``options`` are the call's."""
        methods = self.methods_of(leaves)
        chosen = dict.fromkeys(method for method in methods if method is not None)
        routes = [self.route(sizes, m) for m in chosen or [None]]
        alike = len(chosen) == 1 and None not in methods
        pairs = list(zip((leaf.path for leaf in leaves), methods, strict=True))
        return {
            "axis_name": f"{axis.name!r} of {sizes} workers",
            "method": repr(routes[0].method if alike or not leaves else pairs),
            "topology": "; ".join(dict.fromkeys(repr(route.topology) for route in routes)),
            "limits": "; ".join(repr(route.limits) for route in routes),
            "tree": "; ".join(f"{x.name}: {x.dtype.name}{list(x.shape)}" for x in leaves),
        } | agreement.described(options)


def first_states(plan: Plan, counts: list[int]) -> tuple[State, ...]:
    """One worker's states of all buckets; for buckets in several parts, of all parts."""

    def first(bucket: Bucket, count: int) -> State:
        route = bucket.route
        state = route.runner.of_bucket(bucket).init(bucket.size, route.n_workers)
        if count == 1:
            return state
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), state)

    pairs = zip(plan.buckets, counts, strict=True)
    return tuple(first(bucket, count) for bucket, count in pairs)


def chooses(method: Any) -> bool:
    """Whether the value is a function that chooses a method for every leaf."""
    return callable(method) and not isinstance(method, type | Method)


def check_method(method: Any, name: str = "method") -> None:
    """Refuses an argument that is not a method; ``name`` is the argument's name."""
    if not isinstance(method, Method):
        raise ValueError(f"{name}={method!r} is not a method; pass for example dq.DynamiQ(bits=5)")


# --- Policy ---------------------------------------------------------------------------------------


Field = Literal["gradients", "parameters", "activations", "cotangents"]
"""A field of `Policy`: it names what travels."""

AnyCompression = Compression | Method | ByPath
"""How one of these travels: a `Compression`, a method, or a function that chooses one by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Options):
    """How gradients, parameters, activations and cotangents travel: one object for all functions.

        policy = dq.Policy(gradients=dq.DynamiQ(bits=5), parameters=dq.DynamiQ(bits=8))
        weights = dq.fsdp(shards, "data", specs=P("data"), compression=policy)

    Every function of this library takes a policy as ``compression``, and reads from it:

    | functions | fields |
    |---|---|
    | `psum`, `pmean`, `reduce`, `psum_scatter`, `optax.all_reduce` | gradients |
    | `all_gather`, `optax.pack` | parameters |
    | `value_and_grad`, `fsdp`, `overlapped`, `optax.sharded` | gradients and parameters |
    | `all_to_all` | activations and cotangents |

    What is passed without a policy, such as a bare method, is the first of the function's fields.
    Each field is a `Compression`, a method, or a function of path and leaf that chooses a method.
    `None` means the function's default, which its documentation states. If ``gradients`` or
    ``activations`` travel in `BF16` or `F32`, so does the function's other field by default: exact
    gradients alone make a function exact.

    Attributes:
      gradients: all sums and scatters.
      parameters: gathers of shards (FSDP), and parameters' differences (sharded updates). Beside
        gradients, a bare method has the limits of ``gradients``, such as ``min_bucket_bytes``, and
        leaves out what ``gradients`` excludes.
      activations: blocks of `all_to_all`, such as tokens for experts.
      cotangents: blocks of the backward pass of `all_to_all`. Leaves whose activations share a
        bucket need the same method. It applies to leaves that are compressed in ``activations``.
    """

    gradients: AnyCompression | None = None
    parameters: AnyCompression | None = None
    activations: AnyCompression | None = None
    cotangents: AnyCompression | None = None

    def __post_init__(self):
        """Checks every field; errors name the value and what to pass."""
        for name in self.__slots__:
            _check(getattr(self, name), name)


AnyPolicy = Policy | AnyCompression
"""Values of ``compression``; what is not a `Policy` is the first field that the function reads."""


def as_compression(
    given: AnyPolicy | None, field: Field = "gradients", default: Method | None = None
) -> Compression:
    """The `Compression` that ``compression`` of a function says for its first field.

    Without a method it has the ``default``, whatever else it says.
    """
    told = getattr(given, field) if isinstance(given, Policy) else given
    if isinstance(told, Compression):
        unsaid = default is not None and told.method is None
        return replace(told, method=default) if unsaid else told
    _check(told, "compression")
    return Compression(default if told is None else told)


def _check(value: Any, name: str) -> None:
    if value is not None and not isinstance(value, Compression) and not chooses(value):
        check_method(value, name)


# --- Former keywords ------------------------------------------------------------------------------


def as_topology(value: Any, compression: Any) -> dict[str, Any]:
    """``topology=`` in the `Compression` of the first field."""
    if value is None:
        return {}
    own = as_compression(compression)
    if own.topology not in (None, value):
        raise ValueError(
            f"topology={value!r}, and compression has topology={own.topology!r}; pass one of them"
        )
    own = replace(own, topology=value)
    is_policy = isinstance(compression, Policy)
    return {"compression": replace(compression, gradients=own) if is_policy else own}


def as_parameters(value: Any, compression: Any) -> dict[str, Any]:
    """``gather=`` and ``differences=`` as `Policy.parameters`."""
    if value is None:
        return {}
    policy = compression if isinstance(compression, Policy) else Policy(gradients=compression)
    return {"compression": replace(policy, parameters=value)}


def as_cotangents(value: Any, compression: Any) -> dict[str, Any]:
    """``backward=`` as `Policy.cotangents`; `None` meant the method of ``activations``."""
    policy = compression if isinstance(compression, Policy) else Policy(activations=compression)
    value = policy.activations if value is None else value
    if value is None or value == "auto":
        return {}
    return {"compression": replace(policy, cotangents=value)}
