"""LIEC-SGD: what a worker's own encoding loses, it applies to its own model at once.

LIEC-SGD ("Communication-Efficient Distributed Learning with Local Immediate Error Compensation")
compresses both ways. Worker i sends C(g_i) to the owners of chunks. The owner of a chunk encodes
the mean, with what its last encoding of it lost, e, and all decode that. With `Direct`::

    sum    = C(sum of C(g_i) + e)      e becomes what this encoding lost; the owner alone keeps it
    result = sum / n + g_i - C(g_i)    on every worker its own

So the mean over workers of the results has all of the gradients' mean but for what owners still
have, and nothing waits in the memories of those who send. Models drift apart by their own errors;
`liec` is the optimizer, and `average_every` brings them together.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int

from dynamiq_jax.collectives.all_reduce import reduce
from dynamiq_jax.collectives.checks import check_axis
from dynamiq_jax.comparators.minmax import MinMax
from dynamiq_jax.compression import Compression, as_compression
from dynamiq_jax.lax.axis import AxisName
from dynamiq_jax.methods.base import Call, Limits, Method, Outcome, clipped
from dynamiq_jax.methods.hops import HopMethod
from dynamiq_jax.methods.plain import ChunkLayout
from dynamiq_jax.optax import PerWorker, first_memory, known_sizes, product
from dynamiq_jax.topologies import Direct, Topology

Tree = TypeVar("Tree")

ROUTE = Direct(streams=1)
"""Chunks of one owner each, side by side: worker i's is the i-th n-th of a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalError(Method):
    """A method whose result on every worker has what that worker's own encoding lost.

    Not for `dynamiq_jax.psum`: results differ between workers. The state is f32[d / n], what the
    encodings of this worker's own chunk have lost. Coordinates that are not finite leave it alone.

    Attributes:
      method: what compresses: one whose chunks are the same coordinates in every step.
    """

    method: Any = field(kw_only=False)

    def __post_init__(self):
        """Checks the method."""
        tells = isinstance(self.method, HopMethod) and not self.method.keeps_gradients
        if not tells or not isinstance(self._layout(1, 2), ChunkLayout):
            raise ValueError(
                f"method={self.method!r} does not tell what its encodings lose, or has other "
                "coordinates in a chunk in every step; pass for example dq.comparators.MinMax()"
            )

    @property
    def needs_state(self) -> bool:
        """The owners' errors."""
        return True

    @property
    def native_by_default(self) -> bool:
        """It has a route of its own."""
        return True

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies."""
        if topology is not None:
            raise NotImplementedError(
                f"topology={topology!r}: an owner's error is apart from others' over Direct only, "
                "which local errors take by themselves; leave topology=None"
            )
        self.method.check(n_workers, ROUTE)

    def limits(self, given: Mapping[str, int], n_workers: int, *, fast_links: bool) -> Limits:
        """As the method has them."""
        return self.method.limits(given, n_workers, fast_links=fast_links)

    def native_dtype(self, dtype) -> jnp.dtype:
        """As the method has it."""
        return self.method.native_dtype(dtype)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates: those of the method."""
        return self.method.wire_bits(size, n_workers, ROUTE)

    def init(self, size: int, n_workers: int) -> Array:
        """Nothing lost yet."""
        return jnp.zeros(self._layout(size, n_workers).chunk_size, jnp.float32)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`; but the value is every worker's own."""
        n_workers, state = call.n_workers, call.state
        size, spare = x.shape[0], self._layout(x.shape[0], n_workers).padded_size - x.shape[0]
        mine = jnp.arange(n_workers)[:, None] == call.axis.index

        def chunks(flat: Array) -> Array:
            return jnp.pad(flat, (0, spare)).reshape(n_workers, -1)

        def flat(chunks: Array) -> Array:
            return chunks.reshape(-1)[:size]

        with jax.named_scope("local_error_all_reduce"):
            y = x.astype(jnp.float32) + flat(jnp.where(mine, state, 0))
            inner = Call(call.axis, ROUTE, call.seed)
            outcome, lost = self.method.all_reduce_and_lost(y, inner)
            good = chunks(jnp.isfinite(outcome.value))
            lost = chunks(clipped(lost))
            own = jnp.where(good & mine, lost, jnp.where(mine, state, 0))
            local = flat(jnp.where(mine, 0, lost)) * n_workers
            value = (outcome.value + local) / call.divisor
            return Outcome(value.astype(x.dtype), jnp.sum(own, axis=0), outcome.facts)

    def _layout(self, size: int, n_workers: int) -> ChunkLayout:
        return cast(ChunkLayout, self.method.bind(size, n_workers, ROUTE).layout)


class LIECState(NamedTuple):
    """The state of `liec` in ``opt_state``."""

    step: Int[Array, ""]
    """Updates so far, int32."""
    memory: PerWorker
    """The losses of the encodings of each worker's own chunks, f32[parameters / workers]."""
    inner: PerWorker
    """The inner optimizer's state, which differs between workers."""


def liec(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    method: Compression | Method | None = None,
    key: Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LIEC-SGD: local immediate error compensation, compressed both ways.

    Every worker applies to its own parameters what its encoding of its gradient lost, in the same
    step; only what the encoding of a mean loses is kept, by the owner of that chunk
    (see the module for the formulas). So workers' parameters differ: keep every
    worker's own, and bring them together by `average_every`, as the paper does every 32 or 100
    steps. ``update`` runs inside `jax.shard_map` or `jax.pmap`; `init` and `state_specs` of this
    module serve its state.

    Args:
      inner: the optimizer, of which every worker has a state of its own; `optax.sgd` in the paper.
      axis_name: as for `dynamiq_jax.psum`.
      method: what compresses, over `dynamiq_jax.Direct`: a method whose chunks are the same
        coordinates in every step. Default: ``MinMax()``, 4 bits.
      key: as for `all_reduce`.

    Raises:
      ValueError: the method does not tell what it loses, or sorts coordinates, as `DynamiQ`.
    """
    axis, inner = check_axis(axis_name), optax.with_extra_args_support(inner)
    request = as_compression(method or MinMax())
    exchange = dataclasses.replace(request, method=LocalError(request.method))

    def init(params) -> Any:
        sizes, inside = known_sizes(axis)
        memory = first_memory(params, axis, exchange)
        n_workers = 1 if inside else product(sizes, axis, "liec")
        first = inner.init(params)
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (n_workers, *jnp.shape(x))), first)
        state = PerWorker(axis.to_varying(stacked) if inside else stacked, axis.name, "mean")
        memory = memory or PerWorker((), axis.name, "reset")  # leaves are too small to compress
        return LIECState(jnp.zeros((), jnp.int32), memory, state)

    def update(updates, state, params=None, **extra) -> Any:
        found = reduce(
            updates,
            axis.name,
            method=exchange,
            key=None if key is None else jax.random.fold_in(key, state.step),
            state=state.memory.own() or None,
        )
        final, after = inner.update(found.tree, state.inner.own(), params, **extra)
        memory = state.memory if found.state is None else state.memory.after(found.state)
        return final, LIECState(state.step + 1, memory, state.inner.after(after))

    return optax.GradientTransformationExtraArgs(init, update)


def average_every(every: int, step: Array, params: Tree, axis_name: AxisName) -> Tree:
    """The mean of all workers' ``params`` where ``step`` is a multiple of ``every``, else these.

    A mean by `jax.lax.pmean`, the same bits on all workers. Runs inside `jax.shard_map`; other
    steps send nothing.

    Args:
      every: the period, 1 or more.
      step: int32 scalar, the same on all workers: `LIECState.step` after the update.
      params: this worker's.
      axis_name: as for `dynamiq_jax.psum`.
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1; pass 1 to average in every step")
    axis = check_axis(axis_name)

    def mean(params: Tree) -> Tree:
        return axis.to_varying(axis.pmean(params))

    own = axis.to_varying(params)
    return lax.cond(step % every == 0, mean, lambda params: params, own)
