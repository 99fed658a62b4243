"""Scans in a loss that `value_and_grad` differentiates: who reduces the gradients of the layers.

Such a loss is traced up to its first `dq.scan`, which stops the trace (`FoundError`). Then all of
it is traced with `jax.lax.scan` in the place of each, and a mark on its stacked operands. The marks
say which parameters reach only scans. In the last trace scans reduce the gradients of these in the
backward pass, and `value_and_grad` reduces those of the others.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.checks import Op
from dynamiq_jax.core.compat import trace_number
from dynamiq_jax.core.warned import warn
from dynamiq_jax.jaxprs.walk import inputs_behind, inputs_of
from dynamiq_jax.reduction.reduction import Inner, Reduction, noting
from dynamiq_jax.tree.leaves import describe_leaves

Mode = Literal["stops", "plain", "marks", "exchanges"]
"""How a call of `dq.scan` is traced: "plain" and with "marks" it is `jax.lax.scan`."""

_around: contextvars.ContextVar["Scans | None"] = contextvars.ContextVar("scans", default=None)
_numbers = itertools.count(16)
"""JAX would take up the trace of an inner `jax.jit` of another loss; `traced_for` has a few."""

UNREDUCED = "unreduced=True"
"""The reason of which nobody needs to be warned."""


REMEDIES = {
    "dq.scan": "take jax.lax.scan in its place",
    "dq.fsdp": "leave it out",
    "dq.overlapped": "call the functions one after the other in its place",
}
"""Remedies for a call that reduces gradients which another one reduces, by its name."""


class FoundError(Exception):
    """A loss calls `dq.scan`; nobody sees this but `value_and_grad`."""


def scans_around() -> "Scans | None":
    """The scans of the loss that `value_and_grad` traces now, if it traces one."""
    return _around.get()


class Scans:
    """The scans of one loss, and how its other gradients are reduced.

    Args:
      total: how `value_and_grad` reduces gradients.
      key: the key of its roundings.
      reason: why scans may not reduce any, or "".
      mapped: whether the loss runs in a map over the axis.
    """

    def __init__(self, total: Reduction, key: Array | None, reason: str = "", *, mapped: bool):
        self.total, self.key, self.reason, self.mapped = total, key, reason, mapped
        self.mode: Mode = "stops"
        self.calls = 0

    @contextlib.contextmanager
    def trace(self, mode: Mode) -> Iterator[None]:
        """A block in which the loss is traced, and its scans do this."""
        self.mode, self.calls = mode, 0
        token = _around.set(self)
        try:
            # A new number each time, so that JAX does not reuse an earlier trace of an inner
            # function, in which scans did something else.
            with trace_number(next(_numbers)):
                yield
        finally:
            _around.reset(token)

    def told(self, axis: Axis, compression: Any, key: Array | None) -> tuple[Op, Any, Array | None]:
        """How one more scan reduces: as the other gradients, unless it is told otherwise.

        Refuses other axes than those of `value_and_grad`, and its paths. The number of the scan is
        folded into the key.
        """
        self.calls += 1
        if axis.names != self.total.axis.names:
            raise ValueError(
                f"scan is over axis {axis.name!r}, and value_and_grad over "
                f"{self.total.axis.name!r}; pass both the same axis_name"
            )
        theirs = self.total.compression
        if compression is None and (theirs.by_path or theirs.exclude is not None):
            raise ValueError(
                "value_and_grad has a compression by path, and paths in a scan are those of one "
                "layer, without the name of the stack; pass scan(compression=...) for these"
            )
        # From above: small numbers are folded in elsewhere.
        if key is None and self.key is not None:
            key = jax.random.fold_in(self.key, (1 << 32) - self.calls)
        return self.total.op, theirs if compression is None else compression, key

    def leaves(self, loss: Callable[[Any, Any], Any], params: Any, data: Any) -> frozenset[int]:
        """The numbers of parameters that reach only scans; none, with a warning, if that fails.

        ``loss(params, data)`` returns the loss alone.
        """
        # Nothing is traced for marks that nobody would use.
        if self.reason:
            if self.reason != UNREDUCED:
                warn_of_scan(self.reason)
            return frozenset()
        with self.trace("marks"):
            program = jax.make_jaxpr(loss)(params, data)
        count = len(jax.tree.leaves(params))
        scanned = inputs_of(program, _marked)
        others = inputs_behind(program, _mark.name)
        if scanned and max(scanned) >= count:
            reason = (
                "an operand of it depends on an argument that is no parameter, as a mask of "
                "examples; pass that in the carry, or let the layer close over it"
            )
        elif not scanned:
            reason = "none of its operands is made of parameters"
        elif both := scanned & others:
            paths = [leaf.path for leaf in describe_leaves(params) if leaf.index in both]
            reason = (
                f"parameters {', '.join(paths[:4])} are also used outside of it; use them in the "
                "scan alone, or take jax.lax.scan"
            )
        else:
            return frozenset(scanned)
        warn_of_scan(reason)
        return frozenset()


@contextlib.contextmanager
def in_layer() -> Iterator[list[Inner]]:
    """A block that traces a layer; it gets a list of calls that reduce gradients in the layer."""
    inner = []

    def note(params: Any, call: Inner) -> Any:
        inner.append(call)
        return marked(params, call)

    with noting(note):
        yield inner


def check_once(program: Any, own: Any, total: Reduction, where: str, outer: str) -> None:
    """Refuses a program, whose first inputs are ``own``, that reduces their gradients as well.

    ``total`` is the reduction of ``outer``. Means of means are right, and only warned of: they
    travel twice.
    """
    calls: dict[Inner, None] = {}

    def takes(equation: JaxprEqn, call: Inner | None = None) -> list[Any]:
        found = equation.params["call"] if equation.primitive is _mark else None
        if found is not None:
            calls[found] = None
        return equation.invars if found is not None and found == call else []

    inputs_of(program, takes)
    mine = {*range(len(jax.tree.leaves(own)))}
    for call in [*calls]:
        axis = Axis(tuple(name for name in call.names if name in total.axis.names))
        n = axis.size if axis.mapped else None
        # Over other axes it reduces something else: FSDP over one, say, and copies over another.
        if not axis.names or n == 1 or not inputs_of(program, partial(takes, call=call)) & mine:
            continue
        said = f"{where} passes its own parameters to another {call.caller} over axis {axis.name!r}"
        remedy = f"{REMEDIES[call.caller]}: {outer} reduces all of its gradients"
        if {*axis.names} & call.shards:
            why = f"as shards, and {outer} would mix gradients of the {n} workers' different shards"
            remedy = f"pass shards to {outer}, with specs, which gathers them for the function"
        elif call.op == "mean" and n is not None:
            warn(f"{said}, and their gradients are averaged and sent twice; {remedy}")
            continue
        else:
            many = (
                f", summed by both, would be {n} times too large" if n else " would be summed twice"
            )
            why = f"and their gradients{many}"
        # A program that was refused must not be taken up by the next trace, which hears nothing.
        jax.clear_caches()
        raise ValueError(f"{said}, {why}; {remedy}")


def warn_of_scan(reason: str) -> None:
    """Warns of scans that reduce nothing."""
    warn(
        "dq.scan in a loss of dq.value_and_grad reduces no gradients, which travel after the "
        f"backward pass as with jax.lax.scan: {reason}"
    )


def marked(xs: Any, call: Inner | None = None) -> Any:
    """Operands, of a scan or of ``call``, with a mark on those that have a gradient."""
    leaves, treedef = jax.tree.flatten(xs)
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    # One mark for all operands: it is one scan.
    found = _mark.bind(*(jnp.asarray(leaves[i]) for i in moving), call=call)
    for i, x in zip(moving, found, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _marked(equation: JaxprEqn) -> list[Any]:
    """The operands of a mark."""
    return equation.invars if equation.primitive is _mark else []


_mark = Primitive("scanned_by_dynamiq_jax")
_mark.multiple_results = True
# The mark changes nothing; transformations pass it on.
_mark.def_impl(lambda *values, **_: list(values))
_mark.def_abstract_eval(lambda *types, **_: list(types))
batching.primitive_batchers[_mark] = lambda values, dims, **_: (list(values), list(dims))
ad.primitive_jvps[_mark] = lambda primals, tangents, **told: (
    _mark.bind(*primals, **told),
    list(tangents),
)
mlir.register_lowering(_mark, lambda context, *values, **_: values)
