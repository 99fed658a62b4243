"""Differences of parameters that travel at the start of the next step (`dq.optax.sharded`).

An update changes the masters and keeps the copy. The next step adds the differences to the copy,
function by function, each before the function runs::

    update t       masters m(t+1) from m(t); the copy stays c(t); `Pending` has the key of step t
    step t + 1     c(t+1) = c(t) + decoded(m(t+1) - c(t)) of function 0, then function 0 runs
                   c(t+1) of function 1 arrives beside it, then function 1 runs, ...
    update t + 1   takes c(t+1) as the parameters

So all functions run with c(t+1), as if the differences had travelled at the end of update t. The
state does not hold differences: masters and copy determine them.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.core.axis import Axis, AxisName
from dynamiq_jax.core.serialization import Serializable
from dynamiq_jax.core.warned import warn
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.tree.leaves import describe_leaves
from dynamiq_jax.tree.placement import Padding, Split

_taken: set[AxisName] = set()
"""The axes over which this process has traced something that takes pending differences."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("ready", "words"), meta_fields=("total",)
)
@dataclasses.dataclass(frozen=True)
class Pending(Serializable):
    """Differences that have not travelled yet, and the seed and the way in which they will.

    Attributes:
      ready: whether masters have moved since the copy was made, bool[].
      words: the words of the key of the last update, uint32[2].
      total: the axis, and how differences travel.
    """

    ready: Array
    words: Array
    total: Reduction

    def check_taken(self) -> None:
        """Warns, while an update is traced, if nothing has ever taken differences over this axis.

        A step takes the differences before its update. So this trace, or an earlier one, has called
        `current`.
        """
        if self.total.axis.name not in _taken:
            warn(
                "nothing takes the pending differences of dq.optax.sharded(..., deferred=True): "
                "parameters would stay as they are; pass pending=state.pending to dq.overlapped, "
                "or call dq.optax.gathered(params, opt_state) at the top of the step",
            )

    def current(self, masters: Any, copies: Any, words: Array, specs: Any) -> Any:
        """The copy with the decoded differences of this worker's masters, the same on all workers.

        ``specs`` say how masters are split. Where the wire has the copy's dtype, rounded masters
        travel in the place of differences. Leaves that are not split take their rounded masters.
        """
        _taken.add(self.total.axis.name)
        total, _ = self.total.of_shards(masters, specs, copies)
        held, treedef = jax.tree.flatten(masters)
        found = jax.tree.leaves(copies)
        exactly = total.gathers_exactly(describe_leaves(copies))
        own: list[Array | None] = [None] * len(held)  # `None`: no leaf of the tree below
        place = total.placement
        for i, (split, padding) in enumerate(zip(place.splits, place.padding, strict=True)):
            if split:
                copy = own_slice(found[i], split, total.axis, padding)
                sent = sent_of(held[i], copy, exactly[i])
                own[i] = jnp.where(self.ready, sent, copy) if exactly[i] else sent
            else:
                # The copy is an update behind if fewer workers, before a restart, split the leaf.
                found[i] = jnp.where(self.ready, sent_of(held[i], found[i], True), found[i])
        places = [i for i, x in enumerate(own) if x is not None]
        with errors_return():
            whole = total.some(places).whole(treedef.unflatten(own), words)
        for i, x in zip(places, jax.tree.leaves(whole), strict=True):
            if not exactly[i]:
                added = jnp.where(self.ready, x, jnp.zeros_like(x))
                x = (found[i] + added).astype(found[i].dtype)
            found[i] = x
        return treedef.unflatten(found)


def sent_of(master: Array, copy: Array, exactly: bool) -> Array:
    """The difference that the owner of a slice sends, in the copy's dtype.

    If the wire has this dtype, ``exactly``, it sends the master itself.
    """
    return (master if exactly else master - copy.astype(jnp.float32)).astype(copy.dtype)


@contextlib.contextmanager
def errors_return() -> Iterator[None]:
    """Silences the warning of large errors: the next differences contain those of this gather."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*error of a super-group")
        yield


def own_slice(x: Array, split: Split, axis: Axis, padding: Padding) -> Array:
    """This worker's slice of a whole leaf, which is padded first."""
    x = padding.padded(x)
    for dimension, _ in split:
        rows = x.shape[dimension] // axis.size
        start = axis.index.astype(jnp.uint32) * rows  # JAX asks of a signed one if it is negative
        x = lax.dynamic_slice_in_dim(x, start, rows, dimension)
    return x
