"""Cuts a function at its collectives, so that a caller can put other work between them.

A *round* consists of the collectives of a function that wait for the same number of earlier
collectives. A compressed all-reduce over `Direct` has three rounds: for the statistics, the
payloads of all gradients and the payloads of the sums. The function is traced once; then its
equations run round by round::

    traced = cut(*jax.make_jaxpr(function, return_shape=True)(*args))
    progress = Progress.start(traced, *args)
    while not progress.done:
        progress.compute()      # all that needs no more than what has arrived
        progress.exchange()     # the collectives of the next round
    progress.result

Between two of these calls ``progress.ready`` has the arrays that the next call takes. A caller may
pass them through a barrier, together with other arrays.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, Literal

from dynamiq_jax.core.compat import evaluate, evaluate_on, inner_jaxprs, name_of, varying_axes
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.primitives import CALLS, CONTROL, FILLS, VIEWS, collective_of
from dynamiq_jax.jaxprs.walk import interpret, within

SMALL = 2**15
"""Bytes of an all-reduce that is not worth a round: a norm's scales, not a layer's statistics."""

SEEDS = 2**10
"""Elements of the largest array that counts as a seed: words of each worker, not noise."""

Slot = int
"""Number of a value in the program; not the slot of an encoding (`topologies.schedules`)."""


class Operation(NamedTuple):
    """An equation, and the slots of its operands and results."""

    equation: JaxprEqn
    takes: tuple[Slot | Literal, ...]
    makes: tuple[Slot, ...]
    round: int
    """How many rounds come before it."""
    moves: bool
    """Whether it is a collective, or a loop around some."""
    scope: str = ""
    """The scope of the call around it, which names the plan that runs."""


class Computation(NamedTuple):
    """A function that computes everything between two rounds; equal calls share it."""

    takes: tuple[Slot, ...]
    run: Callable[[dict[Slot, Any]], dict[Slot, Array]]
    """Values of more slots, from those of ``takes``: of all that others than this one take."""


class Traced(NamedTuple):
    """A function as rounds of collectives, with a computation ahead of each and after the last."""

    rounds: tuple[tuple[Operation, ...], ...]
    payload: int
    """The first round that moves the payload. Workers agree on little in those before it; those
    after it pass on what has arrived, as from one host's devices to the next."""
    computations: tuple[Computation, ...]
    views: tuple[Operation, ...]
    """The last operations, which only divide and shape what the others have computed. All are part
    of the results."""
    sources: tuple[Slot, ...]
    """The slots that the views and late operations, and with them the results, are made of."""
    late: tuple[Operation, ...]
    """Sums of small arrays that no other collective waits for, and what is made of them. They run
    when the result is read: XLA then makes one sum of those of several functions."""
    seeding: tuple[Operation, ...]
    """The operations that depend only on a key. They are not part of `computations`."""
    seeds: tuple[Slot, ...]
    """The slots that `seeding` makes and others take."""
    constants: dict[Slot, Any]
    takes: tuple[Slot, ...]
    """The slots of the arguments' leaves."""
    makes: tuple[Slot | Literal, ...]
    """The slots of the results' leaves."""
    shapes: Any
    """The result's shapes and dtypes."""


def run(operations: Iterable[Operation], values: dict[Slot, Any]) -> None:
    """Runs operations one by one, and adds their results to the values."""

    def read(atom: Slot | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for op in operations:
        with _named(op.scope):
            made = evaluate(op.equation, *map(read, op.takes))
        values.update(zip(op.makes, made, strict=True))


def _run_light(operations: Iterable[Operation], values: dict[Slot, Any]) -> None:
    """As `run`; equal sums of small arrays are one: each would take the network's latency."""
    groups: dict[Any, list[Operation]] = {}
    for op in operations:
        groups.setdefault(_joins(op, values), []).append(op)
    for own in groups.values():
        if len(own) == 1:
            run(own, values)
            continue
        arrays = [values[slot] for op in own for slot in slots(op.takes)]
        ends = list(itertools.accumulate(x.size for x in arrays))
        with _named(_within(own[0].scope, own[0].equation)):
            flat = jnp.concatenate([x.reshape(-1) for x in arrays])
            (total,) = evaluate_on(own[0].equation, flat)
        parts = jnp.split(total, ends[:-1])
        for op, x, part in zip(own, arrays, parts, strict=True):
            (slot,) = op.makes
            values[slot] = part.reshape(x.shape)


def _joins(op: Operation, values: Mapping[Slot, Any]) -> Any:
    """Equal for operations that can be one sum of all their arrays."""
    takes = slots(op.takes)
    if collective_of(name_of(op.equation)) != "psum" or not len(takes) == len(op.takes) == 1:
        return op.makes
    x, params = values[takes[0]], op.equation.params.items()
    told = sorted((name, str(value)) for name, value in params)
    scope = _within(op.scope, op.equation)
    return name_of(op.equation), tuple(told), scope, x.dtype, varying_axes(x)


def _within(scope: str, equation: JaxprEqn) -> str:
    """The scopes of a call and of an equation in it, one of which may name a plan."""
    return "/".join(filter(None, (scope, str(equation.source_info.name_stack))))


def _named(scope: str) -> contextlib.AbstractContextManager[Any]:
    """A block whose operations have this scope, if there is one."""
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def slots(atoms: Iterable[Slot | Literal]) -> list[Slot]:
    """Drops literals; returns the slots only."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def cut(closed: Any, shapes: Any, n_words: int = 0, *, small: int = SMALL) -> Traced:
    """Cuts a program of `jax.make_jaxpr`, with the shapes of its result, at its collectives.

    The last ``n_words`` arguments are a key's seed words. Values that depend only on them are kept
    apart, so that a caller can compute them for several calls at once. All-reduces of at most
    ``small`` bytes are late if no other collective waits for them.
    """
    numbers = itertools.count()
    takes = tuple(itertools.islice(numbers, len(closed.in_avals)))
    rounds: dict[Slot, int] = dict.fromkeys(takes, 0)
    operations: list[Operation] = []
    constants: dict[Slot, Any] = {}

    def fresh(round_number: int) -> Slot:
        slot = next(numbers)
        rounds[slot] = round_number
        return slot

    def constant(value: Any) -> Slot:
        constants[slot := fresh(0)] = value
        return slot

    def walk(closed: Any, given: Sequence[Slot | Literal], scope: str) -> list[Slot | Literal]:
        def rule(equation: JaxprEqn, own: list[Slot | Literal]) -> Sequence[Slot | Literal]:
            # A call with collectives is opened, so that rounds cut through it; others stay one
            # equation.
            moves = any(map(is_collective, within(equation)))
            if moves and (called := _called(equation)) is not None:
                return walk(called, own, _within(scope, equation))
            number = max((rounds[slot] for slot in slots(own)), default=0)
            # What a collective makes is there one round later.
            made = [fresh(number + moves) for _ in equation.outvars]
            operations.append(Operation(equation, tuple(own), tuple(made), number, moves, scope))
            return made

        return interpret(closed, given, rule, literal=lambda atom: atom, constant=constant)

    makes = walk(closed, takes, "")
    # Late sums first: without them more operations are the last, and may be views.
    early, late = _without_late(operations, small)
    computed, views = _without_views(early, makes)
    seeding, seeds = _of_words(computed, takes[len(takes) - n_words :], constants)
    # Operations without arguments stay: others than seeds may need them, too.
    apart = {op.makes for op in seeding if not seeds.isdisjoint(op.makes)}
    computed = tuple(op for op in computed if op.makes not in apart)
    viewed = {slot for op in (*late, *views) for slot in op.makes}
    wanted = slots(itertools.chain(*(op.takes for op in (*late, *views)), makes))
    sources = tuple(slot for slot in dict.fromkeys(wanted) if slot not in viewed)
    count = max((op.round + 1 for op in computed if op.moves), default=0)
    moving = [op for op in computed if op.moves]
    found = tuple(tuple(op for op in moving if op.round == number) for number in range(count))
    # One more than rounds, for what the last round brings.
    fills = _fills(computed)
    computations = tuple(
        _computation(computed, sources, fills, number) for number in range(count + 1)
    )
    taken = slots(itertools.chain(*(op.takes for op in (*computed, *late, *views)), makes))
    seeds = tuple(sorted(seeds.intersection(taken)))
    payload = _payload_round(found, computed)
    return Traced(
        found, payload, computations, views, sources, late, seeding, seeds, constants, takes,
        tuple(makes), shapes,
    )  # fmt: skip


def _of_words(
    operations: Iterable[Operation], words: Iterable[Slot], constants: Mapping[Slot, Any]
) -> tuple[tuple[Operation, ...], set[Slot]]:
    """Small operations that compute seeds, and the slots of values that depend on seed words.

    These operations depend only on seed words and on constants. They include operations without
    arguments, if others need these.
    """
    seeds, seeding = set(words), {}
    if not seeds:
        return (), seeds
    free: dict[Slot, dict[tuple[Slot, ...], Operation]] = {slot: {} for slot in constants}
    for op in operations:
        takes, sizes = slots(op.takes), [x.aval.size for x in op.equation.outvars]  # type: ignore[attr-defined]
        if op.moves or op.equation.effects or not sizes or max(sizes) > SEEDS:
            continue
        if not all(slot in seeds or slot in free for slot in takes):
            continue
        # Operations without arguments that this one needs: the seeds' computation also runs them.
        needs = {}
        for slot in takes:
            needs |= free.get(slot, {})
        # Constants alone give no seeds; their operations are noted for those that do.
        if seeds.isdisjoint(takes):
            free |= dict.fromkeys(op.makes, needs | {op.makes: op})
        else:
            seeding |= needs | {op.makes: op}
            seeds.update(op.makes)
    return tuple(seeding.values()), seeds


def seeds_of(traced: Traced, words: Array) -> dict[Slot, Array]:
    """The values of `Traced.seeds`, from a key's seed words."""
    values = traced.constants | {traced.takes[-1]: words}
    run(traced.seeding, values)
    return {slot: values[slot] for slot in traced.seeds}


def _payload_round(rounds: Sequence[Sequence[Operation]], computed: Iterable[Operation]) -> int:
    """The round with the most bytes; of several rounds that pass them on unchanged, the first."""
    source = {slot: op for op in computed if not op.moves for slot in op.makes}

    def unchanged(slot: Slot) -> Slot:
        """The slot whose values this slot's values are."""
        while slot in source and name_of(source[slot].equation) in VIEWS:
            (slot,) = slots(source[slot].takes)
        return slot

    nbytes = [sum(_bytes(op.equation) for op in operations) for operations in rounds]
    number = nbytes.index(max(nbytes)) if nbytes else 0
    # A later round with the same bytes may forward what has arrived, from a host's device to the
    # next.
    while number:
        sent = {unchanged(slot) for op in rounds[number] for slot in slots(op.takes)}
        if not sent.issubset(slot for op in rounds[number - 1] for slot in op.makes):
            break
        number -= 1
    return number


def _bytes(equation: JaxprEqn) -> int:
    """The bytes that a worker passes to a collective."""
    shapes = [atom.aval for atom in equation.invars]
    return sum(x.size * x.dtype.itemsize for x in shapes)  # type: ignore[attr-defined]


def _computation(
    operations: Sequence[Operation],
    sources: Iterable[Slot],
    fills: Mapping[Slot, Operation],
    number: int,
) -> Computation:
    """The computation before a round, which fills arrays itself."""
    own = [op for op in operations if (op.round, op.moves) == (number, False)]
    made = {slot for op in own for slot in op.makes}
    others = (op for op in operations if (op.round, op.moves) != (number, False))
    left = (x for op in others for x in slots(op.takes) if op.moves or x not in fills)
    # Only what others take leaves the computation: XLA fuses the rest, and frees it.
    leaves = sorted(made.intersection(itertools.chain(left, sources)))
    needed = slots(itertools.chain(*(op.takes for op in own)))
    filled: list[Operation] = []
    while needed:
        slot = needed.pop()
        if slot in fills and slot not in made:
            filled.append(fills[slot])
            made.update(fills[slot].makes)
            needed += slots(fills[slot].takes)
    own = sorted([*filled, *own], key=lambda op: op.makes)
    taken = dict.fromkeys(slots(itertools.chain(*(op.takes for op in own))))

    @jax.jit
    def compute(values: dict[Slot, Any]) -> dict[Slot, Array]:
        values = dict(values)
        run(own, values)
        return {slot: values[slot] for slot in leaves}

    return Computation(tuple(slot for slot in taken if slot not in made), compute)


def _fills(operations: Iterable[Operation]) -> dict[Slot, Operation]:
    """Operations that fill arrays, as with zeros, by what they make.

    Each round that takes such an array makes it: from round to round a layer's worth of zeros would
    stay in memory, and go along with what a loop carries.
    """
    found: dict[Slot, Operation] = {}
    for op in operations:
        if name_of(op.equation) in FILLS and found.keys() >= {*slots(op.takes)}:
            found |= dict.fromkeys(op.makes, op)
    return found


def _without_late(
    operations: Sequence[Operation], small: int
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """All operations but late ones, and the late ones; see `Traced.late`."""
    leads: set[Slot] = set()  # the values that some collective depends on
    ends: set[int] = set()  # the numbers of small sums that no collective depends on
    # Backwards: an operation is seen after all that depend on it.
    for number, op in reversed([*enumerate(operations)]):
        if op.moves or not leads.isdisjoint(op.makes):
            sums = collective_of(name_of(op.equation)) == "psum"
            if sums and leads.isdisjoint(op.makes) and _bytes(op.equation) <= small:
                ends.add(number)
            leads.update(slots(op.takes))
    made: set[Slot] = set()
    kept, late = [], []
    for number, op in enumerate(operations):
        # What is made of a late sum is late as well.
        if number in ends or not made.isdisjoint(slots(op.takes)):
            made.update(op.makes)
            late.append(op)
        else:
            kept.append(op)
    return tuple(kept), tuple(late)


def _without_views(
    operations: Sequence[Operation], results: Iterable[Slot | Literal]
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """The operations without views that no operation takes, and the views that the results need."""
    needed: set[Slot] = set()
    wanted = set(slots(results))
    computed, views = [], []
    # Backwards: a view that some computation takes must be known as no view of the results.
    for op in reversed(operations):
        if name_of(op.equation) not in VIEWS or not needed.isdisjoint(op.makes):
            computed.append(op)
            needed.update(slots(op.takes))
        elif not wanted.isdisjoint(op.makes):
            views.append(op)
            wanted.update(slots(op.takes))
    return tuple(reversed(computed)), tuple(reversed(views))


class Progress:
    """The state of a traced function between two rounds."""

    def __init__(self, traced: Traced, values: dict[Slot, Any], waits: list[Slot], round: int = 0):
        self._traced, self._values, self._waits, self._round = traced, values, waits, round
        self.done = self.computed = False
        """`computed`: whether the next call is of `exchange`."""
        self.payload: dict[Slot, Array] = {}
        """The values that the last kernels take, once these have run."""

    @classmethod
    def start(
        cls, traced: Traced, *args: Any, seeds: Mapping[Slot, Array] = MappingProxyType({})
    ) -> "Progress":
        """A call with these arguments, and the values of `Traced.seeds`: nothing has run."""
        values = dict(zip(traced.takes, jax.tree.leaves(args), strict=True))
        return cls(traced, values | traced.constants | dict(seeds), list(traced.takes))

    @property
    def ready(self) -> list[Array]:
        """The arrays that the next call takes; at the end, the computed part of the result."""
        return [self._values[slot] for slot in self._waits]

    @ready.setter
    def ready(self, values: Sequence[Array]) -> None:
        """Replaces these arrays."""
        self._values.update(zip(self._waits, values, strict=True))

    @property
    def shapes(self) -> Any:
        """The shapes and dtypes of `result`."""
        return self._traced.shapes

    @property
    def result(self) -> Any:
        """The result of the function."""
        # Late sums run here, next to those of other functions: XLA then joins them.
        run(self._traced.late, self._values)
        run(self._traced.views, self._values)
        leaves = self._traced.makes
        return jax.tree.structure(self.shapes).unflatten(
            x.val if isinstance(x, Literal) else self._values[x] for x in leaves
        )

    @property
    def rounds_left(self) -> int:
        """The number of remaining calls of `exchange`."""
        return len(self._traced.rounds) - self._round

    @property
    def light_left(self) -> int:
        """The number of remaining calls of `exchange` before the one with the payload."""
        return max(0, self._traced.payload - self._round)

    @property
    def held(self) -> dict[Slot, Array]:
        """The values that the rest of the call takes, such as an encoded payload."""
        traced = self._traced
        left = [operation for moves in traced.rounds[self._round :] for operation in moves]
        taken = [op.takes for op in (*left, *traced.late, *traced.views)]
        taken += [own.takes for own in traced.computations[self._round + self.computed :]]
        # Constants are in the program already: a loop need not carry them.
        needed = {*slots(itertools.chain(*taken, traced.makes))} - traced.constants.keys()
        return {slot: self._values[slot] for slot in sorted(needed & self._values.keys())}

    def holding(self, held: Mapping[Slot, Array]) -> "Progress":
        """A call in the same state, of which this is `held`: in a loop that of the turn before."""
        values = {**self._traced.constants, **held}
        same = Progress(self._traced, values, list(self._waits), self._round)
        same.computed = self.computed
        return same

    def beyond(self, fresh: "Progress") -> dict[Slot, Array]:
        """The values of `held` that ``fresh`` lacks, the same call of which nothing has run."""
        return {slot: x for slot, x in self.held.items() if slot not in fresh._values}

    def again(self, fresh: "Progress", beyond: Mapping[Slot, Array]) -> "Progress":
        """A call in the same state: with the arguments of ``fresh``, and with its `beyond`."""
        return self.holding({**fresh._values, **beyond})

    def arrived(self, payload: Mapping[Slot, Array]) -> "Progress":
        """An equal call with this `payload`; its last kernels have not run."""
        values = {**self._traced.constants, **payload}
        # All rounds count as done: the payload has been through them.
        return Progress(self._traced, values, [*payload], len(self._traced.rounds))

    def compute(self) -> None:
        """Runs all operations that need only collectives that have run."""
        traced, computation = self._traced, self._traced.computations[self._round]
        self.done = not self.rounds_left
        if self.done:
            # Taken before the last kernels run: these decode the payload, which is smaller than the
            # result.
            known = {*traced.sources, *computation.takes} & self._values.keys()
            self.payload = {x: self._values[x] for x in sorted(known - traced.constants.keys())}
        self.computed = True
        made = computation.run({slot: self._values[slot] for slot in computation.takes})
        self._values.update(made)
        if self.done:
            # Sources from earlier rounds have been waited for.
            self._waits = [slot for slot in traced.sources if slot in made]
        else:
            sent = (slot for op in traced.rounds[self._round] for slot in slots(op.takes))
            self._waits = list(dict.fromkeys(sent))

    def prepare(self) -> None:
        """Runs everything before the round with the payload."""
        # A call before may have computed it, to have the statistics ready.
        if not self.computed:
            self.compute()
        while self.light_left:
            self.exchange()
            self.compute()

    def exchange(self) -> None:
        """Runs the next round of collectives."""
        moves = self._traced.rounds[self._round]
        if self.light_left:
            _run_light(moves, self._values)
        else:
            run(moves, self._values)
        self._waits = [slot for op in moves for slot in op.makes]
        self._round += 1
        self.computed = False


def is_collective(equation: JaxprEqn) -> bool:
    """Whether an equation is a collective itself."""
    return collective_of(name_of(equation)) is not None


def _called(equation: JaxprEqn) -> Any:
    """The jaxpr that a call runs; `None` for other equations, with a warning if one is unknown."""
    name = name_of(equation)
    if name in CALLS:
        return inner_jaxprs(equation)[0]
    if not is_collective(equation) and name not in CONTROL:
        warn(
            f"JAX's primitive {name!r} has collectives in it and is not known to this version of "
            "dynamiq_jax: they count as one round, and less runs beside them",
        )
    return None
