"""LIEC-SGD: workers immediately apply the errors of their encodings (`contrib.local_error`)."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int

from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.contrib.local_error import LocalError
from dynamiq_jax.contrib.minmax import MinMax
from dynamiq_jax.core.axis import AxisName
from dynamiq_jax.core.checks import check_axis
from dynamiq_jax.optax.replicated import first_memory
from dynamiq_jax.optax.state import PerWorker, known_sizes
from dynamiq_jax.reduction.all_reduce import reducer_for
from dynamiq_jax.reduction.reduction import Reduction


class LIECState(NamedTuple):
    """The state of `liec` in ``opt_state``."""

    step: Int[Array, ""]
    """The number of updates so far, int32."""
    memory: PerWorker
    """The errors of the encodings of each worker's own chunks, f32[parameters / workers]."""
    inner: PerWorker
    """The inner optimizer's state, which differs between workers."""


def liec(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    compression: AnyPolicy | None = None,
    key: Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LIEC-SGD: local immediate error compensation, compressed in both directions.

    Every worker applies the error of its own encoding to its own parameters, in the same step
    (`contrib.local_error` has the formulas). So parameters differ between workers: keep those
    of every worker, and average them by `jax.lax.pmean`, as the paper does every 32 or 100 steps.
    ``update`` runs inside `jax.shard_map` or `jax.pmap`. For its state use `init` and `state_specs`
    of `dynamiq_jax.optax`.

    Args:
      inner: the optimizer, whose state differs between workers; `optax.sgd` in the paper.
      axis_name: as for `dynamiq_jax.psum`.
      compression: a method over `dynamiq_jax.Direct` whose chunks have the same coordinates in
        every step. Default: ``MinMax()``, 4 bits.
      key: as for `all_reduce`.

    Raises:
      ValueError: the method does not report its errors, or sorts coordinates, as `DynamiQ` does; or
        ``update`` is called outside of maps.
    """
    axis, inner = check_axis(axis_name), optax.with_extra_args_support(inner)
    compression = as_compression(compression, default=MinMax())
    exchange = dataclasses.replace(compression, method=LocalError(compression.method))

    def init(params) -> Any:
        sizes, inside = known_sizes(axis, "liec")
        memory = first_memory(params, axis, exchange)
        n_workers = 1 if inside else math.prod(sizes or ())
        first = inner.init(params)
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (n_workers, *jnp.shape(x))), first)
        state = PerWorker(axis.to_varying(stacked) if inside else stacked, axis.name)
        memory = memory or PerWorker((), axis.name)  # leaves are too small to compress
        return LIECState(jnp.zeros((), jnp.int32), memory, state)

    def update(updates, state, params=None, **extra) -> Any:
        if not axis.mapped:
            raise ValueError(
                f"liec found no map over axis {axis.name!r}; call update under jax.shard_map, with "
                "each worker's own parameters"
            )
        folded = None if key is None else jax.random.fold_in(key, state.step)
        run = reducer_for(Reduction(axis, exchange, "mean"), updates)
        found = run(updates, folded, state.memory.own() or None)
        final, after = inner.update(found.tree, state.inner.own(), params, **extra)
        memory = state.memory if found.state is None else state.memory.after(found.state)
        return final, LIECState(state.step + 1, memory, state.inner.after(after))

    return optax.GradientTransformationExtraArgs(init, update)
