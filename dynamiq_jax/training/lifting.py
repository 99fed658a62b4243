"""Losses on Auto axes that close over arrays of the traced program: these become arguments.

The loss is first traced with the whole batch, as `jax.value_and_grad` would. This tells which of
the arrays it uses, and what it changes, such as the key of an object that draws keys.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.jaxprs.constraints import record
from dynamiq_jax.jaxprs.walk import evaluable, used_inputs
from dynamiq_jax.training.auto_axes import AutoGrad, StaticArguments, check_closure, type_of
from dynamiq_jax.training.closures import Copy, Slot, closed_arrays, closed_variables, write
from dynamiq_jax.training.loss import Told, is_seed
from dynamiq_jax.tree.leaves import flat_specs


class Losses(NamedTuple):
    """The user's loss and weight, and how to call them with ``(params, data)``."""

    loss: Callable[..., Any]
    weight: Callable[..., Any] | None
    joined: Callable[[Callable[..., Any]], Callable[[Any, Any], Any]]

    def copied(self, arrays: Mapping[int, Any], values: Any) -> tuple["Losses", Copy]:
        """Copies that close over other values."""
        copy = Copy((self.loss, self.weight), arrays, values)
        return self._replace(loss=copy.functions[0], weight=copy.functions[1]), copy


def lifted(
    grad: AutoGrad, losses: Losses, closed_specs: Any, params: Any, data: Any, **options: Any
) -> Callable[[], Any]:
    """``grad(params, data, **options)``, with what its losses close over as more data."""
    functions = losses.loss, losses.weight
    found = closed_arrays(*functions)
    traced = {key: own for key, own in found.items() if isinstance(own[1], Tracer)}
    told = _closed_specs(closed_specs, functions, traced, grad.axis)
    # Concrete arrays are constants, which all workers have.
    if not traced:
        return grad(params, data, **options)
    first = _First.of(grad, losses, {key: x for key, (_, x) in traced.items()}, params, data)
    # What the loss does not use need not be split, and may have any number of rows.
    used = [key for i, key in enumerate(traced) if first.uses[i]]
    arrays = {key: traced[key][1] for key in used}
    names = [Told(traced[key][0].path, told[key], closed=True) for key in used]

    def own(name: str) -> Callable[[Any, Any], Any]:
        def run(params: Any, data: Any) -> Any:
            function = getattr(losses.copied(arrays, data[-1])[0], name)
            return losses.joined(function)(params, data[:-1])

        return run

    moved = dataclasses.replace(
        grad,
        loss=own("loss"),
        weight=None if losses.weight is None else own("weight"),
        batch_specs=lambda data: [*grad.batch_specs(data[:-1]), *names],
    )
    run = moved(params, (*data, [*arrays.values()]), **options)

    # Before the loss runs: a change that depends on examples is refused.
    write_all = first.written(params, data, [x for _, x in traced.values()])

    def run_and_write() -> Any:
        results = run()
        write_all()
        return results

    return run_and_write


def _closed_specs(
    told: Any, functions: tuple[Any, ...], arrays: Mapping[int, Any], axis: Axis
) -> dict[int, P | None]:
    """The spec of every array that functions close over, by its id; `None` where none is told."""
    spec_of: dict[int, P | None] = dict.fromkeys(arrays)
    if told is None:
        return spec_of
    if isinstance(told, P):
        # One spec for all is for arrays of rows; keys and scalars go their own way.
        own = lambda x: told if x.ndim and not is_seed(x) else None
        return {key: own(x) for key, (_, x) in arrays.items()}
    variables = closed_variables(*functions)
    if not isinstance(told, Mapping) or {*told} - {*variables}:
        raise ValueError(
            f"closed_specs={told!r}, and the loss closes over arrays in the variables "
            f"{sorted(variables)}; pass a PartitionSpec for all, or a dict of specs by these names"
        )
    for name, spec in told.items():
        under = [key for key, (variable, _) in arrays.items() if variable.name == name]
        if spec is None or isinstance(spec, P):
            spec_of |= dict.fromkeys(under, spec)
            continue
        leaves = jax.tree.leaves(variables[name])
        specs = flat_specs(spec, variables[name], axis.names)
        spec_of |= {id(x): own for x, own in zip(leaves, specs, strict=True) if id(x) in spec_of}
    return spec_of


class _Result(NamedTuple):
    """Stands for an array that a loss has made."""

    number: int


class _First(NamedTuple):
    """The first trace of a loss: with the whole batch, and whole keys."""

    program: Any
    uses: list[bool]
    """Whether it uses each of the closed arrays."""
    slots: list[Slot]
    """The places that it changes, with `_Result` instead of arrays."""
    n_made: int
    """The number of these arrays, which are the program's last results."""

    @classmethod
    def of(
        cls, grad: AutoGrad, losses: Losses, arrays: Mapping[int, Array], params: Any, data: Any
    ) -> "_First":
        """Traces the loss; refuses arrays that it uses and that no copy can exchange."""
        told, given = StaticArguments.of(data)
        slots: list[Slot] = []

        def run(params: Any, given: list[Any], closed: list[Any]) -> list[Any]:
            own, copy = losses.copied(arrays, closed)
            called = [own.loss] if own.weight is None else [own.loss, own.weight]
            results = [losses.joined(function)(params, told.join(given)) for function in called]
            made: list[Array] = []
            # Out of the trace, where only the places are known; the program returns the values.
            slots[:] = [_numbered(slot, arrays, made) for slot in copy.changes()]
            return [results, made]

        types = jax.tree.map(type_of, (params, given, [*arrays.values()]))
        try:
            recorded = record(run, types, grad.mesh, grad.axis, sorted(grad.manual))
        except Exception as error:
            error.add_note(
                "The loss closes over arrays of the traced program around it. So it is traced with "
                "the whole batch, too, as jax.value_and_grad would; pass the batch as an argument "
                "if that does not go"
            )
            raise
        check_closure(recorded.constants)
        used, n_inputs = used_inputs(recorded.closed), len(jax.tree.leaves(types))
        uses = [i in used for i in range(n_inputs - len(arrays), n_inputs)]
        n_made = sum(isinstance(x, _Result) for slot in slots for x in _leaves(slot.value))
        return cls(recorded.closed, uses, slots, n_made)

    def written(self, params: Any, data: Any, closed: list[Array]) -> Callable[[], None]:
        """A function that writes to the user's objects what the loss changes.

        Raises:
          ValueError: it depends on examples, and so differs between workers.
        """
        inputs = [*jax.tree.leaves(params), *StaticArguments.of(data)[1], *closed]
        # Parameters are the same on all workers, and so is what follows from them.
        first = len(jax.tree.leaves(params))
        last = evaluable(self.program, self.n_made)
        own = [x for x in inputs[first:] if x.ndim and not is_seed(x)]
        # Scalars and keys are the same on all workers, arrays may be examples.
        if any(x is y for x in own for y in last.takes(inputs)):
            raise ValueError(
                f"the loss changes {[slot.path for slot in self.slots][:4]}, which it closes over, "
                "to values of examples, and every worker has its own; return them as aux"
            )

        def write_all() -> None:
            made = last(inputs)
            for slot in self.slots:
                found = lambda x: made[x.number] if isinstance(x, _Result) else x
                write(slot, jax.tree.map(found, slot.value, is_leaf=_is_result))

        return write_all


def _is_result(x: Any) -> bool:
    return isinstance(x, _Result)


def _leaves(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=_is_result)


def _numbered(slot: Slot, arrays: Mapping[int, Array], made: list[Array]) -> Slot:
    """The slot with numbers in the place of arrays, which are added to ``made``."""

    def number(x: Any) -> Any:
        if not isinstance(x, Tracer) or any(x is own for own in arrays.values()):
            return x
        made.append(x)
        return _Result(len(made) - 1)

    return slot._replace(value=jax.tree.map(number, slot.value))
