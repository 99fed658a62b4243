"""Wrappers of optax that use gradients before the reduction that they wrap.

Such a wrapper sees each worker's own gradients. Its results and its state then differ between
workers, where a trainer expects the same on all.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import optax

from dynamiq_jax.core.axis import Axis, is_outside
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
    "sam": _Wrapper(
        "optax.contrib",
        "climbs along each worker's own gradients, so that parameters would differ",
        _AFTER,
        f"{_INSIDE}, with an adv_optimizer of single coordinates such as optax.sgd",
    ),
}
_AFTER_REDUCTION = "Pass optax.chain(dq.optax.all_reduce(...), optax.{0}(...), inner)"
_AFTER_UPDATES = (
    "Put it after dq.optax.sharded, with compression=dq.Policy(..., parameters=dq.F32())"
)
_CLIPS = {
    "clip_by_global_norm": "Pass dq.optax.sharded(inner, ..., max_norm=...) without it",
    "clip": "Pass dq.optax.sharded(optax.chain(optax.{0}(...), inner), ...)",
    "clip_by_block_rms": _AFTER_UPDATES,
    "adaptive_grad_clip": _AFTER_UPDATES,
}
"""Clips, and the remedies for `sharded`."""
_PASS_ON = {"masked", "partition", "inject_hyperparams", "with_extra_args_support"}
"""Functions of optax around a transformation that leave its updates as they are."""


def check_wrappers(axis: Axis, tree: Any, function: str) -> None:
    """Refuses wrappers around `init` or ``update`` of ``function``, "all_reduce" or "sharded".

    Args:
      axis: the workers.
      tree: the parameters or gradients, which say whether the call is outside of maps.
      function: whose remedy the error has.

    Raises:
      ValueError: a wrapper uses each worker's own gradients.
    """
    _warn_of_clips(function)
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


def check_deferred() -> None:
    """Refuses what would change the updates of ``deferred=True``, around them or later in a chain.

    They are zeros, and the next step's differences know of no change. The state cannot tell either:
    so this looks at the functions of optax that are on the stack.
    """
    for name, local in _running():
        if name in _PASS_ON:
            changes = []
        elif name in ("chain", "named_chain"):
            _, changes = _neighbours(name, local)
        else:
            changes = [name]
        if names := [x for x in changes if x not in ("identity", "zero_nans")]:
            raise ValueError(
                f"{', '.join(names)} would change the updates of dq.optax.sharded(..., "
                "deferred=True), which are zeros: the differences come in the next step. Pass "
                f"dq.optax.sharded(optax.chain(inner, {names[0]}(...)), ...), or leave out deferred"
            )


def _warn_of_clips(function: str) -> None:
    """Warns of a clip that is before `all_reduce` or `sharded` in a chain."""
    for name, local in _running():
        # `init` of a chain is on the stack without these variables.
        if name not in ("chain", "named_chain") or not {"update_fns", "name"} & local.keys():
            continue
        before, _ = _neighbours(name, local)
        for clip in filter(_CLIPS.__contains__, before):
            remedy = _CLIPS[clip] if function == "sharded" else _AFTER_REDUCTION
            warn(
                f"optax.{clip} is before dq.optax.{function} in a chain, and clips each worker's "
                f"own gradient, not the mean. {remedy.format(clip)}"
            )


def _neighbours(name: str, local: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The functions of optax before and after the running one in the update of a chain."""
    if name == "chain":
        members = list(local["update_fns"])
        at = members.index(local["fn"])
    else:
        members = [own.update for _, own in local["transforms"]]
        at = [own for own, _ in local["transforms"]].index(local["name"])
    names = [_root(x) for x in members]
    return names[:at], names[at + 1 :]


def _root(update: Any) -> str:
    """The function of optax that made an ``update``."""
    name = update.__qualname__.partition(".")[0]
    if name == "with_extra_args_support":
        cells = [cell.cell_contents for cell in update.__closure__ or ()]
        own = [x.update for x in cells if isinstance(x, optax.GradientTransformation)]
        return _root(own[0]) if own else name
    return name


def _around() -> str | None:
    """The innermost of these wrappers whose `init` or ``update`` is on the stack."""
    # No argument or type says what is around a transformation. A wrapper calls it directly, or
    # under `lax.cond`, which traces a branch below the call.
    return next((name for name, _ in _running() if name in _WRAPPERS), None)


def _running() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The functions of optax that are on the stack, the innermost first, and their variables."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FOLDER):
            yield frame.f_code.co_qualname.partition(".")[0], frame.f_locals
        frame = frame.f_back
