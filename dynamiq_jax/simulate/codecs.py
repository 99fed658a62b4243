"""What the simulator knows of a method, and DynamiQ: encodings of one chunk, no collectives.

All values are *centred* gradients or sums of them, ``f32[d]`` in the gradient's order: what the
method sends apart (DynamiQ's means) is subtracted once, by `Codec.center`, and returns with
`Codec.finish`. What the workers would all-reduce ahead of the gradient is a *message*.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array
from jaxtyping import UInt

import pallas_kernels as pk
from dynamiq_jax.layout import Layout
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.plan import Plan, make_plan, pack_statistics
from dynamiq_jax.simulate.gradients import SUPER_GROUP, Values, to_bf16
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.base import n_slots

Message = Any
"""A pytree of arrays; what one worker contributes to the light all-reduce, or their total."""
Shared = Any
"""A pytree of arrays; what all workers know ahead of the first hop."""
Payload = Any


class Arrived(NamedTuple):
    """A payload to be added to the values that are encoded."""

    payload: Payload
    stage: int


class Codec(Protocol):
    """One method on one chunk; static and hashable, so that it can be a jit-static argument."""

    def measure(self, x: Values) -> Message:
        """One worker's message."""
        ...

    def merge(self, a: Message, b: Message) -> Message:
        """The message of two sets of workers."""
        ...

    def share(self, message: Message, seed: UInt[Array, " 2"]) -> Shared:
        """What follows from the message of all."""
        ...

    def center(self, shared: Shared, x: Values) -> Values:
        """A gradient as it is encoded."""
        ...

    def encode(
        self, shared: Shared, x: Values, stage: int, slot, arrived: Arrived | None = None
    ) -> Payload:
        """The payload of ``x`` plus what arrived; ``slot`` is an integer or an int32 scalar."""
        ...

    def add(self, shared: Shared, x: Values, arrived: Arrived) -> Values:
        """``x`` plus what arrived."""
        ...

    def finish(self, shared: Shared, payload: Payload) -> Values:
        """The all-reduce's result from the payload of its last stage."""
        ...


class _OneChunk(Layout):
    """A layout of a single chunk that all ``n_workers`` add to."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


class SharedPlan(NamedTuple):
    """DynamiQ's plan and the randomness of all slots."""

    plan: Plan
    noise: UInt[Array, "slots 8"]


@dataclass(frozen=True, slots=True)
class DynamiQCodec:
    """DynamiQ on a chunk of ``layout.size`` coordinates, with the library's own kernels."""

    method: DynamiQ
    layout: Layout
    slots: int

    def measure(self, x: Values) -> Array:
        """Squared norms and means as they are sent, rounded to bf16."""
        mean, sqnorm = pk.statistics(
            x, super_group_size=self.layout.super_group_size, backend=self.method.backend
        )
        return to_bf16(pack_statistics(mean, sqnorm, self.layout).astype(jnp.float32))

    def merge(self, a: Array, b: Array) -> Array:
        """Sums of statistics, in f32."""
        return a + b

    def share(self, message: Array, seed: UInt[Array, " 2"]) -> SharedPlan:
        """The plan that the library makes, from sums that were rounded to bf16."""
        plan = make_plan(message.astype(jnp.bfloat16), seed, self.layout)
        return SharedPlan(plan, pk.slot_noise(seed, self.slots, self.layout.fmt.rounding))

    def center(self, shared: SharedPlan, x: Values) -> Values:
        """``x`` less the common means."""
        size = self.layout.super_group_size
        return (x.reshape(-1, size) - shared.plan.mean[: self.layout.rows, None]).reshape(-1)

    def encode(self, shared: SharedPlan, x: Values, stage: int, slot, arrived=None) -> Array:
        """See `Codec`."""
        plan = shared.plan
        source, chunk = pk.Source(x, self._no_mean(), plan.order), jnp.zeros(1, jnp.int32)
        words = self.layout.payload_words[stage]
        target = pk.Target(plan.tiles[stage], shared.noise[slot], words)
        if arrived is None:
            return pk.compress(source, chunk, target, **self._common())[0]
        return pk.decompress_accumulate_recompress(
            self._inputs(plan, arrived), source, chunk, target, **self._common()
        )[0]

    def add(self, shared: SharedPlan, x: Values, arrived: Arrived) -> Values:
        """See `Codec`."""
        plan, zeros, chunk = shared.plan, self._no_mean(), jnp.zeros(1, jnp.int32)
        source = pk.Source(x, zeros, plan.order)
        whole = pk.Result(zeros, plan.order, self.layout.rows, jnp.float32, start=jnp.int32(0))
        total = pk.decompress_accumulate(
            self._inputs(plan, arrived), source, chunk, whole, **self._common()
        )
        return total.reshape(-1)

    def finish(self, shared: SharedPlan, payload: Array) -> Values:
        """See `Codec`."""
        plan = shared.plan
        whole = pk.Result(plan.mean_sum, plan.order, self.layout.rows, jnp.float32)
        chunk = jnp.zeros(1, jnp.int32)
        total = pk.decompress(payload[None], plan.tiles[-1], chunk, whole, **self._common())
        return total.reshape(-1)

    def _inputs(self, plan: Plan, arrived: Arrived) -> tuple[pk.Input, ...]:
        return (pk.Input(arrived.payload[None, None], plan.tiles[arrived.stage]),)

    def _no_mean(self) -> Array:
        return jnp.zeros((self.layout.super_groups,), jnp.float32)

    def _common(self) -> dict[str, Any]:
        return {"fmt": self.layout.fmt, "backend": self.method.backend}


def dynamiq_codec(
    method: DynamiQ, n_workers: int, super_groups: int, topology: Topology
) -> DynamiQCodec:
    """The codec of one chunk of ``super_groups``, as in a gradient of n such chunks.

    So every stage has the bits that the library gives it, with no padding but that of one chunk.
    """
    size = super_groups * SUPER_GROUP
    whole = method.layout(n_workers * size, n_workers, topology)
    assert whole.chunks_per_worker == 1
    sizes: dict[str, Any] = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    sizes["size"] = size
    layout = _OneChunk(**sizes)
    return DynamiQCodec(method, layout, n_slots(topology.stages(n_workers)))
