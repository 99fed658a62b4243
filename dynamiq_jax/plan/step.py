"""`dq.explain(step, *args)`: all that a step of the user's sends, read from its compiled program.

Scopes name the plans in a program (`Plan.scope`). So each of its collectives belongs to a plan, or
was put there by the user or by XLA. The bytes of the table are compared with those of the compiled
program: a table that is not what the program does says so.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
from jax.stages import Compiled

from dynamiq_jax.plan.plan import Move, Plan, known, lines_of_defaults
from dynamiq_jax.plan.program import Collective, collectives_of, scoped
from dynamiq_jax.plan.traced import Sent, bytes_by_scope

AGREES = 0.01
"""The relative difference between planned and compiled bytes that is told of."""

SHOWN = 20
"""Rows of leaves, and of other collectives, that are printed."""


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A plan that a step runs.

    Attributes:
      plan: the plan.
      times: how often the step runs it.
      sent_bytes: bytes that one worker sends for it in a step.
      whole: whether the collectives that were asked for are those of a whole number of runs.
      folded_bytes: bytes of the plan that XLA does not send: sums of constants, such as gradients
        of parameters that nothing uses.
    """

    plan: Plan
    times: int
    sent_bytes: float
    whole: bool = True
    folded_bytes: float = 0.0

    @property
    def native_bytes(self) -> float:
        """Bytes of these of leaves that are not compressed."""
        moves = (move for move in self.plan.moves if move.bucket is None)
        planned = 0.0 if self.plan.by_jax else self.times * sum(x.sent_bits for x in moves) / 8
        return max(planned - self.folded_bytes, 0.0)


@dataclass(frozen=True, slots=True)
class Other:
    """Collectives that belong to no plan: the user's own, or XLA's.

    Attributes:
      name: HLO's, such as "all-reduce".
      operation: the JAX operation that they come from, such as "dot_general" or "psum".
      array: the dtype and shape of the largest array.
      times: how often they run in a step.
      sent_bytes: bytes that one worker sends in a step.
    """

    name: str
    operation: str
    array: str
    times: int
    sent_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExplanation:
    """All that one step sends; prints as a table.

    Attributes:
      n_devices: the devices that run the program.
      plans: the plans that it runs, in the order of their first collectives.
      others: collectives without a plan, those with most bytes first.
      sent_bytes: bytes that one worker sends in a step, by its plans and other collectives.
      program_bytes: the same by the compiled program alone.
      widened_bytes: the bytes by which XLA may widen floats of 16 bits of plans, which it does in
        most collectives on CPUs.
      native_bytes: of ``sent_bytes``, leaves that are not compressed, and other collectives.
      between_hosts_bytes: of ``program_bytes``, collectives of devices on different hosts.
      counted: whether the turns of all loops around collectives are known; else one turn counts.
      rate: the rate that was passed.
      wire_ms: milliseconds of ``sent_bytes`` at this rate, or of ``between_hosts_bytes`` if there
        are several hosts; `None` without a rate.
    """

    n_devices: int
    plans: tuple[PlanRun, ...]
    others: tuple[Other, ...]
    sent_bytes: float
    program_bytes: float
    widened_bytes: float
    native_bytes: float
    between_hosts_bytes: float
    counted: bool
    rate: str | None = None
    wire_ms: float | None = None

    @property
    def pushes(self) -> bool:
        """Whether push kernels may send payloads: they are no collectives of the program."""
        return any(run.plan.pushes for run in self.plans)

    @property
    def agrees(self) -> bool:
        """Whether the compiled program sends what plans and other collectives say, within 1%."""
        if not all(run.whole for run in self.plans):
            return False
        slack = AGREES * max(self.program_bytes, 1.0)
        most = self.sent_bytes + self.widened_bytes
        return self.pushes or self.sent_bytes - slack <= self.program_bytes <= most + slack

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain_step(
    step: Callable, args: Sequence[Any], *, rate: str | None = None, per_second: float | None = None
) -> StepExplanation:
    """Explains a step for arguments of these shapes, dtypes and shardings; compiles it.

    Args:
      step: a function, jitted or not.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      rate: the rate of a worker's link, as it is printed.
      per_second: bytes per second of this rate.
    """
    jitted = step if hasattr(step, "trace") else jax.jit(lambda *args: step(*args))
    traced = jitted.trace(*args)  # type: ignore[attr-defined]
    compiled = traced.lower().compile()
    devices = _devices(compiled)
    n = max(len(devices), 1)
    host_of = [device.process_index for device in devices]
    several = len({*host_of}) > 1
    found = list(scoped(collectives_of(compiled.as_text() or "", n)))
    asked, folded = bytes_by_scope(traced.jaxpr)
    compiled_to: collections.Counter[str | None] = collections.Counter()
    for scope, collective in found:
        compiled_to[scope] += collective.total_bytes  # type: ignore[assignment]
    plans = known(dict.fromkeys(scope for scope, _ in asked))
    widens = bool(devices) and devices[0].platform == "cpu"
    own = {scope: Asked.of(scope, asked, folded) for scope in plans}
    most = {scope: told.most(widens) for scope, told in own.items()}
    # A scope with more than it asked for has a collective that XLA joined with those of others.
    joined_kinds = {p.kind for x, p in plans.items() if compiled_to[x] > most[x]} | {"all-reduce"}
    runs, widened = [], 0.0
    for scope, plan in plans.items():
        there = min(compiled_to[scope] / most[scope], 1.0) if most[scope] else 1.0
        run = own[scope].run(plan, there, joins=plan.kind in joined_kinds)
        if run is not None:
            runs.append(run)
            widened += widens * own[scope].widened(run)
    others = tuple(_others([x for scope, x in found if scope not in plans]))
    # XLA joins small sums of plans with others under one name, whose plan then sends more.
    joined = sum(compiled_to[scope] for scope in plans) - widened
    joined -= sum(run.sent_bytes for run in runs)
    if joined > 0 and not any(run.plan.pushes for run in runs):
        others += (Other("all-reduce", "joined by XLA with sums of plans", "", 1, joined),)
    unplanned = sum(x.sent_bytes for x in others)
    sent = sum(run.sent_bytes for run in runs) + unplanned
    crossing = sum(x.total_bytes for _, x in found if several and x.spans(host_of))
    wire = crossing if several else sent
    return StepExplanation(
        n_devices=n,
        plans=tuple(runs),
        others=others,
        sent_bytes=sent,
        program_bytes=sum(x.total_bytes for _, x in found),
        widened_bytes=widened,
        native_bytes=sum(run.native_bytes for run in runs) + unplanned,
        between_hosts_bytes=crossing,
        counted=all(x.counted for _, x in found),
        rate=rate,
        wire_ms=None if per_second is None else 1e3 * wire / per_second,
    )


class Asked(NamedTuple):
    """Bytes that a traced program asks its collectives to send for a plan.

    Floats of 16 bits, which XLA widens on CPUs, are apart as ``narrow``; ``folded`` is the part
    that XLA folds.
    """

    wide: float
    narrow: float
    folded_wide: float
    folded_narrow: float

    @classmethod
    def of(cls, scope: str, asked: Sent, folded: Sent) -> Self:
        """The bytes in a plan's scope."""
        return cls(*(found[scope, narrow] for found in (asked, folded) for narrow in (False, True)))

    def most(self, widens: bool) -> float:
        """The most bytes that a compiled program sends for it, under its name."""
        narrow = self.narrow - self.folded_narrow
        return self.wide - self.folded_wide + (1 + widens) * narrow

    def run(self, plan: Plan, there: float, *, joins: bool) -> PlanRun | None:
        """The plan as it runs; `None` if nothing of it travels. The rest is as for `_times`."""
        whole, once = self.wide + self.narrow, plan.asked_bytes
        folded = self.folded_wide + self.folded_narrow
        times = _times(plan, whole, there, joins=joins) if not whole or folded < whole else 0
        if not times:
            return None
        exactly = whole / once if once else 1.0
        fits = abs(exactly - round(exactly)) <= AGREES * exactly
        folded *= times / max(exactly, 1.0)
        # What JAX sums by itself is among the collectives without a plan.
        sent = 0.0 if plan.by_jax else times * plan.sent_bytes - folded
        return PlanRun(plan, times, sent, fits or plan.by_jax, folded)

    def widened(self, run: PlanRun) -> float:
        """Bytes by which XLA may widen floats of 16 bits."""
        whole, once = self.wide + self.narrow, run.plan.asked_bytes
        narrow = (self.narrow - self.folded_narrow) * once / max(whole, 1.0)
        # Samples that XLA leaves out are narrow, too.
        return max(run.times * (narrow - (once - run.plan.sent_bytes)), 0.0)


def _devices(compiled: Compiled) -> list[Any]:
    """The devices of a program, in the order of its partitions."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.NamedSharding)]
    largest = max(meshes, key=lambda mesh: mesh.size, default=None)
    if largest is not None:
        return list(largest.devices.flat)  # type: ignore[union-attr]
    sets = [x.device_set for x in shardings]
    return sorted(max(sets, key=len, default=set()), key=lambda device: device.id)


def _times(plan: Plan, asked: float, left: float, *, joins: bool) -> int:
    """How often a plan runs; 0 if XLA has dropped it, or one device runs all workers by `jax.vmap`.

    Args:
      plan: the plan.
      asked: bytes of its collectives as asked for.
      left: the part of its collectives that the compiled program has under its name.
      joins: whether native collectives of this kind may be under another plan's name. XLA joins
        sums, and drops what nobody reads, or what repeats another gather.
    """
    # Samples for a seed are asked for, and XLA leaves them out if the seed is a key's.
    once = plan.asked_bytes
    times = asked / once if once else 1.0
    payloads = any(bucket.route.topology is not None for bucket in plan.buckets)
    if plan.pushes or (joins and not payloads):
        left = 1.0
    unasked = once > 0 and not asked and not (plan.by_jax or plan.pushes)
    return 0 if unasked or not left else max(round(times * left), 1)


def _others(found: Sequence[Collective]) -> list[Other]:
    """Collectives without a plan, those alike in one row."""
    rows: dict[tuple[str, str, str], list[Collective]] = collections.defaultdict(list)
    for x in found:
        rows[x.name, x.op_name.rpartition("/")[2].rstrip(")"), x.array].append(x)
    told = [
        Other(*key, sum(x.times for x in own), sum(x.total_bytes for x in own))
        for key, own in rows.items()
    ]
    return sorted(told, key=lambda row: -row.sent_bytes)


def _rows_of(run: PlanRun) -> Iterator[tuple[str, ...]]:
    """The rows of a plan: one for what travels natively, and one for each method."""
    groups: dict[str, list[Move]] = {}
    for move in run.plan.moves:
        groups.setdefault(move.how if move.bucket is not None else "native", []).append(move)
    for how, own in groups.items():
        leaves = sum(len(move.leaves) for move in own)
        size = sum(move.size for move in own)
        of = f"{leaves} {'leaf' if leaves == 1 else 'leaves'}, {size:,} coordinates"
        if how == "native":
            by = "by JAX: see below" if run.plan.by_jax else "natively"
            how = "+".join(sorted({move.how for move in own})) + f", {by}"
        else:
            of += f", {len(own)} bucket{'s' if len(own) > 1 else ''}"
        sent = run.times * sum(move.sent_bits for move in own) / 8
        kind = run.plan.kind + " of cotangents" * run.plan.backward
        nbytes = "" if run.plan.by_jax else f"{sent:,.0f}"
        yield kind, of, how, str(run.times), nbytes


def _lines(told: StepExplanation) -> list[str]:
    rows: list[tuple[str, ...]] = [("collective", "of", "how", "times", "bytes/step")]
    natives: list[tuple[Move, int]] = []
    for run in told.plans:
        rows += _rows_of(run)
        natives += [(move, run.times) for move in run.plan.moves if move.bucket is None]
    for other in told.others[:SHOWN]:
        of = ", ".join(filter(None, (other.array, f"no plan: {other.operation or 'XLA'}")))
        rows.append((other.name, of, "natively", str(other.times), f"{other.sent_bytes:,.0f}"))
    left = told.others[SHOWN:]
    if left:
        sent = sum(x.sent_bytes for x in left)
        rows.append((f"{len(left)} more", "no plan", "natively", "", f"{sent:,.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = "<<<>>"
    line = lambda row: "  ".join(
        f"{cell:{align}{width}}" for cell, align, width in zip(row, aligns, widths, strict=True)
    )
    rule = "-" * len(line(rows[0]))
    count = f"{told.n_devices} device{'s' if told.n_devices > 1 else ''}"
    total = f"One worker of {count} sends {told.sent_bytes:,.0f} bytes a step"
    if told.sent_bytes:
        total += f", {100 * told.native_bytes / told.sent_bytes:.1f}% of them natively"
    lines = [total + ".", "", line(rows[0]), rule, *map(line, rows[1:])]
    if told.between_hosts_bytes:
        lines.append(f"Between hosts: {told.between_hosts_bytes:,.0f} bytes.")
    if folded := sum(run.folded_bytes for run in told.plans):
        lines.append(
            f"Of these plans XLA does not send {folded:,.0f} bytes, sums of constants such as "
            "gradients of parameters that nothing uses."
        )
    if told.wire_ms is not None:
        lines.append(f"At {told.rate} the wire takes {told.wire_ms:,.1f} ms a step.")
    if not told.counted:
        lines.append("A loop whose number of turns is not known counts as one turn.")
    if not told.agrees:
        lines.append(
            f"The compiled program sends {told.program_bytes:,.0f} bytes, which is not what its "
            "plans say."
        )
    if told.pushes:
        lines.append(
            "Push kernels send payloads of some plans; they are no collectives of the program."
        )
    lines += lines_of_defaults(x for run in told.plans for x in run.plan.defaults)
    if natives:
        lines += ["", "Leaves that travel natively:"]
        natives.sort(key=lambda entry: -entry[0].sent_bits * entry[1])
        for move, _ in natives[:SHOWN]:
            leaf = move.leaves[0]
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            lines.append(f"  {leaf.label} {shape} {move.how}: {move.reason}")
        if len(natives) > SHOWN:
            lines.append(f"  and {len(natives) - SHOWN} more")
    return lines


def is_step(x: Any) -> bool:
    """Whether `dq.explain` got a step, and not a tree of parameters."""
    return callable(x) and jax.tree_util.all_leaves([x])  # a model of equinox is callable, too
