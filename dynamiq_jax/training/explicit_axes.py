"""Gradients on Explicit meshes: JAX leaves them unreduced, and one collective sums them.

JAX's types say of a value on an Explicit mesh whether it is reduced or unreduced over an axis. The
cotangent of a reduced value is unreduced: every device holds a term of it, and nobody has summed
the terms. So a large parameter is typed as reduced ("deferred") before the loss takes it. The loss
itself stays a function of global arrays.

**Shards** are gathered where the loss uses them. A gathered parameter is typed as reduced over the
data axes, so that its gradient comes back unreduced and one compressed collective sums and scatters
it. `jaxprs.uses` needs a plain twin of it, too: there the loss is traced with a mark in the place
of the gather.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis, check_key, key_words, mesh_of, resharded
from dynamiq_jax.core.compat import (
    check_partitioner,
    linear_program,
    name_of,
    refusals,
    traced_for,
)
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.constraints import REMEDY, gathered_over
from dynamiq_jax.jaxprs.uses import (
    Uses,
    gathered_p,
    kept_on_auto,
    parameter,
    per_use,
    unrolled_in_part,
    value_of,
)
from dynamiq_jax.jaxprs.walk import inputs_of
from dynamiq_jax.methods import State
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.plan.plan import BY_USE
from dynamiq_jax.reduction.explicit_sums import (
    gather_whole,
    large_leaves,
    marked,
    plan_of_sums,
    reduce_unreduced,
    unreduced_axes,
)
from dynamiq_jax.reduction.reduction import Reduction, warn_of_gather
from dynamiq_jax.training.auto_axes import StaticArguments
from dynamiq_jax.training.closures import closed_arrays
from dynamiq_jax.training.loss import Wanted
from dynamiq_jax.training.scans import UNREDUCED, FoundError, Scans
from dynamiq_jax.tree.leaves import (
    axes_above_one,
    axes_of,
    describe_leaves,
    names_of,
    placed_leaves,
    restrict_spec,
)

# --- Shards ---------------------------------------------------------------------------------------


_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("dynamiq_jax_whole", default=False)
BACKWARD = 1
"""`traced_for`'s number of the backward passes that begin with `value_and_grad`'s seed."""
MARKS = 2
"""`traced_for`'s number of traces in which calls of `fsdp` leave marks."""

SCOPE = "gathered_by_dynamiq_jax"
"""The scope of every gather in a program, by which `gathers` finds it."""


def gathers(equation: JaxprEqn) -> Sequence[Any]:
    """The operands of which `gather_outside` makes whole leaves."""
    scoped = SCOPE in str(equation.source_info.name_stack)
    return [a for a in equation.invars if scoped and not isinstance(a, Literal)]


@contextlib.contextmanager
def gathered_before(whole: bool) -> Iterator[None]:
    """While it lasts, a loss is traced whose shards were gathered before it, if ``whole``."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def gather_outside(total: Reduction, params: Any, *, key: Array | None) -> Any:
    """`fsdp` outside of maps: types say which leaves are shards; others pass."""
    axis = total.axis
    if _whole.get():
        raise ValueError(
            "fsdp is called in a loss whose sharded parameters value_and_grad has "
            f"gathered: pass value_and_grad(loss, axis_name={axis.name!r}, ungathered=True)"
        )
    check_key(key)
    mesh = mesh_of(params)
    leaves, treedef = jax.tree.flatten(params)
    placed = [P(*jax.typeof(x).sharding.spec.partitions) for x in leaves]
    total = total.placed(placed)
    kept = [name for name in mesh.axis_names if name not in axis.names]
    whole = [restrict_spec(spec, kept) for spec in placed]
    large = large_leaves(total, params, placed, mesh)
    numbers = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    chosen = [i for i in numbers if total.placement.splits[i]]
    gather = Gather(total, mesh, treedef, chosen, large, placed, whole)
    shards, words = [leaves[i] for i in chosen], key_words(key)
    with jax.named_scope(SCOPE):
        if traced_for.value == MARKS:
            more = [] if words is None else [words]
            # A key's words are operands: a parameter of an equation cannot be traced.
            found = iter(gathered_p.bind(*shards, *more, gather=gather))
        else:
            found = iter(gather.typed(shards, words) if chosen else ())
    splits = total.placement.splits
    # Of chosen leaves XLA drops this. The others are integers, which no method encodes.
    exact = [resharded(x, mesh, whole[i]) if splits[i] else x for i, x in enumerate(leaves)]
    return treedef.unflatten(next(found) if i in chosen else x for i, x in enumerate(exact))


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """How one call of `fsdp` gathers shards, and scatters their gradients.

    Shards, values and gradients are lists of the chosen leaves, in their order.
    """

    total: Reduction
    mesh: AbstractMesh
    treedef: Any
    chosen: Sequence[int]
    """The numbers of leaves that are gathered."""
    large: Collection[int]
    """The numbers of leaves whose gradients stay unreduced."""
    placed: Sequence[P]
    """How leaves are sharded, and how whole ones are."""
    whole: Sequence[P]

    def values(self, shards: Sequence[Array], words: Array | None) -> list[Array]:
        """Whole leaves, without types and without derivatives."""
        own, placed = self._joined(shards), [self.placed[i] for i in self.chosen]
        total = self.total.some(self.chosen)
        found = gather_whole(total, self.mesh, own, placed, words)
        return self._put(jax.tree.leaves(found), self.whole)

    def typed(
        self, shards: Sequence[Array], words: Array | None, values: Sequence[Array] | None = None
    ) -> list[Array]:
        """Whole leaves; large ones are typed as reduced, and their terms summed, compressed.

        ``values`` are those of `values`, if they are known.
        """
        reduced = frozenset(self.total.axis.names)
        after = [
            P(*spec, reduced=reduced) if i in self.large else spec
            for i, spec in enumerate(self.whole)
        ]

        def forward(
            shards: Sequence[Array], words: Array | None, values: Sequence[Array] | None
        ) -> tuple[list[Array], Array | None]:
            found = self.values(shards, words) if values is None else values
            return self._put(found, after), words

        def backward(words: Array | None, gradients: list[Array]) -> tuple[Any, None, None]:
            if traced_for.value != BACKWARD:
                raise ValueError(
                    "fsdp outside of maps found a derivative that is not "
                    "dq.value_and_grad's: JAX's seed is a constant, of which every device would "
                    f"add all to the terms that are summed over {self.total.axis.names}; pass the "
                    f"loss to dq.value_and_grad(loss, axis_name={self.total.axis.name!r})"
                )
            back = self.total.with_specs(self._tree(self.placed))
            done = reduce_unreduced(back, self._joined(gradients), words)
            return jax.tree.leaves(done.tree), None, None

        gathered = jax.custom_vjp(lambda *args: forward(*args)[0])
        gathered.defvjp(forward, backward)
        return gathered(list(shards), words, values)

    def plain(self, place: int, shard: Array, value: Array) -> Array:
        """A whole leaf without a type: JAX sums its gradient, of which a slice is the shard's."""
        spec = self.placed[self.chosen[place]]
        # The value is known, and JAX has summed its gradient: no collective is left, only a cut.
        gathered = jax.custom_vjp(lambda shard, value: value)
        gathered.defvjp(
            lambda shard, value: (value, None),
            lambda _, gradient: (resharded(gradient, self.mesh, spec), None),
        )
        return gathered(shard, value)

    def _tree(self, values: Sequence[Any]) -> Any:
        """A tree like the parameters, of the chosen ones of a value for each leaf."""
        return self._joined([values[i] for i in self.chosen])

    def _joined(self, values: Sequence[Any]) -> Any:
        """A tree like the parameters, of values of chosen leaves, and `None` for others."""
        known = dict(zip(self.chosen, values, strict=True))
        return self.treedef.unflatten(known.get(i) for i in range(self.treedef.num_leaves))

    def _put(self, arrays: Iterable[Array], specs: Sequence[P]) -> list[Array]:
        pairs = zip(arrays, self.chosen, strict=True)
        return [resharded(x, self.mesh, specs[i]) for x, i in pairs]


# --- Gradients ------------------------------------------------------------------------------------


class _Leaves(NamedTuple):
    """The parameters, and the numbers of those leaves that go one way or another."""

    params: Any
    leaves: list[Array]
    treedef: Any
    placed: list[P]
    """How each is sharded."""
    large: set[int]
    """Leaves that the method compresses."""
    own: set[int]
    """Shards over data axes that the loss takes as they are."""
    gathered: set[int]
    """Shards over data axes that are gathered before the loss."""
    deferred: set[int]
    """Leaves that the loss takes typed as reduced, so that their gradients stay unreduced."""
    scanned: frozenset[int] = frozenset()
    """Leaves that the loss passes to `dq.scan`, which sums their gradients."""


class _Found(NamedTuple):
    """The results of differentiation: the value, and by leaf gradients that are terms or sums."""

    value: Any
    """The loss; with aux if there is one."""
    terms: dict[int, Array]
    sums: dict[int, Array]
    why: Mapping[int, str] = {}
    """Why JAX sums large leaves, by leaf."""


class _Program(NamedTuple):
    """The program that is linear in the tangents of leaves, which are its last inputs."""

    jaxpr: Any
    first: int
    """The number of the first of these."""

    @classmethod
    def of(cls, back: Callable[..., Any], given: _Leaves) -> "_Program":
        """The program of the function that gives the leaves' gradients."""
        jaxpr = linear_program(back)
        return cls(jaxpr, len(jaxpr.invars) - len(given.leaves))

    def leaves(
        self, takes: Callable[[JaxprEqn], Sequence[Any]], *, alone: bool = False, ends: str = ""
    ) -> set[int]:
        """The leaves of which operands are made; see `inputs_of`."""
        found = inputs_of(self.jaxpr, takes, alone=alone, ends=ends)
        return {i - self.first for i in found if i >= self.first}


NOT_GATHERED = "the loss takes the shard without dq.fsdp"


class ExplicitGrad(NamedTuple):
    """How to differentiate a loss of global arrays, and how to sum its gradients.

    With ``wanted.unreduced`` the gradients of deferred leaves stay unreduced. With
    ``wanted.ungathered`` the loss takes shards of leaves that data axes shard, else whole leaves.
    """

    mesh: AbstractMesh
    wanted: Wanted

    @property
    def axis(self) -> Axis:
        """The data axes."""
        return self.wanted.total.axis

    def __call__(
        self,
        loss: Callable[[Any, Any], Any],
        params: Any,
        data: Any,
        *,
        key: Array | None = None,
        state: State | None = None,
    ) -> tuple[Any, Any]:
        """The value and the gradients of ``loss(params, data)``, as `value_and_grad` has them."""
        given = self._whole_shards(self._sorted(params), key)
        # Unreduced types need Shardy.
        if given.large:
            check_partitioner()
        metrics, unreduced = self.wanted.metrics, self.wanted.unreduced
        alone = "metrics=True are those of all gradients" if metrics else ""
        alone = "a method with a state has nowhere to keep it there" if state is not None else alone
        # Last, in the place of other reasons: nobody needs a warning of what was asked for.
        alone = UNREDUCED if unreduced else alone
        scans = Scans(self.wanted.total, key, alone, mapped=False)
        try:
            with scans.trace("stops"):
                found = self._found(loss, given, data)
        except FoundError:
            # The trace ended at a scan. Marks are looked for with plain leaves, which JAX takes in
            # any use.
            plain = given._replace(deferred=set())
            held = given.treedef.unflatten(self._held(plain, ()))

            def value(params: Any, data: Any) -> Any:
                found = loss(params, data)
                return found[0] if self.wanted.has_aux else found

            reduced = scans.leaves(value, held, data)
            # Scans type these themselves, layer by layer.
            large, deferred = given.large - reduced, given.deferred - reduced
            given = given._replace(large=large, deferred=deferred, scanned=frozenset(reduced))
            with scans.trace("exchanges" if reduced else "plain"):
                found = self._found(loss, given, data)
        return found.value, self._joined(given, found, key, state)

    def _found(self, loss: Callable[[Any, Any], Any], given: _Leaves, data: Any) -> _Found:
        """The value and the gradients, as terms or sums."""
        try:
            value, back, aux = self._forward(loss, given, data)
        except refusals() as error:
            return self._despite(error, loss, given, data)
        # The linear program shows what becomes of each leaf before anything runs backwards.
        program = _Program.of(back, given)
        self._check_maps(given, program)
        axes = axes_above_one(self.axis.names, self.mesh.shape)
        untyped = functools.partial(self._untyped, kept_on_auto(program.jaxpr, axes))
        native = program.leaves(untyped)
        # A leaf that data axes split after the reshard loses its type for good, in `uses` as well.
        lost = native - program.leaves(functools.partial(untyped, split=True))
        if lost or unrolled_in_part(program.jaxpr):
            # JAX's reshard drops the type of what is whole already, and `uses` keeps it.
            for as_typed in (True, False):
                if (found := self._by_use(loss, given, data, as_typed=as_typed)) is not None:
                    return found
        why = self._warn_of_program(given, program, native)
        if native & given.deferred:  # summed by JAX they would be compressed on top
            given = given._replace(deferred=given.deferred - native)
            value, back, aux = self._forward(loss, given, data)
        try:
            with self._explained(given, data), traced_for(BACKWARD):
                (grads,) = back(self._seed(value.dtype))
        except refusals() as error:
            return self._despite(error, loss, given, data)
        pairs = zip(grads, given.leaves, strict=True)
        # Scalars were differentiated as vectors; see `_forward`.
        terms = {i: x.reshape(jnp.shape(leaf)) for i, (x, leaf) in enumerate(pairs)}
        return _Found((value, aux) if self.wanted.has_aux else value, terms, {}, why)

    def _sorted(self, params: Any) -> _Leaves:
        """Which leaf goes which way; warns of many bytes that are gathered."""
        leaves, treedef = jax.tree.flatten(params)
        placed = [P(*_spec(x).partitions) for x in leaves]
        compressed = large_leaves(self.wanted.total, params, placed, self.mesh)
        large = {i for i in compressed if leaves[i].size > 1}
        sharded = {i for i, spec in enumerate(placed) if axes_of(spec) & {*self.axis.names}}
        # With ungathered=True the loss takes shards, and gathers them by `fsdp`.
        own = sharded if self.wanted.ungathered else set()
        parts, _ = placed_leaves(params, self.mesh, treedef.unflatten(map(self._whole, placed)))
        remedy = "call dq.fsdp in each layer of the loss, and pass ungathered=True"
        warn_of_gather([parts[i] for i in sorted(sharded - own)], remedy)
        return _Leaves(params, leaves, treedef, placed, large, own, sharded - own, large - own)

    def _whole_shards(self, given: _Leaves, key: Array | None) -> _Leaves:
        """Leaves of which shards are whole, where the user says how they travel."""
        if self.wanted.gathers is None or not given.gathered:
            return given
        some = sorted(given.gathered)
        numbers = range(len(given.leaves))
        own = (given.leaves[i] if i in given.gathered else None for i in numbers)
        shards = given.treedef.unflatten(own)  # a method may be chosen by path
        found = self.wanted.whole(shards, [given.placed[i] for i in some], self.mesh, key)
        whole = dict(zip(some, jax.tree.leaves(found), strict=True))
        return given._replace(leaves=[whole.get(i, x) for i, x in enumerate(given.leaves)])

    def _held(self, given: _Leaves, deferred: Collection[int]) -> list[Array]:
        """Leaves, gathered but for the loss's own; deferred ones are typed as reduced."""
        leaves = []
        for i, x in enumerate(given.leaves):
            reduced = frozenset(self.axis.names if i in deferred else ())
            spec = P(*self._whole(given.placed[i]), reduced=reduced)
            leaves.append(x if i in given.own else resharded(x, self.mesh, spec))
        return leaves

    def _despite(
        self, error: Exception, loss: Callable[[Any, Any], Any], given: _Leaves, data: Any
    ) -> _Found:
        """The results where JAX has refused a use of typed parameters; else its error."""
        self._check_split(data, error)
        found = self._by_use(loss, given, data, as_typed=False)
        if found is None:
            raise error
        return found

    def _check_maps(self, given: _Leaves, program: _Program) -> None:
        """Refuses a map in the loss that takes shards, where the loss gets whole leaves."""
        in_maps = lambda eqn: eqn.invars if name_of(eqn) == "shard_map" else []
        if taken := program.leaves(in_maps, alone=True, ends="reshard") & given.gathered:
            what = _listed(given.params, taken, "sharded parameters")
            raise ValueError(
                f"a jax.shard_map in the loss takes {what}, which are gathered over axis "
                f"{self.axis.name!r} before the loss. Pass value_and_grad(ungathered=True), and "
                "the map takes shards, such as those of experts; or "
                "jax.reshard them in the loss before the map, which then takes whole ones"
            )

    def _warn_of_program(
        self, given: _Leaves, program: _Program, native: set[int]
    ) -> dict[int, str]:
        """Warns of shards and of ``native`` leaves whose gradients JAX sums in this program.

        Returns the reason for each.
        """
        why = dict.fromkeys(native, "the loss reshards it, and JAX's type is lost")
        if given.own:
            split = {*axes_above_one(self.axis.names, self.mesh.shape)}
            # A shard that a map takes as its own, as one of experts, has nothing to sum if all data
            # axes split it.
            apart = {i for i in given.own if axes_of(given.placed[i]) >= split}
            mapped = program.leaves(self._shards_in_maps, alone=True) & apart
            if alone := (given.own & given.large) - program.leaves(gathers) - mapped:
                self._warn_of_shards(given.params, alone)
                why |= dict.fromkeys(alone, NOT_GATHERED)
        if native:
            warn(
                f"{_listed(given.params, native)} are summed by JAX, uncompressed: the loss "
                "reshards them, and the result is not typed as reduced over axis "
                f"{self.axis.name!r}. They are whole already; leave jax.reshard out, or exclude "
                "them by Compression(exclude=...)",
            )
        return why

    def _by_use(
        self, loss: Callable[[Any, Any], Any], given: _Leaves, data: Any, *, as_typed: bool
    ) -> _Found | None:
        """Differentiates a loss that uses parameters in ways for which JAX has no rule; see `uses`.

        With ``as_typed`` the loss is traced with typed leaves, if JAX takes them. `None` if JAX
        does not take plain leaves either, or if none are large.
        """
        if not given.large:
            return None
        typed, plain = self._held(given, given.deferred), self._held(given, ())
        told, arrays = StaticArguments.of(data)
        found = Uses(frozenset(axes_above_one(self.axis.names, self.mesh.shape)))

        def flat(leaves: list[Array], arrays: list[Array]) -> tuple[Array, Any]:
            return self.wanted.apart(loss(given.treedef.unflatten(leaves), told.join(arrays)))

        def run(typed: dict[int, Array], plain: list[Array]) -> tuple[Array, Any]:
            own = [parameter(typed.get(i), x, i, found) for i, x in enumerate(plain)]
            # The batch goes in as arguments: arrays in the program itself are constants, and their
            # uses are no uses with examples.
            made = per_use(closed, [*own, *map(value_of, arrays)], found)
            value, aux = jax.tree.structure(shapes).unflatten([x.plain() for x in made])
            return self._plain(value), jax.tree.map(self._plain, aux)

        try:
            with gathered_over(self.axis.names), gathered_before(bool(given.gathered)):
                deferred = {i: typed[i] for i in sorted(given.deferred)}
                own = [deferred.get(i, x) if as_typed else x for i, x in enumerate(plain)]
                # Calls of `fsdp` leave marks, of which each use makes the twin that it needs.
                with traced_for(MARKS):
                    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(own, arrays)
                value, back, aux = jax.vjp(run, deferred, plain, has_aux=True)
                with traced_for(BACKWARD):
                    terms, sums = back(self._seed(value.dtype))
        except refusals():  # of plain leaves, too: the caller raises the first error
            return None
        self._warn_of_native(given, found)
        # A typed twin that met no examples has no terms, and a plain one that served none no sum.
        terms = {i: x for i, x in terms.items() if i in found.typed}
        alone = found.wanted | ({*range(len(plain))} - terms.keys())
        sums = {i: x for i, x in enumerate(sums) if i in alone}
        why = dict.fromkeys(found.wanted, BY_USE)
        why |= {i: f"JAX has no rule for a parameter in {use}" for i, use in found.native.items()}
        why |= {i: NOT_GATHERED for i in why.keys() & given.own}
        return _Found((value, aux) if self.wanted.has_aux else value, terms, sums, why)

    def _warn_of_native(self, given: _Leaves, found: Uses) -> None:
        """Warns of large gradients that JAX sums where a use of the parameters has no rule."""
        leaves, large = describe_leaves(given.params), given.large
        # Neither deferred nor gathered: shards that the loss takes as they are.
        if alone := found.native.keys() & (large - given.deferred - found.gathered):
            self._warn_of_shards(given.params, alone)
        native = {i: x for i, x in found.native.items() if i in large - alone}
        nbytes = sum(leaves[i].nbytes for i in native)
        # Below a percent of the bytes the warning would be noise.
        if nbytes <= sum(leaves[i].nbytes for i in large) / 100:  # norms' scales, say
            return
        warn(
            f"JAX sums gradients of {_listed(given.params, native)}, uncompressed: it has no rule "
            f"for parameters that are typed as reduced over axis {self.axis.name!r} in "
            f"{', '.join(sorted({*native.values()}))}. Compression(exclude=...) says that it is "
            "meant; a mesh of Auto axes compresses all",
        )

    def _warn_of_shards(self, params: Any, alone: Collection[int]) -> None:
        """Warns of shards whose gradients JAX sums: the loss does not gather them by our means."""
        warn(
            f"{_listed(params, alone, 'sharded parameters')} do not pass "
            "dq.fsdp as shards, and JAX sums their gradients, uncompressed. "
            "Call it for these, too, in the place of jax.reshard, or exclude them "
            "by Compression(exclude=...)",
        )

    def _joined(self, given: _Leaves, found: _Found, key: Array | None, state: State | None) -> Any:
        """The gradients, from those that are terms and those that are sums."""
        terms, sums = self._marked(given, found)
        both = terms.keys() & sums.keys()
        # Terms must stay terms, so one worker adds what is summed already.
        if self.wanted.unreduced:
            terms = {i: self._added(x, sums[i]) if i in both else x for i, x in terms.items()}
        numbers = range(len(given.leaves))
        grads = given.treedef.unflatten(terms.get(i, sums.get(i)) for i in numbers)
        if self.wanted.unreduced:
            return grads
        total = self.wanted.total.with_specs(given.treedef.unflatten(given.placed))
        done = reduce_unreduced(total, grads, key, state, metrics=self.wanted.metrics)
        parts = jax.tree.leaves(done.tree)
        for i in both:
            spec = P(*_spec(parts[i]).partitions)
            parts[i] = parts[i] + resharded(sums[i], self.mesh, spec).astype(parts[i].dtype)
        done = done._replace(tree=given.treedef.unflatten(parts))
        return done if self.wanted.metrics or state is not None else done.tree

    def _marked(self, given: _Leaves, found: _Found) -> tuple[dict[int, Array], dict[int, Array]]:
        """Terms and sums; the program says of those that JAX has summed why, for `dq.explain`."""
        # Gradients of shards that the loss gathers by `fsdp` are summed there.
        done = {i: x for i, x in found.terms.items() if not unreduced_axes(x)}
        why = {**dict.fromkeys(done, BY_USE), **found.why}
        summed = done | found.sums
        ours = given.own - found.why.keys() | given.scanned
        own = {i: x for i, x in summed.items() if i not in ours}
        plan = plan_of_sums(self.wanted.total, given.params, given.placed, self.mesh)
        after = marked(own, plan, why)
        terms = {i: after.get(i, x) if i not in found.sums else x for i, x in found.terms.items()}
        return terms, {i: after.get(i, x) for i, x in found.sums.items()}

    def _added(self, terms: Array, total: Array) -> Array:
        """Terms to which one worker, the first, adds what is summed already."""
        names, spec = self.axis.names, _spec(terms)

        def own(x: Array, y: Array) -> Array:
            return jnp.where(lax.axis_index(names) == 0, x + y.astype(x.dtype), x)

        whole = resharded(total, self.mesh, P(*spec.partitions))
        return jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=(spec, P(*spec.partitions)),
            out_specs=spec,
            check_vma=False,
        )(terms, whole)

    def without_unit_axes(
        self, loss: Callable[[Any, Any], Any], params: Any, data: Any, **options: Any
    ) -> tuple[Any, Any]:
        """Differentiates on meshes with axes of size 1, which types may name.

        The types of parameters, of the batch and in the loss may differ in these axes: the loss
        gets arrays that do not name them. Arrays that it closes over keep their types. If these
        name such axes, nothing changes.
        """
        counting = {*axes_above_one(self.mesh.axis_names, self.mesh.shape)}
        if any(axes_of(_spec(x)) - counting for _, x in closed_arrays(loss).values()):
            return self(loss, params, data, **options)

        def without_ones(x: Any) -> Any:
            if not isinstance(x, Array) or axes_of(_spec(x)) <= counting:
                return x
            return resharded(x, self.mesh, restrict_spec(_spec(x), counting))

        def typed(x: Any, spec: P) -> Any:
            """A gradient that names the axes which the spec names; unreduced ones stay."""
            return x if unreduced_axes(x) else resharded(x, self.mesh, P(*spec.partitions))

        specs = jax.tree.map(_spec, params)
        with jax.remove_size_one_mesh_axis_from_type(True):
            arrays = jax.tree.map(without_ones, (params, data))
            value, found = self(loss, *arrays, **options)
            with jax.remove_size_one_mesh_axis_from_type(False):
                if isinstance(found, Reduced):
                    return value, found._replace(tree=jax.tree.map(typed, found.tree, specs))
                return value, jax.tree.map(typed, found, specs)

    def _shards_in_maps(self, equation: JaxprEqn) -> list[Any]:
        """The operands of a `jax.shard_map` that data axes split."""
        if name_of(equation) != "shard_map":
            return []
        specs = (P(*_sharding_of(x).spec.partitions) for x in equation.invars)
        own = {*self.axis.names}
        return [x for x, spec in zip(equation.invars, specs, strict=True) if axes_of(spec) & own]

    @contextlib.contextmanager
    def _explained(self, given: _Leaves, data: Any) -> Iterator[None]:
        """The context of a loss; adds to JAX's errors what it was given, and how to avoid that."""
        try:
            with gathered_over(self.axis.names):
                yield
        except refusals() as error:
            # A batch that is split otherwise is the likeliest reason, and has a better message.
            self._check_split(data, error)
            if not given.deferred:
                raise
            error.add_note(
                f"dq.value_and_grad typed {_listed(given.params, given.deferred)} as reduced over "
                f"axis {self.axis.name!r}. JAX has no rule for some uses of such a value, as "
                "convolutions, table[ids], and elementwise products with examples. Write a lookup "
                "as table.at[ids].get(out_sharding=...). Exclude other leaves by "
                "Compression(exclude=...), and JAX sums their gradients; or take a mesh of Auto "
                "axes. Of parameters that are sharded over the axis the loss got whole ones; "
                "with ungathered=True it gets shards. A sharding constraint on Explicit axes is an "
                f"assertion, which whole parameters fail: {REMEDY}, and unbox the parameters "
                "of Flax' Linen"
            )
            raise

    def _forward(
        self, loss: Callable[[Any, Any], Any], given: _Leaves, data: Any
    ) -> tuple[Array, Callable[[Array], tuple[list[Array]]], Any]:
        """The value, the function of its cotangent that gives held leaves' gradients, and aux.

        Scalars are differentiated as vectors of one entry. The gradient of a scalar that the loss
        does not use is the constant 0, typed as unreduced, and XLA has one constant for it and for
        what a slice's derivative is padded with: from JAX 0.12 on it refuses that pad.
        """
        shapes = [jnp.shape(x) for x in given.leaves]

        def loss_of(held: list[Array]) -> tuple[Array, Any]:
            own = zip(held, shapes, strict=True)
            found = loss(given.treedef.unflatten(x.reshape(shape) for x, shape in own), data)
            value, aux = self.wanted.apart(found)
            # A loss that is a function of deferred parameters alone is typed as reduced, and its
            # cotangent would be unreduced: a 1 on every device.
            return self._plain(value), jax.tree.map(self._plain, aux)

        with self._explained(given, data), gathered_before(bool(given.gathered)):
            held = self._held(given, given.deferred)
            return jax.vjp(loss_of, [x if x.shape else x[None] for x in held], has_aux=True)

    def _untyped(self, kept: Collection[int], equation: JaxprEqn, split: bool = False) -> list[Any]:
        """The operand of a reshard that loses its type, reduced over data axes.

        With ``split`` it is one that the reshard also splits over these. On Auto axes, as in
        `jax.sharding.auto_axes`, its gradient may be whole, and JAX would take it for a term; not
        that of `kept_on_auto`, which are ``kept``.
        """
        # Everything else keeps a type, or has no rule and raises.
        if name_of(equation) != "reshard" or id(equation) in kept:
            return []
        before, after = map(_sharding_of, (*equation.invars, *equation.outvars))
        lost = (before.spec.reduced - after.spec.reduced) & {*self.axis.names}
        if split:
            lost &= axes_of(P(*after.spec.partitions))
        elif lost <= {*after.mesh.explicit_axes} and equation.outvars[0].aval.size == 1:  # type: ignore
            # JAX may well sum one number.
            return []
        return equation.invars if lost else []

    def _seed(self, dtype: Any) -> Array:
        """The cotangent of the loss: 1, in total.

        XLA may move the type of an unreduced value to a constant that the value is made of, alone
        or merged with other constants: then every device holds all of it, and the gradient is n
        times too large. No type moves into a map.
        """
        seed = jax.shard_map(
            # The barrier keeps XLA from merging this 1 with other constants.
            lambda: lax.optimization_barrier(jnp.ones((), dtype)),
            mesh=self.mesh,
            in_specs=(),
            out_specs=P(),
            check_vma=False,
        )
        return seed()

    def _check_split(self, data: Any, why: Exception) -> None:
        """Refuses a batch that is not sharded over exactly the axes in ``axis_name``."""
        own = {*self.axis.names}
        counting = axes_above_one(self.mesh.axis_names, self.mesh.shape)
        arrays = [restrict_spec(_spec(x), counting) for x in jax.tree.leaves(data) if jnp.ndim(x)]
        leading = [names_of(spec[0]) for spec in arrays]
        more = [names for names in leading if own < {*names}]
        if more:
            raise ValueError(
                f"an argument of the loss is sharded over {more[0]} along its leading axis, and "
                f"axis_name={self.axis.name!r}; pass axis_name={more[0]}: gradients are summed "
                "over all axes that split the batch, together"
            ) from why
        if arrays and not any(axes_of(spec) & own for spec in arrays):
            raise ValueError(
                f"no argument of the loss besides the parameters is sharded over axis "
                f"{self.axis.name!r}: every device would compute all examples. Shard the batch, as "
                f"jax.device_put(batch, NamedSharding(mesh, P({self.axis.name!r}))), or in "
                f"jax.jit jax.reshard(batch, P({self.axis.name!r}))"
            ) from why

    def _whole(self, spec: P) -> P:
        """The spec over axes that are not data axes."""
        return restrict_spec(
            spec, [name for name in self.mesh.axis_names if name not in self.axis.names]
        )

    def _plain(self, x: Any) -> Any:
        """``x``, typed as neither reduced nor unreduced."""
        return resharded(x, self.mesh, P(*_spec(x).partitions)) if isinstance(x, Array) else x


def _listed(params: Any, numbers: Collection[int], what: str = "leaves") -> str:
    """How many leaves, of how many bytes, the names of eight, and how many more there are."""
    leaves = [leaf for leaf in describe_leaves(params) if leaf.index in numbers]
    names = ", ".join(leaf.path or leaf.name for leaf in leaves[:8])
    rest = f" and {len(leaves) - 8} more" if len(leaves) > 8 else ""
    return f"{len(leaves)} {what} of {sum(leaf.nbytes for leaf in leaves):,} bytes ({names}{rest})"


def _spec(x: Any) -> P:
    return jax.typeof(x).sharding.spec


def _sharding_of(variable: Any) -> Any:
    return variable.aval.sharding
