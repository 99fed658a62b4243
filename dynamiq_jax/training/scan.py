"""`jax.lax.scan` over stacked layers, whose gradients are reduced beside the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.compression.shards import gathers_of
from dynamiq_jax.core.axis import Axis, AxisName, check_key, key_words
from dynamiq_jax.core.checks import Op, check_axis
from dynamiq_jax.core.compat import is_constant, with_constants
from dynamiq_jax.reduction.reduction import Reduction, noted
from dynamiq_jax.training.explicit_scan import scan_outside
from dynamiq_jax.training.in_backward import constant, constant_copies
from dynamiq_jax.training.interleaved import Traces
from dynamiq_jax.training.layers import (
    Body,
    Layers,
    Loop,
    check_rows,
    length_of,
    reducer_of_rows,
    whole_row,
)
from dynamiq_jax.training.pipeline import Chain
from dynamiq_jax.training.scans import (
    FoundError,
    check_once,
    in_layer,
    marked,
    scans_around,
)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    axis_name: AxisName,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    op: Op = "mean",
    compression: AnyPolicy | None = None,
    key: Array | None = None,
    specs: Any = None,
    copies: Any = None,
    reshard_after_forward: bool = True,
) -> tuple[Any, Any]:
    """`jax.lax.scan` over stacked layers; the backward pass reduces the gradients of ``xs``.

    Call it in a loss of `value_and_grad`, on Auto or on Explicit axes, where `jax.lax.scan` was.
    Gradients of parameters that reach only scans are reduced there; `value_and_grad` reduces the
    others. If that cannot be, it reduces all after the backward pass, and a warning says why: such
    a parameter has another use, the loss has a ``weight``, a state or metrics, or stacked operands
    depend on examples. With ``unreduced=True`` nothing is reduced, as asked. Stacked leaves that
    are sharded over data axes are refused.

    Or call it in the loss of one worker, inside of a map:

        def loss_fn(params, tokens):
            rest = dq.fsdp(params["rest"], "data")  # the embedding and the head
            x = rest["embed"][tokens]
            x, _ = dq.scan(block, x, params["layers"], "data")  # was jax.lax.scan
            return head_and_loss(rest, x, tokens)

    The result is that of `jax.lax.scan`, and `jax.grad` returns reduced gradients. In the backward
    pass the gradient of layer i + 1 travels beside the products of layer i. XLA does not move an
    exchange from one turn of a loop to another, so gradients that are reduced after `jax.grad`, or
    by `fsdp` in the layer, travel beside nothing. The program does not grow with the
    number of layers. Compile with `dynamiq_jax.jit`; otherwise transfers start late.

    ``f`` may be under `jax.checkpoint`, with any policy, and may use values of the surrounding
    function, such as a mask. Their gradients are this worker's, as if they were passed to
    `jax.lax.scan`. If a layer uses shared parameters, pass these to `fsdp` before.
    All floating-point leaves of ``xs`` count as parameters; integers and PRNG keys do not.

    `dq.overlapped` takes such a scan among its functions, as ``dq.Scanned(block)``. Then the
    embedding and the head travel beside layers, too, and differences of `dq.optax.sharded` may be
    pending.

    Args:
      f: (carry, one layer's xs) -> (carry, one layer's output), as for `jax.lax.scan`.
      init: the first carry; any pytree.
      xs: the layers' parameters, stacked along the first dimension of every leaf.
      axis_name: as for `psum`.
      length: as for `jax.lax.scan`.
      reverse: as for `jax.lax.scan`.
      unroll: as for `jax.lax.scan`.
      op: "mean" or "sum"; in `value_and_grad`, that of this function.
      compression: as for `fsdp`; in `value_and_grad` by default that of this function. It sees
        one layer's leaves: their sizes decide what is compressed.
      key: as for `psum`; zero and the layer's index are folded in. In `value_and_grad` by default
        the key of its call, with the number of the scan.
      specs: as for `fsdp`, of stacked leaves: ``P(None, "data")`` for leaves whose
        rows are split along their first dimension.
      copies: as for `fsdp`, stacked.
      reshard_after_forward: as for `overlapped`.

    Returns:
      The last carry, and the stacked outputs.

    Raises:
      TypeError: as for `jax.lax.scan`.
      ValueError: leaves have different numbers of layers; ``specs`` split the layers over the axis;
        ``f`` reduces its layer's parameters itself; or as for `fsdp`.
      NameError: it is differentiated, and ``axis_name`` is not mapped; an evaluation outside of
        maps is that of `jax.lax.scan`.
      NotImplementedError: a derivative of the derivative is taken.
    """
    axis, loop = check_axis(axis_name), (length, reverse, unroll)
    # Without floating-point leaves there is no gradient to reduce.
    if not any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in jax.tree.leaves(xs)):
        return lax.scan(f, init, xs, *loop)
    around = scans_around()
    # On Explicit axes the loss is in no map. A scan in a map there is in one of the user's, and has
    # terms of its own.
    if around is not None and (around.mapped or not axis.mapped):
        # The loss is traced again, by a function that knows of its scans.
        if around.mode == "stops":
            raise FoundError
        op, compression, key = around.told(axis, compression, key)
        if around.mode != "exchanges":
            return lax.scan(f, init, marked(xs) if around.mode == "marks" else xs, *loop)
    elif not axis.mapped:
        return lax.scan(f, init, _evaluated(xs, axis), *loop)
    gathers = gathers_of(compression)
    check_key(key, axis if axis.mapped else None)
    total = Reduction(axis, as_compression(compression), op, gathers=gathers, overlaps=True)
    check_rows(specs, axis, copied=copies is not None)
    count, xs = length_of(xs, length), noted(xs, total, "dq.scan", specs)
    if not axis.mapped:
        # Types of one layer come first here: those of the body's operands depend on them.
        order = count, reverse, unroll
        return scan_outside(total, partial(_closed, f, total), init, xs, order, key_words(key))
    reducer = reducer_of_rows(total, xs, "scan", specs=specs, copies=copies)
    # The body is traced ahead of the derivative: what it closes over becomes arguments, or the
    # backward pass could not return gradients of these.
    init, shared, body = _closed(f, total, init, whole_row(reducer, xs, copies), count)
    part = Layers(Loop(body, count, reverse, unroll, alone=True), reducer, 0)
    chain = Chain(axis, (part,), Traces(), reshard_after_forward)
    constants = constant_copies((copies,))
    found, _ = chain.call((xs,), constants, (shared, init), key_words(key), None)
    return found


def _evaluated(xs: Any, axis: Axis) -> Any:
    """``xs`` outside of maps and of `value_and_grad`, where nothing would reduce its gradients."""
    error = NameError(
        f"dq.scan is differentiated where axis {axis.name!r} is not mapped, and reduces nothing "
        "there. Pass the loss to dq.value_and_grad, or call jax.grad under jax.shard_map; without "
        "an exchange take jax.lax.scan"
    )
    return jax.tree.map(lambda x: constant(x, error), xs)


def _closed(
    f: Callable, total: Reduction, init: Any, own: Any, length: int
) -> tuple[Any, list[Any], Body]:
    """The first carry in the type of later ones, values that ``f`` closes over, and its program."""
    # `lax.scan` says what is wrong with a carry in its own words.
    turns = lambda x, own: lax.scan(lambda x, _: f(x, own), x, None, length)
    # `lax.scan` casts a weakly typed first carry; here a carry has one type from the start.
    typed = lambda x, y: lax.convert_element_type(x, y.dtype) if x.dtype != y.dtype else x
    # Both traces: the second one takes up what `jax.checkpoint` has traced in the first.
    with in_layer() as inner:
        carry, _ = jax.eval_shape(turns, init, own)
        init = jax.tree.map(typed, jax.tree.map(jnp.asarray, init), carry)
        program, shapes = jax.make_jaxpr(lambda own, x: f(x, own), return_shape=True)(own, init)
    if inner:
        check_once(program, own, total, "a layer of dq.scan", "dq.scan")
    jaxpr, constants = with_constants(program)
    # Constants of the program have no gradient, so they stay in the body.
    here = [is_constant(x) for x in constants]
    shared = [x for x, fixed in zip(constants, here, strict=True) if not fixed]

    def body(own: Any, shared: list[Any], x: Any) -> tuple[Any, Any]:
        rest = iter(shared)
        pairs = zip(constants, here, strict=True)
        known = [value if fixed else next(rest) for value, fixed in pairs]
        found = jax.core.eval_jaxpr(jaxpr, known, *jax.tree.leaves((own, x)))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return init, shared, body
