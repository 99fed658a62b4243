"""How leaves that workers split are scattered and gathered: which travel together, and by what.

Training runs these exchanges (`reduction.reduction`), and `explain` makes their plans of leaves
that are only described. No other place decides them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dynamiq_jax.compression.compression import (
    AnyPolicy,
    ByPath,
    Compression,
    Policy,
    Route,
    as_compression,
)
from dynamiq_jax.methods import BF16, F32, DynamiQ, Method, unless_plain
from dynamiq_jax.plan.plan import BY_XLA, Kind, Native, Plan
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.links import fast_links
from dynamiq_jax.tree.leaves import (
    COMPRESSED_DTYPES,
    Leaf,
    Placement,
    Split,
    split_dimension,
    whole_shape,
)

DIFFERENCES = DynamiQ(bits=2.5, dither=True)
"""The default encoding of parameters' differences; docs/results.md has the losses."""

PARAMETERS = DynamiQ(bits=8)
"""The default encoding of parameters that are gathered for a layer."""

Dimensions = int | tuple[int, ...]
"""The dimension along which every leaf is cut or joined, or that of each leaf of a tree."""

Step = tuple[Dimensions, tuple[str, ...]]
"""Along which dimensions of the leaves a collective over some axes cuts or joins them."""


class Sharded(NamedTuple):
    """The methods by which training scatters gradients and gathers what workers do not hold."""

    gradients: Method
    gathers: Method


def default_methods(*, copied: bool, here: bool = True) -> Sharded:
    """The methods where none is passed: those of sharded updates (``copied``), or of FSDP.

    Over links as fast as NVLink those of FSDP are `BF16`. There a step of 1.1 B parameters takes
    51 ms by `BF16` and 55 with compression (docs/results.md).
    """
    if copied:
        return Sharded(DynamiQ(), DIFFERENCES)
    fast = here and fast_links()
    return Sharded(BF16(), BF16()) if fast else Sharded(DynamiQ(), PARAMETERS)


def gathers_of(policy: AnyPolicy | None, *, copied: bool = False, here: bool = True) -> Compression:
    """How shards travel. A bare method, or the default, has the limits of the gradients.

    Without a method of their own, shards of leaves whose gradients are in `BF16` or `F32` travel
    alike. ``copied`` and ``here`` are as for `Shards`.
    """
    compression = as_compression(policy)
    gather = policy.parameters if isinstance(policy, Policy) else None
    own = isinstance(gather, Compression)
    told = gather if own else dataclasses.replace(compression, method=gather, topology=None)

    def method_of(path: str, leaf: jax.ShapeDtypeStruct) -> Method | None:
        method = cast(ByPath, compression.method)(path, leaf)
        if method is None and not own:
            return None
        if told.method is None:
            return unless_plain(method, default_methods(copied=copied, here=here).gathers)
        if isinstance(told.method, Method):
            return told.method
        return told.method(path, leaf)

    if compression.by_path and (told.method is None or not own):
        return dataclasses.replace(told, method=method_of)
    if isinstance(compression.method, BF16 | F32) and told.method is None:
        return dataclasses.replace(told, method=compression.method)
    return told


def told_gathers(policy: AnyPolicy | None) -> Compression | None:
    """How shards travel if the policy says it, else `None`."""
    told = isinstance(policy, Policy) and policy.parameters is not None
    return gathers_of(policy) if told else None


def _with_method(compression: Compression, default: Method) -> Compression:
    if compression.method is not None:
        return compression
    return dataclasses.replace(compression, method=default)


class Division(NamedTuple):
    """Whether a leaf is large enough for sharded updates to split it, and along which dimension."""

    large: bool
    dimension: int | None


def divisions(
    compression: Compression,
    leaves: Sequence[Leaf],
    taken: Sequence[Sequence[int]],
    sizes: tuple[int, ...],
    *,
    here: bool = True,
) -> list[Division]:
    """How sharded updates split leaves; ``taken`` has the dimensions that other axes split."""
    n = int(np.prod(sizes))
    methods, found = compression.methods_of(list(leaves)), []
    for leaf, dimensions, method in zip(leaves, taken, methods, strict=True):
        if method is None or leaf.dtype.name not in COMPRESSED_DTYPES:
            large = False
        else:
            limits = compression.route(sizes, method, here=here).limits
            large = leaf.size >= limits.min_leaf_size
        # Zeros would end each of the parts of a dimension that is taken.
        found.append(Division(large, split_dimension(leaf.shape, n, dimensions)))
    return found


class Exchange(NamedTuple):
    """One collective of leaves that travel together."""

    kind: Kind
    axes: tuple[str, ...]
    compression: Compression
    """How they travel, with the topology for these axes."""
    at: Dimensions = 0
    """The dimension along which the leaves are cut or joined."""
    native: Route | None = None
    """If XLA's collective moves the leaves: the route, whose method has a dtype."""

    def plan(
        self, leaves: list[Leaf], sizes: tuple[int, ...], *, keyed: bool = False, **options: Any
    ) -> Plan:
        """The plan for these leaves; options are those of `Compression.plan`."""
        if self.native is not None:
            return native_plan(self.kind, sizes, leaves, self.native)
        return self.compression.plan(leaves, sizes, self.kind, keyed=keyed, **options)

    def after(self, leaf: Leaf, n_workers: int) -> Leaf:
        """A leaf of a dict of these leaves after this collective."""
        if self.kind == "all-reduce":
            return leaf
        at, shape = self.at[leaf.index] if isinstance(self.at, tuple) else self.at, [*leaf.shape]
        gathers = self.kind == "all-gather"
        shape[at] = shape[at] * n_workers if gathers else shape[at] // n_workers
        return _of_shape(leaf, tuple(shape))


def native_plan(kind: Kind, sizes: tuple[int, ...], leaves: list[Leaf], route: Route) -> Plan:
    """The plan of XLA's collectives, in the method's dtype if that is narrower.

    Small leaves travel in their own dtype.
    """
    shards = int(np.prod(sizes)) if kind == "all-gather" else 1

    def native(leaf: Leaf) -> Native:
        wire, large = leaf.dtype, shards * leaf.size >= route.limits.min_leaf_size
        if large and leaf.dtype.name in COMPRESSED_DTYPES:
            wire = np.dtype(route.method.native_dtype(leaf.dtype))
        if kind == "all-gather" and wire.itemsize >= leaf.dtype.itemsize:
            wire = leaf.dtype
        return Native(leaf, f"{route.method!r} {BY_XLA}", wire)

    return Plan(kind, sizes, exact=tuple(map(native, leaves)), defaults=route.defaults)


class Part(NamedTuple):
    """Leaves that travel alike, by their numbers in the order of their names."""

    numbers: tuple[int, ...]
    exchanges: tuple[Exchange, ...]


@dataclasses.dataclass(frozen=True)
class Shards:
    """Scatters and gathers of a tree's leaves over workers.

    These have the same method and are split over the same axes. Leaves of one split share buckets,
    whatever its dimension is: alone, small ones might not be worth compressing.
    """

    sizes: Mapping[str, int]
    """The workers on every axis, the outermost first."""
    placement: Placement
    compression: Compression
    gathers: Compression | None = None
    """How shards travel; `None`: nothing is gathered."""
    copied: bool = False
    """Whether all workers hold copies of sharded leaves, so that no loss gathers these (FSDP)."""
    overlaps: bool = False
    """Whether reductions run beside a forward or backward pass."""
    here: bool = True
    """Whether workers are JAX's devices; see `Compression.route`."""

    def scattered(self, leaves: Sequence[Leaf]) -> Iterator[Part]:
        """How terms of whole leaves are summed so that every device gets its shards of the sums."""
        axes = tuple(self.sizes)
        compression = _with_method(self.compression, self._defaults.gradients)
        for numbers, own, steps in self._kinds(leaves, compression):
            route = self._told(own.route(self._counts(axes), here=self.here), self.compression)
            # Scatter over the axes that split the leaf, by dimension; then sum over the rest.
            within = tuple(name for _, names in steps for name in names)
            rest = tuple(name for name in axes if name not in within)
            found = []
            for at, names in steps:
                topology = route.topology and route.topology.over(names, axes)
                plain = isinstance(route.method, BF16 | F32) and not isinstance(topology, Topology)
                native = route if plain or (topology is None and route.topology) else None
                routed = dataclasses.replace(own, topology=topology)
                found.append(Exchange("reduce-scatter", names, routed, at, native))
            if rest:
                topology = route.topology and route.topology.over(rest, axes)
                found.append(
                    Exchange("all-reduce", rest, dataclasses.replace(own, topology=topology))
                )
            yield Part(numbers, tuple(found))

    def gathered(self, shards: Sequence[Leaf]) -> Iterator[Part]:
        """How every device's shards are gathered; leaves that are not split are in no part.

        `BF16` and `F32` are native all-gathers, in at most as many bits as the leaf has.
        """
        axes, gathers = tuple(self.sizes), self.of_gathers
        for numbers, own, steps in self._kinds(shards, gathers, sharded=True):
            if not steps:  # whatever its method is: a topology may refuse one that never runs
                continue
            told = dataclasses.replace(own, topology=own.topology or self.compression.topology)
            assert self.gathers is not None
            route = self._told(told.route(self._counts(axes), here=self.here), self.gathers)
            found = []
            for at, names in steps:
                if isinstance(own.method, BF16 | F32):
                    found.append(Exchange("all-gather", names, own, at, route))
                    continue
                # Only hierarchies, over several axes, gather otherwise than XLA.
                several = route.topology if len(names) > 1 else None
                topology = several and several.over(names, axes)
                routed = dataclasses.replace(own, topology=topology)
                found.append(Exchange("all-gather", names, routed, at))
            yield Part(numbers, tuple(found))

    def plans(self, leaves: Sequence[Leaf], kind: Kind, *, keyed: bool) -> list[Plan]:
        """The plans of `scattered`, or of `gathered` if ``kind`` is "all-gather"."""
        found, gathers = [], kind == "all-gather"
        for part in (self.gathered if gathers else self.scattered)(leaves):
            own = [_of_dict(number, leaves[i]) for number, i in enumerate(part.numbers)]
            if not gathers:
                zeros = (self.placement.padding[i] for i in part.numbers)
                own = [
                    _of_shape(x, p.padded_shape(x.shape)) for x, p in zip(own, zeros, strict=True)
                ]
            for exchange in part.exchanges:
                sizes, sums = self._counts(exchange.axes), exchange.kind == "all-reduce"
                overlaps = {"overlaps": self.overlaps} if sums else {}
                options = {"keyed": keyed, "here": self.here} | overlaps
                found.append(exchange.plan(own, sizes, **options))
                own = [exchange.after(leaf, int(np.prod(sizes))) for leaf in own]
        if self.copied and self.here and fast_links():
            told = "sharded updates in bf16 take as long over NVLink: compression=dq.BF16()"
            found = [p._replace(defaults=(*p.defaults, told)) if p.buckets else p for p in found]
        return found

    @property
    def of_gathers(self) -> Compression:
        """How shards travel, with a method."""
        assert self.gathers is not None
        return _with_method(self.gathers, self._defaults.gathers)

    @property
    def _defaults(self) -> Sharded:
        return default_methods(copied=self.copied, here=self.here)

    def _counts(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in axes)

    def _told(self, route: Route, passed: Compression) -> Route:
        """The route, which tells what links decide of shards if no method was passed."""
        if self.copied or passed.method is not None or not (self.here and fast_links()):
            return route
        told = "shards and their gradients travel in bf16, which is faster over NVLink"
        return dataclasses.replace(route, defaults=(*route.defaults, told))

    def _kinds(
        self, leaves: Sequence[Leaf], compression: Compression, *, sharded: bool = False
    ) -> Iterator[tuple[tuple[int, ...], Compression, tuple[Step, ...]]]:
        """Leaves that travel alike, their compression, and over which axes they travel.

        Methods by path see whole leaves, without padding. With ``sharded`` the leaves are one
        device's shards. Copied leaves have a plan only if the user passes one, or for gradients
        beside a backward pass, which hides the time of the statistics.
        """
        place = self.placement
        if sharded:
            triples = zip(leaves, place.splits, place.padding, strict=True)
            leaves = [
                dataclasses.replace(
                    leaf, whole=padding.shape_of(whole_shape(leaf.shape, split, self.sizes))
                )
                for leaf, split, padding in triples
            ]
        methods = compression.methods_of(list(leaves))
        if self.copied and (sharded or not self.overlaps):
            methods = [None if x is None else x.without_plan() for x in methods]
        kinds = list(zip(methods, map(_names_only, place.splits), place.others, strict=True))
        for kind in dict.fromkeys(kinds):
            numbers = [i for i, own in enumerate(kinds) if own == kind]
            numbers.sort(key=lambda i: leaves[i].name)  # in the order of a dict's leaves
            exclude = "" if kind[0] is None else None
            own = dataclasses.replace(compression, method=kind[0], exclude=exclude)
            yield tuple(numbers), own, _steps_of([place.splits[i] for i in numbers])


def _of_dict(number: int, leaf: Leaf) -> Leaf:
    """A leaf as a leaf of the dict by names in which leaves that travel alike are passed on."""
    key = "" if leaf.name == "<root>" else leaf.name
    told = {"index": number, "name": f"[{key!r}]", "path": key, "whole": leaf.shape}
    return dataclasses.replace(leaf, **told)


def _of_shape(leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
    return dataclasses.replace(leaf, shape=shape, whole=shape)


def _names_only(split: Split) -> Any:
    """Equal for splits that one collective serves: a single one may be along any dimension."""
    return split[0][1] if len(split) == 1 else split


def _steps_of(splits: Sequence[Split]) -> tuple[Step, ...]:
    """The collectives of leaves for which `_names_only` is equal."""
    found = []
    for own in zip(*splits, strict=True):
        dimensions = tuple(dimension for dimension, _ in own)
        same = len({*dimensions}) == 1
        found.append((dimensions[0] if same else dimensions, own[0][1]))
    return tuple(found)
