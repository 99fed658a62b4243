"""LIEC-SGD: a worker immediately applies the error of its own encoding to its own model.

LIEC-SGD ("Communication-Efficient Distributed Learning with Local Immediate Error Compensation")
compresses in both directions, over `Direct`. C(g_i) is the payload that worker i sends to the
owners of chunks::

    sum    = C(sum of C(g_i) + e)      e becomes what this encoding lost; the owner alone keeps it
    result = sum / n + g_i - C(g_i)    on every worker its own

So the mean of the workers' results equals the mean of the gradients, except for the errors e that
owners still keep. `dynamiq_jax.contrib.liec` has the optimizer.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.methods.base import Call, HopMethod, Outcome, WrappedMethod, clipped
from dynamiq_jax.methods.plain import ChunkLayout
from dynamiq_jax.topologies import Direct, Topology

ROUTE = Direct(streams=1)
"""A topology with one consecutive chunk for each owner: worker i owns slice i of n of a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalError(WrappedMethod):
    """A method whose result on a worker includes the error of that worker's own encoding.

    Do not use it with `dynamiq_jax.psum`: results differ between workers. The state, f32[d / n], is
    the accumulated error of the encodings of this worker's own chunk. Coordinates that are not
    finite do not change it.

    Attributes:
      method: the method that compresses; its chunks must have the same coordinates in every step.
    """

    method: Any = field(kw_only=False)

    native_by_default: ClassVar[bool] = True

    def __post_init__(self):
        """Checks the method."""
        tells = isinstance(self.method, HopMethod) and not self.method.needs_state
        if not tells or not isinstance(self._layout(1, 2), ChunkLayout):
            raise ValueError(
                f"method={self.method!r} does not tell what its encodings lose, or has other "
                "coordinates in a chunk in every step; pass for example dq.contrib.MinMax()"
            )

    def check(self, n_workers: int, topology: Topology | None) -> None:
        """Refuses topologies."""
        if topology is not None:
            raise NotImplementedError(
                f"topology={topology!r}: an owner's error is apart from others' over Direct only, "
                "which local errors take by themselves; leave topology=None"
            )
        self.method.check(n_workers, ROUTE)

    def wire_bits(self, size: int, n_workers: int, topology: Topology | None) -> int:
        """Bits that one worker sends to all-reduce ``size`` coordinates, as for the method."""
        return self.method.wire_bits(size, n_workers, ROUTE)

    def init(self, size: int, n_workers: int) -> Array:
        """The initial state: no errors."""
        return jnp.zeros(self._layout(size, n_workers).chunk_size, jnp.float32)

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`, except that the value differs between workers."""
        n_workers, state = call.n_workers, call.state
        size, spare = x.shape[0], self._layout(x.shape[0], n_workers).padded_size - x.shape[0]
        mine = jnp.arange(n_workers)[:, None] == call.axis.index

        def chunks(flat: Array) -> Array:
            return jnp.pad(flat, (0, spare)).reshape(n_workers, -1)

        def flat(chunks: Array) -> Array:
            return chunks.reshape(-1)[:size]

        with jax.named_scope("local_error_all_reduce"):
            y = x.astype(jnp.float32) + flat(jnp.where(mine, state, 0))
            inner = Call(call.axis, ROUTE, call.seed, keep_error=True)
            outcome = self.method.all_reduce(y, inner)
            good = chunks(jnp.isfinite(outcome.value))
            lost = chunks(clipped(outcome.lost))
            own = jnp.where(good & mine, lost, jnp.where(mine, state, 0))
            local = flat(jnp.where(mine, 0, lost)) * n_workers
            value = (outcome.value + local) / call.divisor
            return Outcome(value.astype(x.dtype), jnp.sum(own, axis=0), outcome.facts)

    def _layout(self, size: int, n_workers: int) -> ChunkLayout:
        return cast(ChunkLayout, self.method.layout(size, n_workers, ROUTE))
