"""Wrappers of optax that use gradients before the reduction that they wrap.

Such a wrapper sees each worker's own gradients. Its results and its state then differ between
workers, where a trainer expects the same on all.
"""

import os
import sys
from typing import Any, Literal, NamedTuple

import optax

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.meshes import is_outside
from dynamiq_jax.core.warned import warn
from dynamiq_jax.reduction.worker_gradients import has_terms

_FOLDER = os.path.join(os.path.dirname(optax.__file__), "")
_SCAN = "To reduce once per window, add up its gradients in a scan and call update once"
_AFTER = "Pass optax.chain(dq.optax.all_reduce(...), {0}(inner, ...))"
_INSIDE = "Pass dq.optax.sharded({0}(inner, ...), ...)"


class _Wrapper(NamedTuple):
    """A wrapper of optax around `all_reduce` or `sharded`."""

    module: str
    why: str
    """Its effect there."""
    after: str
    """The remedy for `all_reduce`."""
    inside: str
    """The remedy for `sharded`."""
    untyped: Literal["trains", "warns", "raises"] = "raises"
    """The consequence where JAX has no types for what differs between workers."""


_WRAPPERS = {
    "MultiSteps": _Wrapper(
        "optax",
        "adds up each worker's own gradients, in a state that is typed as the same on all workers",
        f"{_AFTER}. {_SCAN}",
        f"{_INSIDE}. {_SCAN}",
        untyped="trains",
    ),
    "apply_if_finite": _Wrapper(
        "optax",
        "skips steps by each worker's own gradients, so that some workers would wait for others",
        _AFTER,
        "Leave it out: dq.optax.sharded skips steps whose gradients are not finite",
        untyped="warns",  # it trains as long as gradients are finite
    ),
    "conditionally_mask": _Wrapper(
        "optax.transforms",
        "returns zeros in some steps, which are typed as each worker's own, like its gradients",
        _AFTER,
        _INSIDE,
        untyped="trains",
    ),
    "conditionally_transform": _Wrapper(
        "optax.transforms",
        "returns each worker's own gradients in some steps",
        _AFTER,
        _INSIDE,
    ),
    "mechanize": _Wrapper(
        "optax.contrib",
        "scales updates by each worker's own gradients",
        _AFTER,
        f"It needs whole gradients, which dq.optax.all_reduce has. {_AFTER}",
    ),
}


def check_wrappers(axis: Axis, tree: Any, function: str) -> None:
    """Refuses wrappers around `init` or ``update`` of ``function``, "all_reduce" or "sharded".

    Args:
      axis: the workers.
      tree: the parameters or gradients, which say whether the call is outside of maps.
      function: whose remedy the error has.

    Raises:
      ValueError: a wrapper uses each worker's own gradients.
    """
    name = _around()
    if name is None:
        return
    wrapper = _WRAPPERS[name]
    outside = is_outside(axis, tree) or has_terms(tree)
    typed = outside or (axis.mapped and axis.tracked)
    then = "raises" if typed else wrapper.untyped
    if then == "trains" or (then == "warns" and not axis.mapped):  # `init` need not warn, too
        return
    full = f"{wrapper.module}.{name}"
    remedy = (wrapper.inside if function == "sharded" else wrapper.after).format(full)
    message = f"{full} is around dq.optax.{function}: it {wrapper.why}. {remedy}"
    if then == "raises":
        raise ValueError(message)
    warn(message)


def _around() -> str | None:
    """The innermost of these wrappers whose `init` or ``update`` is on the stack."""
    # No argument or type says what is around a transformation. A wrapper calls it directly, or
    # under `lax.cond`, which traces a branch below the call.
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_qualname.partition(".")[0]
        if name in _WRAPPERS and frame.f_code.co_filename.startswith(_FOLDER):
            return name
        frame = frame.f_back
    return None
